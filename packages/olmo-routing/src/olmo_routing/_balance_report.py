"""How balanced is the routing of a batch, and does the balance loss tell the truth about it?

What counts and probabilities say is in `_expert_load.py`; the scores, the tokens and their weights
add how close the selection was and what was lost to capacity. Shapes: T tokens, K experts a token,
E experts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference
from ._checks import (
    can_read,
    check_ids_dtype,
    check_mask,
    check_routed_tokens,
    check_same_device,
    check_tensor,
)
from ._expert_load import LoadReport, check_kept_counts, check_ranks, load_report
from ._pytree import tensor_tree

_OF_THE_LOAD = LoadReport.names()


@tensor_tree
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BalanceReport(LoadReport):
    """The balance of one layer over one batch, as 0-d tensors on the device of the scores.

    Attributes:
        topk_margin: mean over tokens of the K-th minus the next largest score; 0 when K = E.
        tokens_with_drops: fraction of the real tokens that lost at least one route.
        dropped_weight: fraction of the combine weights that the dropped routes had.

    The last two are 0 when nothing was said to be dropped, and NaN when what was given does not
    tell: kept counts without ids, or kept ids without weights.
    """

    topk_margin: Tensor
    tokens_with_drops: Tensor
    dropped_weight: Tensor


@torch.no_grad()
def measure_balance(
    scores_TE: Tensor,
    expert_ids_TK: Tensor,
    *,
    mask_T: Tensor | None = None,
    kept_ids_TK: Tensor | None = None,
    kept_counts_E: Tensor | None = None,
    weights_TK: Tensor | None = None,
    num_ranks: int = 1,
) -> BalanceReport:
    """Measure the balance of one layer's routing.

    Args:
        scores_TE: not negative, of any gate, without bias.
        expert_ids_TK: int64 in [-1, E), the requested routes.
        mask_T: bool, False = padding, which counts nowhere.
        kept_ids_TK: int64, the ids with -1 in place of those that were dropped, as `keep_routes`
            returns them; no mask of bools. None = all were kept. Padding may hold anything.
        kept_counts_E: in place of the kept ids, how many routes of each expert were kept: from 0 to
            its requested ones.
        weights_TK: the combine weights of the requested routes, for `dropped_weight`; any floating
            dtype, not negative.
        num_ranks: expert-parallel ranks, each of which holds E / num_ranks experts in order.

    Returns:
        The `BalanceReport`, float32 (float64 for float64 scores), without gradients. Nothing is
        read back from the device.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a shape, range or device is not as above, or kept ids and kept counts are both
            given. The values of what was kept are read on the CPU only.
    """
    check_routed_tokens("scores_TE", scores_TE, expert_ids_TK)
    check_mask(mask_T, scores_TE)
    check_ranks(num_ranks, scores_TE.shape[1])
    _check_kept(expert_ids_TK, mask_T, kept_ids_TK, kept_counts_E, weights_TK)
    scores_TE = scores_TE.to(torch.promote_types(scores_TE.dtype, torch.float32))
    top_k = expert_ids_TK.shape[1]
    counts_BE, mass_BE, tokens_B = reference.load_and_mass(scores_TE, expert_ids_TK, mask_T, 1)
    check_kept_counts(kept_counts_E, counts_BE[0])
    kept_E = counts_BE[0] if kept_counts_E is None else kept_counts_E
    if mask_T is not None:
        expert_ids_TK = torch.where(mask_T[:, None], expert_ids_TK, -1)
    if kept_ids_TK is not None:
        still_TK = torch.where(kept_ids_TK >= 0, expert_ids_TK, -1)
        kept_E = reference.count_routes(still_TK, scores_TE.shape[1])[0]
    load = load_report(counts_BE[0], mass_BE[0], top_k * tokens_B[0], kept_E, num_ranks)
    nothing, unknown = torch.zeros_like(load.imbalance), torch.full_like(load.imbalance, math.nan)
    tokens_with_drops = dropped_weight = nothing if kept_counts_E is None else unknown
    if kept_ids_TK is not None:
        dropped_TK = (kept_ids_TK < 0) & (expert_ids_TK >= 0)
        # A quotient of integers would be of torch's default dtype, which may be bfloat16.
        num_tokens = tokens_B[0].clamp(min=1)
        tokens_with_drops = dropped_TK.any(1).sum().to(scores_TE.dtype) / num_tokens
        dropped_weight = unknown
        if weights_TK is not None:
            dropped_weight = _dropped_weight(weights_TK, expert_ids_TK, dropped_TK)
    return BalanceReport(
        **{name: getattr(load, name) for name in _OF_THE_LOAD},
        topk_margin=_topk_margin(scores_TE, top_k, mask_T),
        tokens_with_drops=tokens_with_drops,
        dropped_weight=dropped_weight.to(scores_TE.dtype),
    )


def _dropped_weight(weights_TK: Tensor, expert_ids_TK: Tensor, dropped_TK: Tensor) -> Tensor:
    """Return the weight of the dropped routes over that of all routes that exist."""
    weights_TK = torch.where(expert_ids_TK >= 0, weights_TK, 0.0)
    weights_TK = weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32))
    total = weights_TK.sum()
    return torch.where(dropped_TK, weights_TK, 0.0).sum() / torch.where(total > 0, total, 1.0)


def _topk_margin(scores_TE: Tensor, top_k: int, mask_T: Tensor | None) -> Tensor:
    """Return the mean distance between the K-th and the next score over real tokens."""
    num_tokens, num_experts = scores_TE.shape
    if top_k == num_experts:
        return scores_TE.new_zeros(())
    best_TK = scores_TE.topk(top_k + 1, dim=1).values
    margin_T = best_TK[:, -2] - best_TK[:, -1]
    if mask_T is None:
        return margin_T.sum() / max(num_tokens, 1)
    return torch.where(mask_T, margin_T, 0.0).sum() / mask_T.sum().clamp(min=1)


def _check_kept(
    expert_ids_TK: Tensor,
    mask_T: Tensor | None,
    kept_ids_TK: Tensor | None,
    kept_counts_E: Tensor | None,
    weights_TK: Tensor | None,
) -> None:
    if kept_ids_TK is not None and kept_counts_E is not None:
        raise ValueError(
            "`kept_ids_TK` and `kept_counts_E` must not both be given: the ids say it all."
        )
    if kept_ids_TK is not None:
        check_ids_dtype("kept_ids_TK", kept_ids_TK)
    if weights_TK is not None:
        check_tensor("weights_TK", weights_TK)
        if not weights_TK.is_floating_point():
            raise TypeError(
                f"`weights_TK` must be a floating-point tensor, got {weights_TK.dtype}."
            )
    for name, given in (("kept_ids_TK", kept_ids_TK), ("weights_TK", weights_TK)):
        if given is None:
            continue
        if given.shape != expert_ids_TK.shape:
            raise ValueError(
                f"`{name}` must have the shape {tuple(expert_ids_TK.shape)} of `expert_ids_TK`, "
                f"got {tuple(given.shape)}."
            )
        check_same_device(name, given, "expert_ids_TK", expert_ids_TK)
    _check_kept_values(expert_ids_TK, mask_T, kept_ids_TK, weights_TK)


def _check_kept_values(
    expert_ids_TK: Tensor,
    mask_T: Tensor | None,
    kept_ids_TK: Tensor | None,
    weights_TK: Tensor | None,
) -> None:
    """Raise where values can be read and say what no drop could."""
    if not can_read(expert_ids_TK) or (mask_T is not None and not can_read(mask_T)):
        return
    real_T1 = torch.ones(len(expert_ids_TK), 1, dtype=torch.bool)
    if mask_T is not None:
        real_T1 = mask_T[:, None]
    if kept_ids_TK is not None and can_read(kept_ids_TK):
        wrong_TK = real_T1 & (kept_ids_TK != -1) & (kept_ids_TK != expert_ids_TK)
        if bool(wrong_TK.any()):
            raise ValueError(
                "`kept_ids_TK` must hold the requested id of each kept route and -1 for the others,"
                f" got another id for {int(wrong_TK.sum())} routes; `keep_routes` returns such ids."
            )
    if weights_TK is not None and can_read(weights_TK):
        below_TK = real_T1 & (expert_ids_TK >= 0) & (weights_TK < 0)
        if bool(below_TK.any()):
            raise ValueError(
                "`weights_TK` must not be negative, "
                f"got {int(below_TK.sum())} routes of negative weight."
            )
