"""From logits to routes: which experts a token visits, and with what weight.

The formulas and their sources stand in `reference.py`; this module checks the arguments, fixes the
precision and applies the mask. Shapes: T tokens, K experts a token, E experts.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from . import _gate, reference
from ._checks import check_bias, check_mask, check_matrix, check_number, check_positive
from ._impl import Impl, pick
from ._pytree import tensor_tree

Gate = Literal["softmax", "softmax_topk", "sigmoid"]


@tensor_tree
@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Where every token goes.

    Attributes:
        expert_ids_TK: int64, the experts of each token, best first; -1 = no route. No expert occurs
            twice in a token.
        weights_TK: float32, the combine weight of each route; 0 where the id is -1.
        scores_TE: float32, the gate's scores over all experts, without bias.
        counts_E: int32, the routes requested of each expert; -1 is not counted.
        logits_TE: float32, what the gate saw; `router_z_loss` takes it.
        bad_tokens: int32, 0-d: how many tokens, padding aside, have a NaN or +inf logit. It stays
            on the device; read it when the step's other numbers are read.

    float64 logits give float64 weights, scores and logits. The weights, scores and logits carry
    gradients. Every tensor is on the device of the logits.
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor
    counts_E: Tensor
    logits_TE: Tensor
    bad_tokens: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """How a gate chooses and weighs; the fields are documented in `route`."""

    num_experts: int
    top_k: int
    gate: Gate
    renormalize: bool
    route_scale: float
    num_groups: int
    topk_groups: int

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "num_groups", "topk_groups"):
            check_positive(name, getattr(self, name))
        if self.gate not in get_args(Gate):
            raise ValueError(f"`gate` must be one of {get_args(Gate)}, got {self.gate!r}.")
        if self.gate == "softmax_topk" and not self.renormalize:
            raise ValueError(
                "`renormalize` must be True with gate 'softmax_topk', whose weights sum to 1 by "
                "definition, got False; use gate 'softmax' for weights that do not."
            )
        if self.top_k > self.num_experts:
            raise ValueError(
                f"`top_k` must be in [1, `num_experts`={self.num_experts}], got {self.top_k}."
            )
        check_number("route_scale", self.route_scale)
        if not 0 < self.route_scale < math.inf:
            raise ValueError(f"`route_scale` must be positive and finite, got {self.route_scale}.")
        self._check_groups()

    def _check_groups(self) -> None:
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"`num_groups` must divide the {self.num_experts} experts, got {self.num_groups}."
            )
        if self.topk_groups > self.num_groups:
            raise ValueError(
                f"`topk_groups` must be in [1, `num_groups`={self.num_groups}], "
                f"got {self.topk_groups}."
            )
        reachable = self.num_experts // self.num_groups * self.topk_groups
        if self.top_k > reachable:
            raise ValueError(
                f"`topk_groups` groups must hold at least `top_k`={self.top_k} experts, "
                f"got {reachable}; select more groups."
            )


def route(
    logits_TE: Tensor,
    top_k: int,
    *,
    gate: Gate = "softmax",
    renormalize: bool = True,
    route_scale: float = 1.0,
    bias_E: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    mask_T: Tensor | None = None,
    impl: Impl = "auto",
) -> Routing:
    """Choose `top_k` experts for each token and weigh them.

    Args:
        logits_TE: a floating dtype of 16 bits or more; computed in float32, or in float64 when
            given so.
        top_k: experts a token, in [1, E].
        gate: "softmax" scores an expert against all others, "sigmoid" each for itself.
            "softmax_topk" is the softmax over the selected logits alone, as Mixtral and gpt-oss
            name it: the same weights as a renormalised "softmax". Its `scores_TE` are those of
            "softmax".
        renormalize: whether the weights of a token sum to `route_scale` over its selected experts;
            else they are `route_scale` times the scores.
        route_scale: a factor on the weights, positive. `route_scale=top_k` with `renormalize` gives
            weights of mean 1, which merge with a shared expert of weight 1.
        bias_E: added to the scores for the selection alone; never enters weights or gradients.
        num_groups: consecutive groups of equal size into which the experts fall.
        topk_groups: a token selects its experts within this many groups, those with the largest sum
            of their two best score + bias (of the one, in groups of one).
        mask_T: bool, False = padding: ids -1, weights 0, not counted.
        impl: "reference" is plain torch, on any device, with derivatives of any order and kind
            (backward, forward mode, `torch.func`). "triton" is
            two kernels forward, one backward and first derivatives: CUDA of compute capability 8.0
            or newer, float32, up to 1024 experts and K of 64, group limits where both numbers are
            powers of two. "auto" is "triton" on CUDA where it can run and "reference" everywhere
            else, in forward mode and under `torch.func` too.

    Returns:
        The `Routing` of all T tokens.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a shape, range or device is not as above, or the named `impl` cannot run.
        RuntimeError: a second derivative is taken through "triton".

    Note:
        Always K distinct experts a token, the lowest id first among equals. A NaN logit ranks below
        -inf and weighs 0; a token of NaN alone selects experts 0..K-1 with weight 0. Logits of +inf
        share the softmax equally. Where every selected expert has score 0 because its logit is -inf
        or NaN, the weights are 0 and not renormalised. What is NaN or infinite gets a gradient of
        0. Nothing is read back from the device.
    """
    check_matrix("logits_TE", logits_TE)
    options = GateOptions(
        num_experts=logits_TE.shape[1],
        top_k=top_k,
        gate=gate,
        renormalize=renormalize,
        route_scale=route_scale,
        num_groups=num_groups,
        topk_groups=topk_groups,
    )
    check_mask(mask_T, logits_TE)
    if bias_E is not None:
        check_bias(bias_E, logits_TE)
    return compute_routing(logits_TE, options, bias_E=bias_E, mask_T=mask_T, impl=impl)


def compute_routing(
    logits_TE: Tensor,
    options: GateOptions,
    *,
    bias_E: Tensor | None = None,
    mask_T: Tensor | None = None,
    expert_ids_TK: Tensor | None = None,
    impl: Impl = "auto",
) -> Routing:
    """Route checked arguments; given `expert_ids_TK` these are weighed and nothing is selected."""
    given_TE = logits_TE
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    sizes = (options.top_k, options.num_groups, options.topk_groups)
    if pick(impl, logits_TE.device, _gate.why_not(logits_TE, *sizes)):
        ids_TK, weights_TK, scores_TE, counts = _gate.gate(
            given_TE,  # which backward keeps
            None if bias_E is None else bias_E.detach(),
            mask_T,
            expert_ids_TK,
            options.top_k,
            options.gate == "sigmoid",
            options.renormalize,
            options.route_scale,
            options.num_groups,
            options.topk_groups,
        )
        return Routing(ids_TK, weights_TK, scores_TE, counts[:-1], logits_TE, counts[-1])
    scores_TE = reference.gate_scores(logits_TE, options.gate)
    if expert_ids_TK is None:
        expert_ids_TK = reference.select_experts(
            logits_TE.detach(),
            scores_TE.detach(),
            options.top_k,
            bias_E=None if bias_E is None else bias_E.detach(),
            num_groups=options.num_groups,
            topk_groups=options.topk_groups,
        )
    if mask_T is not None:
        expert_ids_TK = torch.where(mask_T[:, None], expert_ids_TK, -1)
    weights_TK = reference.combine_weights(
        logits_TE,
        scores_TE,
        expert_ids_TK,
        gate=options.gate,
        renormalize=options.renormalize,
        route_scale=options.route_scale,
    )
    counts_E = reference.count_routes(expert_ids_TK, options.num_experts)[0].to(torch.int32)
    bad_tokens = reference.count_bad_tokens(logits_TE.detach(), mask_T).to(torch.int32)
    return Routing(expert_ids_TK, weights_TK, scores_TE, counts_E, logits_TE, bad_tokens)
