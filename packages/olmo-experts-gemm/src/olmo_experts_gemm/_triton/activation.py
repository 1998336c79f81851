# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""The activations of an expert's hidden layer and their derivatives, in float32."""

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, KIND: tl.constexpr):
    """The hidden layer of `gate` and `up`; `up` is ignored by a kind without a gate."""
    if KIND == "swiglu":
        return gate * tl.sigmoid(gate) * up
    elif KIND == "geglu":
        return _gelu(gate) * up
    elif KIND == "relu_squared":
        positive = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive
    else:
        tl.static_assert(KIND == "clamped_swiglu")
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)


@triton.jit
def activation_gradient(g, gate, up, KIND: tl.constexpr):
    """The hidden layer, and the gradients of `gate` and `up` for a gradient `g` of it."""
    if KIND == "swiglu":
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        return silu * up, g * up * (sigmoid + silu * (1.0 - sigmoid)), g * silu
    elif KIND == "geglu":
        gelu = _gelu(gate)
        density = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
        slope = 0.5 * (1.0 + tl.erf(0.7071067811865476 * gate)) + gate * density
        return gelu * up, g * up * slope, g * gelu
    elif KIND == "relu_squared":
        positive = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive, g * 2.0 * positive, g
    else:
        tl.static_assert(KIND == "clamped_swiglu")
        inside_gate = (gate <= 7.0).to(tl.float32)
        inside_up = ((up >= -7.0) & (up <= 7.0)).to(tl.float32)
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        sigmoid = tl.sigmoid(1.702 * gate)
        glu = gate * sigmoid
        slope = sigmoid + 1.702 * glu * (1.0 - sigmoid)
        return glu * up, g * up * slope * inside_gate, g * glu * inside_up


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
