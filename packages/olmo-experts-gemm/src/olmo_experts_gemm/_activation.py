"""The activations of an expert's hidden layer, in plain torch.

    swiglu          silu(gate) * up                             Shazeer, arXiv:2002.05202
    geglu           gelu(gate) * up, the exact gelu             the same
    relu_squared    relu(h)^2, without a gate                   So et al., arXiv:2109.08668
    clamped_swiglu  g sigmoid(1.702 g) (u + 1) with g = min(gate, 7), u = clamp(up, -7, 7)   gpt-oss

Each of them makes 0 of zeros, so rows of zeros stay rows of zeros.

Shapes: R rows, H expert hidden width.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

Activation = Literal["swiglu", "geglu", "relu_squared", "clamped_swiglu"]

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
_LIMIT, _ALPHA = 7.0, 1.702


def check_activation(activation: str) -> None:
    """The name is known."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"`activation` must be one of {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}."
        )


def has_gate(activation: str) -> bool:
    """Whether the first stack holds gate rows before the up rows."""
    return activation != "relu_squared"


def activate(hidden: Tensor, activation: str) -> Tensor:
    """The layer (R, H) of `[gate, up]` (R, 2H), or of (R, H) for one without a gate.

    `hidden` may be overwritten: what backward keeps of a layer without a gate lies in its memory.
    """
    if not has_gate(activation):
        return hidden.relu_().square()
    gate_RH, up_RH = hidden.chunk(2, dim=-1)
    if activation == "swiglu":
        return torch.nn.functional.silu(gate_RH) * up_RH
    if activation == "geglu":
        return torch.nn.functional.gelu(gate_RH) * up_RH
    gate_RH = gate_RH.clamp(max=_LIMIT)
    return gate_RH * torch.sigmoid(_ALPHA * gate_RH) * (up_RH.clamp(-_LIMIT, _LIMIT) + 1)
