"""A balance loss that probability cannot buy.

The ordinary balance loss E * f.P falls below 1 when mass moves to experts that never win: P is
probability, f is selection, and the two need not agree. Here the soft side is the selection itself,
seen through a smooth step of the margin: with the distance d of an expert to the score that decides
over it (the (K+1)-th best for a selected expert, the K-th best for any other),

    L = E * sum_e f_e Q_e,    Q_e = 1 / (K T) * sum_t sigmoid(d_te / w_t),
    w_t = temperature * m_t,

where m_t is the margin of token t, K-th less (K+1)-th best score.

The law. By definition d / w is at least 1 / temperature for a selected expert, so that its step is
at least 1 - epsilon, with

    epsilon = sigmoid(-1 / temperature)

whatever E is, and every other step is positive. Therefore Q_e >= (1 - epsilon) f_e, and because
sum f = 1, for any scores

    L >= (1 - epsilon) * E * sum f^2 >= 1 - epsilon,
    L <= (1 - epsilon) * E * sum f^2 + epsilon * E / K,

the second since no step of an expert that is not selected exceeds epsilon. Q is not normalised: a
share of Q given to losers would be taken from winners, which is the game again at a price of
epsilon * E. As it is, what losers hold only adds, and adds nothing where nobody is selected.

Why w follows each token. With a fixed w a margin much smaller than w makes the K-th and the
(K+1)-th expert both half winners, and L is E * f.P of that half-hearted selection, below 1 at will.
With w_t proportional to m_t a hair-thin margin decides as clearly as any other.

The gradient. The derivative of L in full is useless: the decisive two experts are always exactly at
+-1 / temperature. It is taken with the width held fixed, of steps whose width is at least

    max(0.2 * spread_t, 0.01 * level_t),

the spread being the mean distance of the scores that were not selected to the weakest selected one,
and the level the mean of the two scores at the margin. However thin the margin,

    |dL / ds_te| <= 2.5 * E / (K * T * max(spread_t, level_t / 20)).

What follows the spread does not change when all scores of a token shift, and scales inversely when
they stretch: a router whose logits shrink is told the same about its marginal tokens as before.
(Widths that are a share of the level lose that: once the scores differ by less than a width, every
token looks marginal, and loads drift apart.) The level holds the slope only where the spread is
less than a twentieth of it, ties of all scores among them.

It is the gradient of E * sum (f - mean f) Q, since the number of routes is fixed; at even loads it
is exactly 0. The step's slope is a kernel that integrates to 1 over the distance: where margins
have a smooth density at 0, it counts the routes that an expert loses to its rival as scores move,
and the gradient estimates half of that of E * sum f^2. It is no exact derivative of the value, and
nothing is proved of where a descent along it ends; the value is what obeys the law.

Shapes: T tokens, K experts a token, E experts, B sequences. Sources: the distance, Shazeer et al.
(arXiv 1701.06538) eq. 9; formulas in `reference.py`.
"""

import math

import torch
from torch import Tensor

from . import reference
from ._checks import check_bias, check_mask, check_number, check_routed_tokens
from ._load_window import check_fractions, check_num_sequences


def margin_balance_loss(
    scores_TE: Tensor,
    expert_ids_TK: Tensor,
    *,
    mask_T: Tensor | None = None,
    temperature: float = 0.2,
    bias_E: Tensor | None = None,
    num_sequences: int = 1,
    fractions_BE: Tensor | None = None,
) -> Tensor:
    """Return the margin balance loss of one layer, 0-d float32.

    Args:
        scores_TE: not negative, of any gate, not biased; only ratios of differences within a token
            matter, to the gradient down to a spread of a twentieth of the scores.
        expert_ids_TK: int64 in [-1, E), the requested routes, before anything is dropped: no expert
            twice in a token.
        mask_T: bool, False = padding, which counts nowhere and may be anything.
        temperature: width of the step over the token's margin, positive and finite. 0.2 gives an
            epsilon of 0.0067; 0.1 of 0.000045.
        bias_E: what was added to the scores for the selection, `router.selection_bias.bias_E` of a
            router that has one: margins are of score + bias. No gradient. Without it, or with group
            limits, the law holds for biased ids too, and only the gradient looks at other margins
            than those that decided.
        num_sequences: as in `balance_loss`.
        fractions_BE: as in `balance_loss`. The law then holds for the sum over the parts whose
            routes make up these fractions, not for each part.

    Returns:
        The loss, at least 1 - sigmoid(-1 / temperature) when every real token has K routes, and
        about E * sum f^2; differentiable in the scores, as the module says. 0 with gradients of 0
        when no token is real. float64 scores give a float64 loss.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a shape, range or device is not as above.

    Note:
        Equal scores at the margin count as decided, by the ids. K = E gives 1 without a gradient. A
        -1 of a real token is a route less in f and in Q: with a share r of the routes present the
        bound is (1 - epsilon) * r^2. A token without any route adds nothing. A score that is not
        finite counts as 0 and gets no gradient. A token whose scores at the margin are both 0, or
        less than 1e-20, gets no gradient. Second derivatives are those of the surrogate.
        Weigh parts of a batch as in `balance_loss`.
    """
    check_routed_tokens("scores_TE", scores_TE, expert_ids_TK)
    check_mask(mask_T, scores_TE)
    check_num_sequences(num_sequences, scores_TE.shape[0])
    check_fractions(fractions_BE, num_sequences, scores_TE)
    check_number("temperature", temperature)
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be positive and finite, got {temperature}.")
    scores_TE = scores_TE.to(torch.promote_types(scores_TE.dtype, torch.float32))
    if bias_E is not None:
        check_bias(bias_E, scores_TE)
        bias_E = bias_E.to(scores_TE.dtype)  # a float64 bias must not make the loss float64
    return reference.margin_balance_loss(
        scores_TE, expert_ids_TK, mask_T, num_sequences, temperature, bias_E, fractions_BE
    )
