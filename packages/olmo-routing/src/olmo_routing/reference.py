"""The definition of correct: every formula of this package in plain torch.

Nothing here validates, rounds to a lower precision or reads a value back from the device, and all
of it works in float64, so that a test can differentiate it numerically. The public functions check
their arguments and then call these.

Routing of one token with logits z over E experts:

    score_e  = softmax(z)_e  or  sigmoid(z_e)
    selected = the K experts with the largest score_e + bias_e
    weight_e = scale * score_e                                 for a selected e, or
    weight_e = scale * score_e / (sum of score over selected)  when renormalised

A renormalised weight is computed as a softmax over the logarithms of the selected scores (for a
softmax gate these are the logits themselves). It is the same number, and it stays right where
`score / sum` is 0 / 0: a bias may select experts whose scores have all underflowed.

Shapes: T tokens, K experts a token, E experts, R rows, B sequences, S source ranks, Q destination
ranks; in `admit`, E counts the experts of one destination rank.

Sources: selection bias and group limits, DeepSeek-V3 (arXiv 2412.19437) eq. 12-16; balance loss,
Switch Transformers (arXiv 2101.03961) eq. 4-6 with the top-K factor; z-loss, ST-MoE (arXiv
2202.08906) eq. 5.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

# A token whose scores sum to less has no distribution to speak of: dividing by the sum would give
# gradients beyond float32.
_NO_MASS = 1e-20

# The width of a step that a gradient goes through, over the spread of the scores that lost: their
# mean distance to the weakest winner is five widths, so that also cold experts are felt, while a
# margin that is thin beside the spread is felt most. A share of the scores' level in place of their
# spread lets every token count as marginal once a router's logits shrink, and loads drift apart.
SPREAD_WIDTH = 0.2

# The least such width, over the score at which a token decides: where all scores are nearly equal
# there is no spread to follow, and a slope beyond all bounds would be no use.
LEAST_WIDTH = 0.01


def softmax(logits: Tensor) -> Tensor:
    """Return the softmax of the last dimension, defined for every input.

    A NaN counts as -inf. Entries of +inf share all the mass equally. Without any mass, when every
    entry is -inf or NaN, the result is 0. Gradients are finite in all of these cases.
    """
    x = torch.where(logits.isnan(), -math.inf, logits)
    infinite = x == math.inf
    split = torch.where(infinite, 0.0, -math.inf).to(x.dtype)
    x = torch.where(infinite.any(-1, keepdim=True), split, x)
    empty = (x == -math.inf).all(-1, keepdim=True)
    return torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, x), -1))


def gate_scores(logits_TE: Tensor, gate: str) -> Tensor:
    """Return `scores_TE`; a NaN logit scores 0."""
    if gate == "sigmoid":
        return torch.sigmoid(torch.where(logits_TE.isnan(), -math.inf, logits_TE))
    return softmax(logits_TE)


def select_experts(
    logits_TE: Tensor,
    scores_TE: Tensor,
    top_k: int,
    *,
    bias_E: Tensor | None,
    num_groups: int,
    topk_groups: int,
) -> Tensor:
    """Return the K distinct experts with the largest score + bias, best first.

    Equal sums are ordered by the logit and then by the lowest id, so that without a bias the order
    is that of the logits even where the scores have saturated. An expert with a NaN logit comes
    after every other one.
    """
    merit_TE = scores_TE if bias_E is None else scores_TE + bias_E
    merit_TE = torch.where(logits_TE.isnan(), math.nan, merit_TE)
    candidates_TC = _experts_of_best_groups(merit_TE, num_groups, topk_groups)
    order_TC = _descending(merit_TE.gather(1, candidates_TC), logits_TE.gather(1, candidates_TC))
    return candidates_TC.gather(1, order_TC[:, :top_k])


def _descending(*keys: Tensor) -> Tensor:
    """Return the order by the first key, then the next; NaN last and ties by position."""
    order = torch.arange(keys[0].shape[1], device=keys[0].device).expand_as(keys[0])
    for key in reversed(keys):
        # An ascending sort puts NaN last; one NaN for all, as a GPU may order them by their sign.
        ascending = torch.where(key.isnan(), math.nan, -key).gather(1, order)
        order = order.gather(1, torch.sort(ascending, dim=1, stable=True).indices)
    return order


def _experts_of_best_groups(merit_TE: Tensor, num_groups: int, topk_groups: int) -> Tensor:
    """Return the ids, ascending, of the experts in the groups with the largest top-2 sums."""
    num_tokens, num_experts = merit_TE.shape
    experts_E = torch.arange(num_experts, device=merit_TE.device)
    if topk_groups == num_groups:
        return experts_E.expand(num_tokens, num_experts)
    size = num_experts // num_groups
    merit_TGX = torch.where(merit_TE.isnan(), -math.inf, merit_TE).view(-1, num_groups, size)
    merit_TG = merit_TGX.topk(min(2, size), dim=-1).values.sum(-1)
    groups_TG = _descending(merit_TG)[:, :topk_groups].sort(dim=1).values
    return (groups_TG[:, :, None] * size + experts_E[:size]).flatten(1)


def combine_weights(
    logits_TE: Tensor,
    scores_TE: Tensor,
    expert_ids_TK: Tensor,
    *,
    gate: str,
    renormalize: bool,
    route_scale: float,
) -> Tensor:
    """Return `weights_TK`; 0 where the id is -1, and such a route takes no share of the sum."""
    absent_TK = expert_ids_TK < 0
    index_TK = expert_ids_TK.clamp(min=0)
    if not renormalize:
        return route_scale * torch.where(absent_TK, 0.0, scores_TE.gather(1, index_TK))
    log_scores_TK = logits_TE.gather(1, index_TK)
    if gate == "sigmoid":
        log_scores_TK = F.logsigmoid(torch.where(log_scores_TK.isnan(), -math.inf, log_scores_TK))
    return route_scale * softmax(torch.where(absent_TK, -math.inf, log_scores_TK))


def count_routes(expert_ids_TK: Tensor, num_experts: int, num_sequences: int = 1) -> Tensor:
    """Return `counts_BE`, int64: each expert's routes in each of B consecutive sequences."""
    length = expert_ids_TK.numel() // num_sequences
    # Bin 0 takes the -1s, so that an id that is out of range on either side fails the scatter.
    bins_BN = expert_ids_TK.reshape(num_sequences, length) + 1
    counts = bins_BN.new_zeros(num_sequences, num_experts + 1)
    return counts.scatter_add_(1, bins_BN, torch.ones_like(bins_BN))[:, 1:]


def count_bad_tokens(logits_TE: Tensor, mask_T: Tensor | None) -> Tensor:
    """Return how many valid tokens have a NaN or +inf among their logits, 0-d int64."""
    bad_T = (logits_TE.isnan() | (logits_TE == math.inf)).any(1)
    return (bad_T & _valid(mask_T, logits_TE)).sum()


def plan_rows(expert_ids_TK: Tensor, num_experts: int, align: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `offsets_E`, `rows_TK` and `routes_R` in (expert, token, slot) order."""
    ids_N = expert_ids_TK.flatten()
    num_routes = ids_N.numel()
    counts_E = count_routes(expert_ids_TK, num_experts)[0]
    padded_E = (counts_E + align - 1) // align * align
    ends_E = padded_E.cumsum(0)
    # The sorted routes begin with the -1s and then run through the experts without padding; `shift`
    # turns a position in that list into a row.
    sorted_N, order_N = torch.sort(ids_N, stable=True)
    absent = num_routes - counts_E.sum()
    shift_E = (ends_E - padded_E) - (counts_E.cumsum(0) - counts_E) - absent
    positions_N = torch.arange(num_routes, device=ids_N.device)
    rows_N = torch.where(sorted_N < 0, -1, positions_N + shift_E[sorted_N.clamp(min=0)])
    # Out of place, which `vmap` has rules for.
    rows_TK = torch.empty_like(ids_N).scatter(0, order_N, rows_N).view_as(expert_ids_TK)
    capacity = num_routes + num_experts * (align - 1)
    routes = torch.full((capacity + 1,), -1, dtype=torch.int64, device=ids_N.device)
    routes = routes.scatter(0, torch.where(rows_N < 0, capacity, rows_N), order_N)
    return ends_E.to(torch.int32), rows_TK, routes[:capacity]


def plan_tiles(offsets_E: Tensor, num_rows: int, height: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `experts_C`, `starts_C` (both -1 past the last tile) and `num_tiles`, all int32."""
    num_experts = offsets_E.numel()
    starts_E = torch.cat([offsets_E.new_zeros(1), offsets_E[:-1]])
    tiles_E = (offsets_E - starts_E + height - 1) // height
    ends_E = tiles_E.cumsum(0)
    capacity = -(-num_rows // height) + num_experts
    tiles_C = torch.arange(capacity, device=offsets_E.device)
    experts_C = torch.searchsorted(ends_E, tiles_C, right=True)
    index_C = experts_C.clamp(max=num_experts - 1)
    first_C = (ends_E - tiles_E)[index_C]
    starts_C = starts_E[index_C] + (tiles_C - first_C) * height
    used_C = tiles_C < ends_E[-1]
    parts = (experts_C, starts_C)
    experts_C, starts_C = (torch.where(used_C, part, -1).to(torch.int32) for part in parts)
    return experts_C, starts_C, ends_E[-1].to(torch.int32)


def admit(requested_SQE: Tensor, capacity: int, policy: str) -> Tensor:
    """Return `kept_SQE`: how many routes of each cell fit into each destination's capacity.

    Both policies change the running total of a destination's requests, taken in the order of its
    rows (local expert, then source rank), and keep the differences: `tail` stops it at the
    capacity, `fair` shrinks it in proportion and rounds it to the nearest integer.
    """
    requested_QES = requested_SQE.to(torch.int64).permute(1, 2, 0)
    running_QC = requested_QES.flatten(1).cumsum(1)
    if policy == "tail":
        kept_QC = running_QC.clamp(max=capacity)
    else:
        total_Q1 = running_QC[:, -1:]
        kept_Q1 = total_Q1.clamp(max=capacity)
        kept_QC = (2 * running_QC * kept_Q1 + total_Q1) // (2 * total_Q1).clamp(min=1)
    kept_QC = torch.diff(kept_QC, dim=1, prepend=torch.zeros_like(kept_QC[:, :1]))
    return kept_QC.view_as(requested_QES).permute(2, 0, 1).to(requested_SQE.dtype).contiguous()


def keep_routes(
    expert_ids_TK: Tensor, kept_counts_E: Tensor, offsets_E: Tensor, rows_TK: Tensor
) -> Tensor:
    """Return the ids with -1 for every route but the first `kept` ones of each expert.

    `offsets_E` and `rows_TK` are the plan of these ids without padding: a route's place among those
    of its expert, in the order of token and slot, is its row less the expert's first row.
    """
    starts_E = torch.cat([offsets_E.new_zeros(1), offsets_E[:-1]])
    index_TK = expert_ids_TK.clamp(min=0)
    place_TK = rows_TK - starts_E[index_TK]
    return torch.where(place_TK < kept_counts_E[index_TK], expert_ids_TK, -1)


def requested_counts(
    expert_ids_TK: Tensor, num_experts: int, mask_T: Tensor | None, num_sequences: int
) -> tuple[Tensor, Tensor]:
    """Return each sequence's routes of each expert and its valid tokens: `counts_BE`, `tokens_B`.

    Both int64 and without gradient; a token that is not valid counts nowhere.
    """
    valid_T = _valid(mask_T, expert_ids_TK)
    ids_TK = torch.where(valid_T[:, None], expert_ids_TK, -1)
    length = valid_T.shape[0] // num_sequences  # `len` would make it a constant of an export
    tokens_B = valid_T.view(num_sequences, length).sum(1)
    return count_routes(ids_TK, num_experts, num_sequences), tokens_B


def load_and_mass(
    scores_TE: Tensor, expert_ids_TK: Tensor, mask_T: Tensor | None, num_sequences: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each sequence's route counts, mean normalised scores and number of valid tokens.

    The counts are int64 and without gradient, the means differentiable: `counts_BE`, `mass_BE`,
    `tokens_B`.
    """
    num_tokens, num_experts = scores_TE.shape
    length = num_tokens // num_sequences
    counts_BE, tokens_B = requested_counts(expert_ids_TK, num_experts, mask_T, num_sequences)
    scores_TE = torch.where(_valid(mask_T, scores_TE)[:, None], scores_TE, 0.0)
    total_T1 = scores_TE.sum(1, keepdim=True)
    shares_TE = scores_TE / torch.where(total_T1 > _NO_MASS, total_T1, 1.0)
    mass_BE = shares_TE.view(num_sequences, length, num_experts).sum(1)
    return counts_BE, mass_BE / tokens_B.clamp(min=1)[:, None], tokens_B


def balance_loss(
    scores_TE: Tensor,
    expert_ids_TK: Tensor,
    mask_T: Tensor | None,
    num_sequences: int,
    fractions_BE: Tensor | None = None,
) -> Tensor:
    """Return the mean over valid tokens of their sequence's E * sum_e f_e P_e.

    f are the sequence's own fractions of the routes, or `fractions_BE` from a wider scope.
    """
    counts_BE, mass_BE, tokens_B = load_and_mass(scores_TE, expert_ids_TK, mask_T, num_sequences)
    if fractions_BE is None:
        fractions_BE = _fractions(counts_BE, tokens_B, expert_ids_TK.shape[1], mass_BE.dtype)
    fractions_BE = fractions_BE.detach().to(mass_BE.dtype)
    loss_B = scores_TE.shape[1] * (fractions_BE * mass_BE).sum(1)
    return (loss_B * tokens_B).sum() / tokens_B.sum().clamp(min=1)


def _fractions(counts_BE: Tensor, tokens_B: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    return counts_BE.to(dtype) / (tokens_B * top_k).clamp(min=1)[:, None]


def margin_balance_loss(
    scores_TE: Tensor,
    expert_ids_TK: Tensor,
    mask_T: Tensor | None,
    num_sequences: int,
    temperature: float,
    bias_E: Tensor | None = None,
    fractions_BE: Tensor | None = None,
) -> Tensor:
    """Return the mean over valid tokens of their sequence's E * sum_e f_e Q_e.

    Q_e is the mean over the routes of the tokens' steps, `selection_steps`. The value comes from
    the exact steps, the gradient from the wide ones and f less its mean: K routes a token exist
    whatever the scores are, so that only differences of load can be acted on, and what is balanced
    gets no gradient at all.
    """
    num_tokens, num_experts = scores_TE.shape
    top_k = expert_ids_TK.shape[1]
    shape = (num_sequences, num_tokens // num_sequences, num_experts)
    valid_T1 = _valid(mask_T, scores_TE)[:, None]
    ids_TK = torch.where(valid_T1, expert_ids_TK, -1)
    scores_TE = torch.where(valid_T1 & scores_TE.isfinite(), scores_TE, 0.0)
    exact_TE, wide_TE = selection_steps(scores_TE, ids_TK, temperature, bias_E)
    counts_BE, tokens_B = requested_counts(ids_TK, num_experts, mask_T, num_sequences)
    if fractions_BE is None:
        fractions_BE = _fractions(counts_BE, tokens_B, top_k, scores_TE.dtype)
    fractions_BE = fractions_BE.detach().to(scores_TE.dtype)
    # A sequence's loss is divided by its tokens and weighted by them: its sum is what is needed.
    scale = num_experts / (top_k * tokens_B.sum().clamp(min=1)).to(scores_TE.dtype)
    excess_BE = fractions_BE - fractions_BE.mean(1, keepdim=True)
    value = scale * (fractions_BE * exact_TE.view(shape).sum(1)).sum()
    slope = scale * (excess_BE * wide_TE.view(shape).sum(1)).sum()
    return value + (slope - slope.detach())


def selection_steps(
    scores_TE: Tensor, expert_ids_TK: Tensor, temperature: float, bias_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return how surely each token selects each expert, as `exact_TE` and `wide_TE`.

    Both are sigmoid(d / w). The distance d of a selected expert is its score less the strongest
    score that was not selected, that of any other expert its score less the weakest selected one
    (Shazeer et al., arXiv 1701.06538, eq. 9); a bias is added to the scores first. With the margin
    m = weakest selected - strongest other,

        exact: w = temperature * m,                                     without gradient
        wide:  w = max(temperature * m, 0.2 * spread, 0.01 * level),    through d, not through w

    where the spread is the mean distance of the scores that were not selected to that of the
    weakest selected expert, and the level the mean of the two scores at the margin, both without
    the bias. Of the exact steps every selected one is at least, and every other one at most, that
    of the margin itself: this holds by a clamp, so that it holds for ties and for ids that are not
    those of the best scores as well.
    """
    # Column 0 takes the -1s.
    selected = torch.zeros(
        scores_TE.shape[0], scores_TE.shape[1] + 1, dtype=torch.bool, device=scores_TE.device
    )
    selected_TE = selected.scatter(1, expert_ids_TK + 1, True)[:, 1:]
    merit_TE = scores_TE if bias_E is None else scores_TE + bias_E.detach()
    inside_TE = torch.where(selected_TE, merit_TE, math.inf)
    outside_TE = torch.where(selected_TE, -math.inf, merit_TE)
    # Without an expert on either side there is no margin: such a token is sure, without gradient.
    contested_T1 = selected_TE.any(1, keepdim=True) & ~selected_TE.all(1, keepdim=True)
    weakest_T1 = torch.where(contested_T1, inside_TE.amin(1, keepdim=True), 0.0)
    strongest_T1 = torch.where(contested_T1, outside_TE.amax(1, keepdim=True), 0.0)
    distance_TE = merit_TE - torch.where(selected_TE, strongest_T1, weakest_T1)
    with torch.no_grad():
        margin_T1 = (weakest_T1 - strongest_T1).abs()
        depth_TE = torch.where(selected_TE, distance_TE, -distance_TE)
        ratio_TE = depth_TE / margin_T1.clamp(min=torch.finfo(margin_T1.dtype).tiny)
        ratio_TE = torch.where(depth_TE > margin_T1, ratio_TE, 1.0) / temperature
        exact_TE = torch.sigmoid(torch.where(selected_TE, ratio_TE, -ratio_TE))
        exact_TE = torch.where(contested_T1, exact_TE, selected_TE.to(exact_TE.dtype))
        at_margin_T2 = torch.cat(
            [inside_TE.argmin(1, keepdim=True), outside_TE.argmax(1, keepdim=True)], dim=1
        )
        scores_T2 = scores_TE.gather(1, at_margin_T2)
        apart_TE = torch.where(selected_TE, 0.0, (scores_TE - scores_T2[:, :1]).abs())
        spread_T1 = apart_TE.sum(1, keepdim=True) / (~selected_TE).sum(1, keepdim=True).clamp(min=1)
        width_T1 = torch.maximum(temperature * margin_T1, SPREAD_WIDTH * spread_T1)
        width_T1 = torch.maximum(width_T1, LEAST_WIDTH * scores_T2.mean(1, keepdim=True))
        # An infinite width has no gradient.
        width_T1 = torch.where(contested_T1 & (width_T1 > _NO_MASS), width_T1, math.inf)
    return exact_TE, torch.sigmoid(distance_TE / width_T1)


def router_z_loss(logits_TE: Tensor, mask_T: Tensor | None) -> Tensor:
    """Return the mean over valid tokens of logsumexp(z)^2; 0 for one where that is not finite."""
    valid_T = _valid(mask_T, logits_TE)
    counted_T = valid_T & torch.logsumexp(logits_TE.detach(), 1).isfinite()
    z_T = torch.logsumexp(torch.where(counted_T[:, None], logits_TE, 0.0), 1)
    return torch.where(counted_T, z_T.square(), 0.0).sum() / valid_T.sum().clamp(min=1)


def _valid(mask_T: Tensor | None, like: Tensor) -> Tensor:
    if mask_T is not None:
        return mask_T
    return torch.ones(like.shape[0], dtype=torch.bool, device=like.device)
