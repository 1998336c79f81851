"""Losses that keep a router in order.

Balance: with f_e the fraction of routes that go to expert e and P_e the mean probability that the
gate gives it,

    L = E * sum_e f_e P_e,

1 when balanced. Only P carries a gradient, so probability moves away from the experts with many
routes. L measures how f and P agree, not how balanced f is; see `measure_balance`.

Z: the mean of logsumexp(z)^2 keeps the logits small, where float32 resolves them well.

Shapes: T tokens, K experts a token, E experts. Formulas and sources: `reference.py`.
"""

import torch
from torch import Tensor

from . import reference
from ._checks import check_mask, check_matrix, check_routed_tokens
from ._load_window import check_fractions, check_num_sequences


def balance_loss(
    scores_TE: Tensor,
    expert_ids_TK: Tensor,
    *,
    mask_T: Tensor | None = None,
    num_sequences: int = 1,
    fractions_BE: Tensor | None = None,
) -> Tensor:
    """Return the balance loss of one layer, 0-d float32.

    Args:
        scores_TE: not negative, of any gate; each token's are normalised to sum 1 first.
        expert_ids_TK: int64 in [-1, E), the requested routes, before anything is dropped.
        mask_T: bool, False = padding, which counts nowhere; ids and scores of padding may be
            anything, NaN included.
        num_sequences: 1 balances over all T tokens together. B cuts them into B consecutive
            sequences of T / B tokens, balances each for itself and averages these losses, each
            weighted by its number of real tokens.
        fractions_BE: f of each sequence from a wider scope than these tokens, in place of theirs:
            from `route_fractions` with a group (the synchronised form) or from `LoadWindow.add`
            (the online form over an accumulated window). A floating dtype; no gradient.

    Returns:
        The loss, differentiable in the scores; 0 with gradients of 0 when no token is real.
        float64 scores give a float64 loss.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a shape, range or device is not as above, or `num_sequences` does not divide T.

    Note:
        f divides by K times the real tokens: a -1 of a real token is a route less in f, and the
        balanced value is then below 1. A token whose scores sum to less than 1e-20 adds nothing to
        P. Average over layers; concatenated layers hide each other's imbalance.

        Every form is a mean over real tokens. So that a coefficient means the same however a batch
        is cut into microbatches, data ranks and context ranks, weight each part's loss by its real
        tokens over those of the whole batch, and *sum* over the parts; where gradients are averaged
        over D ranks, multiply by D. The sum is then exactly the loss of the whole when f is (the
        synchronised form; per sequence always, unless a sequence itself is cut over context ranks,
        whose fractions need their group). Stages of a pipeline hold other layers and change
        nothing.
    """
    check_routed_tokens("scores_TE", scores_TE, expert_ids_TK)
    check_mask(mask_T, scores_TE)
    check_num_sequences(num_sequences, scores_TE.shape[0])
    check_fractions(fractions_BE, num_sequences, scores_TE)
    scores_TE = scores_TE.to(torch.promote_types(scores_TE.dtype, torch.float32))
    return reference.balance_loss(scores_TE, expert_ids_TK, mask_T, num_sequences, fractions_BE)


def router_z_loss(logits_TE: Tensor, *, mask_T: Tensor | None = None) -> Tensor:
    """Return the mean over real tokens of logsumexp(logits)^2, 0-d float32.

    Args:
        logits_TE: what the gate saw, any floating dtype.
        mask_T: bool, False = padding, which counts nowhere and may be anything.

    Returns:
        The loss, differentiable in the logits; 0 with gradients of 0 when no token is real.
        float64 logits give a float64 loss. A token whose logsumexp is not finite (a NaN or +inf
        among its logits, or -inf alone) adds 0 and gets a gradient of 0; it counts in the mean.
        `Routing.bad_tokens` counts those with a NaN or +inf.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a shape or device is not as above.
    """
    check_matrix("logits_TE", logits_TE)
    check_mask(mask_T, logits_TE)
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    return reference.router_z_loss(logits_TE, mask_T)
