"""The layers that are compared: ours, SonicMoE's, and the straightforward one of torch.

All three do the same work. The router is a linear layer in bfloat16, the best K logits, and a
softmax over those in float32; then the experts, and the weighted sum of their outputs. Everything
is differentiable: tokens, router and both stacks of weights get gradients.

Shapes: T tokens, K experts a token, E experts, R rows, D model width, H hidden width.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from cells import OURS, Settings
from olmo_experts_gemm import moe_mlp
from shapes import WEIGHT_STD, LayerShape, draw_tokens_and_router
from torch import Tensor

SONIC = "sonicmoe"
TORCH = "torch"
_torch_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """What every contender of one cell is given."""

    x_TD: Tensor
    wg_ED: Tensor
    w_gate_up_E2HD: Tensor
    w_down_EDH: Tensor
    dy_TD: Tensor
    top_k: int

    @property
    def imbalance(self) -> float:
        """Routes of the busiest expert over the mean."""
        ids_TK, _ = route(self.x_TD, self.wg_ED, self.top_k)
        counts_E = torch.bincount(ids_TK.flatten(), minlength=self.wg_ED.shape[0])
        return float(counts_E.max() / counts_E.float().mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One contender.

    Attributes:
        leaves: Tokens, router, first and second stack of weights, in the layout that it wants.
        function: From the leaves to the output.
        dy_TD: The incoming gradient.
        to_gate_up: From its gradient of the first stack to gate rows before up rows.
    """

    leaves: tuple[Tensor, ...]
    function: Callable[..., Tensor]
    dy_TD: Tensor
    to_gate_up: Callable[[Tensor], Tensor] = lambda gradient: gradient

    def forward(self) -> Tensor:
        """The output, with all that a backward pass would need."""
        return self.function(*self.leaves)

    def both(self) -> tuple[Tensor, ...]:
        """The output, and the gradients of the leaves."""
        y_TD = self.forward()
        return y_TD, *torch.autograd.grad(y_TD, self.leaves, self.dy_TD)

    def results(self) -> dict[str, Tensor]:
        """What `both` returns, in one layout for all contenders."""
        y_TD, dx_TD, dwg_ED, dw_gate_up, dw_down_EDH = self.both()
        return {
            "y": y_TD.detach(),
            "dx": dx_TD,
            "d router": dwg_ED,
            "d gate_up": self.to_gate_up(dw_gate_up),
            "d down": dw_down_EDH,
        }


def draw(shape: LayerShape, routing: str, settings: Settings) -> Operands:
    """Random normal operands."""
    options = {"device": settings.device, "dtype": torch.bfloat16}
    T, D, H, E = shape.T, shape.D, shape.H, shape.E
    x_TD, wg_ED = draw_tokens_and_router(shape, routing, settings.device, settings.generator)
    return Operands(
        x_TD=x_TD,
        wg_ED=wg_ED,
        w_gate_up_E2HD=torch.randn(E, 2 * H, D, **options).mul_(WEIGHT_STD),
        w_down_EDH=torch.randn(E, D, H, **options).mul_(WEIGHT_STD),
        dy_TD=torch.randn(T, D, **options),
        top_k=shape.K,
    )


def route(x_TD: Tensor, wg_ED: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Expert ids (T, K) int64 and weights (T, K) float32."""
    logits_TE = torch.nn.functional.linear(x_TD, wg_ED)
    best_TK, ids_TK = logits_TE.topk(K, dim=-1)
    return ids_TK, best_TK.softmax(dim=-1, dtype=torch.float32)


def our_route(x_TD: Tensor, wg_ED: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """The same by olmo-routing where that can be imported, whose gate is one kernel."""
    if importlib.util.find_spec("olmo_routing") is None:
        return route(x_TD, wg_ED, K)
    routing = importlib.import_module("olmo_routing").route(
        torch.nn.functional.linear(x_TD, wg_ED),
        K,
        gate="softmax_topk",
        impl="triton" if x_TD.is_cuda else "reference",
    )
    return routing.expert_ids_TK, routing.weights_TK


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().requires_grad_() for tensor in tensors)


def ours(operands: Operands, impl: Any, pack: Any = None) -> Layer:
    """The router of `our_route`, and `moe_mlp`, which keeps its activations as `pack` does."""

    def function(x_TD: Tensor, wg_ED: Tensor, w_gate_up_E2HD: Tensor, w_down_EDH: Tensor) -> Tensor:
        ids_TK, weights_TK = our_route(x_TD, wg_ED, operands.top_k)
        return moe_mlp(x_TD, ids_TK, weights_TK, w_gate_up_E2HD, w_down_EDH, impl=impl, pack=pack)

    o = operands
    leaves = _leaves(o.x_TD, o.wg_ED, o.w_gate_up_E2HD, o.w_down_EDH)
    return Layer(leaves=leaves, function=function, dy_TD=o.dy_TD)


def straightforward(operands: Operands) -> Layer:
    """Sort, gather, multiply, activate, multiply, weigh, and add into the tokens."""

    def function(x_TD: Tensor, wg_ED: Tensor, w_gate_up_E2HD: Tensor, w_down_EDH: Tensor) -> Tensor:
        ids_TK, weights_TK = route(x_TD, wg_ED, operands.top_k)
        ids_R = ids_TK.flatten()
        order_R = ids_R.argsort(stable=True)
        token_R = order_R // operands.top_k
        counts_E = torch.bincount(ids_R, minlength=wg_ED.shape[0])
        offsets_E = counts_E.cumsum(0).to(torch.int32)
        hidden_R2H = _torch_grouped_mm(x_TD[token_R], w_gate_up_E2HD.mT, offs=offsets_E)
        gate_RH, up_RH = hidden_R2H.chunk(2, dim=-1)
        act_RH = torch.nn.functional.silu(gate_RH) * up_RH
        y_RD = _torch_grouped_mm(act_RH, w_down_EDH.mT, offs=offsets_E)
        y_RD = y_RD * weights_TK.flatten()[order_R, None].to(y_RD.dtype)
        return torch.zeros_like(x_TD).index_add(0, token_R, y_RD)

    o = operands
    leaves = _leaves(o.x_TD, o.wg_ED, o.w_gate_up_E2HD, o.w_down_EDH)
    return Layer(leaves=leaves, function=function, dy_TD=o.dy_TD)


def sonic(operands: Operands, module: ModuleType) -> Layer:
    """SonicMoE's layer, by the function that its module and its own benchmark call.

    That function is its `MoE` module without the balance loss, which no other contender computes.
    It wants gate and up rows in turn, its default layout.
    """
    E, width, D = operands.w_gate_up_E2HD.shape

    def function(x_TD: Tensor, wg_ED: Tensor, w_turns_E2HD: Tensor, w_down_EDH: Tensor) -> Tensor:
        return module.moe_TC_softmax_topk_layer(
            x_TD,
            wg_ED,
            w_turns_E2HD.permute(1, 2, 0),
            None,
            w_down_EDH.permute(1, 2, 0),
            None,
            operands.top_k,
            torch.cuda.current_stream().cuda_stream if x_TD.is_cuda else 0,
            "swiglu",
        )[0]

    def to_gate_up(gradient: Tensor) -> Tensor:
        return gradient.reshape(E, width // 2, 2, D).transpose(1, 2).reshape(E, width, D)

    o = operands
    in_turns = o.w_gate_up_E2HD.view(E, 2, width // 2, D).transpose(1, 2).reshape(E, width, D)
    leaves = _leaves(o.x_TD, o.wg_ED, in_turns, o.w_down_EDH)
    return Layer(leaves=leaves, function=function, dy_TD=o.dy_TD, to_gate_up=to_gate_up)


Make = Callable[[Operands], Layer]


def packed(shape: LayerShape, impl: Any) -> Make | None:
    """Ours with saved activations in MXFP8, if this is the whole repository and widths allow it."""
    if shape.D % 32 or shape.H % 32 or importlib.util.find_spec("olmo_mxfp8") is None:
        return None
    pack = importlib.import_module("olmo_mxfp8").MXPacker()
    return lambda operands: ours(operands, impl, pack)


def contenders(impl: Any) -> tuple[dict[str, Make], str]:
    """Each contender's maker by name, ours first, and why SonicMoE is missing, if it is."""
    makers: dict[str, Make] = {OURS: lambda operands: ours(operands, impl)}
    try:
        module = importlib.import_module("sonicmoe")
    except Exception as error:  # an import of CUDA libraries can fail in many ways
        makers[TORCH] = straightforward
        return makers, f"{type(error).__name__}: {error}"
    makers[SONIC] = lambda operands: sonic(operands, module)
    makers[TORCH] = straightforward
    return makers, ""
