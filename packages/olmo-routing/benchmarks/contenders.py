"""The ways from router logits to a row plan that are compared, and back to the logits' gradient.

The plan alone, of ids that are there already, is what SonicMoE calls its routing metadata.

All choose the best K logits of a token and weigh them by a softmax over those, in float32. All
return the weights, the end of each expert's rows, and the routes in the order of the rows; ours and
torch's the scores over all experts as well, which balance losses take.

Shapes: T tokens, K experts a token, E experts, R = T * K rows.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from olmo_routing import plan_rows, route
from torch import Tensor

OURS = "ours"


@dataclass(frozen=True, slots=True)
class Shape:
    """One problem."""

    T: int
    E: int
    K: int

    def __str__(self) -> str:
        return f"T {self.T}, E {self.E}, K {self.K}"


SHAPES = (Shape(32768, 128, 8), Shape(16384, 64, 4))
TINY = (Shape(64, 16, 4), Shape(40, 8, 2))

Made = tuple[Tensor, Tensor, Tensor]  # the weights (T, K), the ends (E,) and the routes (R,)


@dataclass(frozen=True, slots=True)
class Contender:
    """One contender at one shape."""

    leaf_TE: Tensor
    function: Callable[[Tensor], Made]
    plan: Callable[[], object]
    g_weights_TK: Tensor
    capturable: bool = True

    def call(self, what: str) -> Callable[[], object]:
        """What is timed: `"plan alone"`, `"forward"` or `"forward+backward"`."""
        return {"plan alone": self.plan, "forward": self.forward, "forward+backward": self.both}[
            what
        ]

    def forward(self) -> Made:
        """With all that a backward pass would need."""
        return self.function(self.leaf_TE)

    def both(self) -> tuple[Tensor, ...]:
        """What is made, and the gradient of the logits."""
        # A leaf of this call's stream: autograd waits for that of a leaf, which ends a capture.
        leaf_TE = self.leaf_TE.detach().requires_grad_()
        made = self.function(leaf_TE)
        return *made, *torch.autograd.grad(made[0], leaf_TE, self.g_weights_TK)


def draw(shape: Shape, device: str) -> tuple[Tensor, Tensor]:
    """Logits (T, E) without ties, also in bfloat16, and the gradient of the weights (T, K).

    A token's logits are a random order of the E multiples of 4 / E within [-2, 2), E a power of two
    up to 256: every expert is as likely as any other.
    """
    order_TE = torch.rand(shape.T, shape.E, device=device).argsort(dim=1)
    logits_TE = (order_TE - shape.E // 2) * (4.0 / shape.E)
    return logits_TE, torch.randn(shape.T, shape.K, device=device)


def contenders(shape: Shape, device: str, impl: Any) -> tuple[dict[str, Contender], str]:
    """Each contender by name, ours first, and why SonicMoE is missing, if it is."""
    logits_TE, g_weights_TK = draw(shape, device)
    ids_TK = logits_TE.topk(shape.K, dim=-1).indices

    def make(
        function: Callable[[Tensor], Made],
        plan: Callable[[Tensor], object],
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Contender:
        leaf_TE, ids = logits_TE.to(dtype).requires_grad_(), ids_TK
        if dtype == torch.bfloat16:  # SonicMoE's plan wants the ids as its router gives them
            ids = ids_TK.to(torch.int32)
        return Contender(leaf_TE, function, lambda: plan(ids), g_weights_TK, **options)

    made = {
        OURS: make(lambda z: _ours(z, shape, impl), lambda ids: plan_rows(ids, shape.E, impl=impl)),
        "torch": make(
            lambda z: _torch(z, shape, True),
            lambda ids: _torch_plan(ids, shape, True),
            capturable=False,
        ),
        "torch, no bincount": make(
            lambda z: _torch(z, shape, False), lambda ids: _torch_plan(ids, shape, False)
        ),
    }
    missing = ""
    if device == "cuda":
        try:
            module = importlib.import_module("sonicmoe.functional")
        except Exception as error:  # an import of CUDA libraries can fail in many ways
            missing = f"{type(error).__name__}: {error}"
        else:
            # Its layer multiplies the router in bfloat16, so these are the logits that it gets.
            made["sonicmoe"] = make(
                lambda z: _sonic(z, shape, module),
                lambda ids: _sonic_plan(ids, shape, module),
                torch.bfloat16,
            )
    return made, missing


def _ours(logits_TE: Tensor, shape: Shape, impl: Any) -> Made:
    routing = route(logits_TE, shape.K, impl=impl)
    plan = plan_rows(routing.expert_ids_TK, shape.E, impl=impl)
    return routing.weights_TK, plan.offsets_E, plan.routes_R


def _torch(logits_TE: Tensor, shape: Shape, bincount: bool) -> Made:
    """As most layers write it, with `bincount`, which reads the device back, or without."""
    scores_TE = logits_TE.softmax(dim=-1)
    best_TK, ids_TK = scores_TE.topk(shape.K, dim=-1)
    weights_TK = best_TK / best_TK.sum(dim=-1, keepdim=True)
    return weights_TK, *_torch_plan(ids_TK, shape, bincount)


def _torch_plan(ids_TK: Tensor, shape: Shape, bincount: bool) -> tuple[Tensor, Tensor]:
    sorted_R, routes_R = ids_TK.flatten().sort(stable=True)
    # The row of each route, which ours and SonicMoE's make as well.
    rows_R = torch.empty_like(routes_R)
    rows_R.scatter_(0, routes_R, torch.arange(len(routes_R), device=routes_R.device))
    if bincount:
        ends_E = torch.bincount(sorted_R, minlength=shape.E).cumsum(0).to(torch.int32)
    else:
        experts_E = torch.arange(shape.E, device=routes_R.device)
        ends_E = torch.searchsorted(sorted_R, experts_E, right=True, out_int32=True)
    return ends_E, routes_R


def _sonic(logits_TE: Tensor, shape: Shape, module: Any) -> Made:
    """What SonicMoE's layer calls between its router's logits and its first product."""
    weights_TK, ids_TK = module.TC_Softmax_Topk_Router_Function.apply(
        logits_TE, shape.E, shape.K, True, False
    )

    return weights_TK, *_sonic_plan(ids_TK, shape, module)


def _sonic_plan(ids_TK: Tensor, shape: Shape, module: Any) -> tuple[Tensor, Tensor]:
    def empty(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=ids_TK.device)

    R = shape.T * shape.K
    counts_E, starts, tokens_R, routes_R, rows_TK = (
        empty(n) for n in (shape.E, shape.E + 1, R, R, R)
    )
    module.TC_topk_router_metadata_triton(
        ids_TK, shape.E, counts_E, starts, tokens_R, routes_R, rows_TK
    )
    return starts[1:], routes_R


def disagreement(got: Contender, want: Contender) -> str:
    """What differs between the results of two contenders, or nothing."""
    # The gradient of bfloat16 logits is bfloat16.
    rounded = 1e-5 if got.leaf_TE.dtype == want.leaf_TE.dtype else 1e-2
    tolerances = {"weights": 1e-5, "ends": 0.0, "routes": 0.0, "gradient": rounded}
    for (name, tolerance), a, b in zip(tolerances.items(), got.both(), want.both(), strict=True):
        difference = (a.double() - b.double()).abs().max().item()
        if not difference <= tolerance * max(1.0, b.double().abs().max().item()):
            return f"{name} differ by {difference:.1e}"
    return ""
