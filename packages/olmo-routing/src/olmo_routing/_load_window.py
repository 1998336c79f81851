"""The fractions of routes f from more tokens than one call of a loss sees.

    f_e = routes to e / (K * tokens)

over a sequence, a microbatch, the ranks that share a layer, or all microbatches of an optimizer
step so far. A balance loss over a small scope asks every small scope to be balanced; a wider f asks
it of the whole, and lets a sequence be about one thing.

Shapes: T tokens, K experts a token, E experts, B sequences.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from . import reference
from ._checks import check_expert_ids, check_mask, check_positive


def check_num_sequences(num_sequences: int, num_tokens: int) -> None:
    """Raise unless the tokens fall into that many sequences of one length."""
    check_positive("num_sequences", num_sequences)
    if num_tokens % num_sequences:
        raise ValueError(
            f"`num_sequences` must divide the {num_tokens} tokens, got {num_sequences}."
        )


def check_fractions(fractions_BE: Tensor | None, num_sequences: int, like: Tensor) -> None:
    """Raise unless the fractions are a floating-point tensor with a row a sequence."""
    if fractions_BE is None:
        return
    if not fractions_BE.is_floating_point():
        raise TypeError(
            f"`fractions_BE` must be a floating-point tensor, got {fractions_BE.dtype}; "
            "`route_fractions` and `LoadWindow.add` turn routes into fractions."
        )
    expected = (num_sequences, like.shape[1])
    if fractions_BE.shape != expected or fractions_BE.device != like.device:
        raise ValueError(
            f"`fractions_BE` must have shape (`num_sequences`, experts) = {expected} on "
            f"{like.device}, got {tuple(fractions_BE.shape)} on {fractions_BE.device}."
        )


def route_fractions(
    expert_ids_TK: Tensor,
    num_experts: int,
    *,
    mask_T: Tensor | None = None,
    num_sequences: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return each expert's fraction of the routes, over this rank or over a group of ranks.

    Args:
        expert_ids_TK: int64 in [-1, E), the requested routes.
        num_experts: E.
        mask_T: bool, False = padding, which counts nowhere.
        num_sequences: 1 counts all T tokens together; B counts in B consecutive sequences of T / B
            tokens.
        group: add the counts of these ranks, by one reduction of B (E + 1) integers: the data ranks
            of this layer's stage, and the context ranks too. With several sequences, ranks that
            hold parts of the same sequences: the context ranks alone. Never the world when there
            are pipeline stages, which hold other layers. None = this rank alone.

    Returns:
        `fractions_BE`, float64, without gradient: routes over K times the real tokens; 0 where no
        token is real. `balance_loss` and `margin_balance_loss` take it.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a shape, range or device is not as above.
    """
    counts_BE, slots_B = _count(expert_ids_TK, num_experts, mask_T, num_sequences, group)
    return counts_BE.double() / slots_B.clamp(min=1)[:, None]


class LoadWindow:
    """The routes of one layer over the microbatches of an optimizer step, as they come.

    After microbatch m, with C_j its counts and T_j its real tokens,

        f_m = sum_{j <= m} C_j / (K * sum_{j <= m} T_j),

    equation 32 of the Olmo-core 3 report: the online form of the balance loss of the whole batch.
    Early microbatches see few tokens, the last sees all. Call `add` outside of what activation
    checkpointing computes twice, and `reset` after every optimizer step.

    Args:
        num_experts: E.
        device: of the counts.

    Raises:
        TypeError: `num_experts` is not an int.
        ValueError: it is not positive.
    """

    def __init__(self, num_experts: int, *, device: torch.device | str | None = None) -> None:
        check_positive("num_experts", num_experts)
        self.num_experts = num_experts
        self._counts_1E = torch.zeros(1, num_experts, dtype=torch.int64, device=device)
        self._slots_1 = torch.zeros(1, dtype=torch.int64, device=device)

    def add(
        self,
        expert_ids_TK: Tensor,
        *,
        mask_T: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Add a microbatch and return the fractions so far.

        Args:
            expert_ids_TK: int64 in [-1, E), the requested routes.
            mask_T: bool, False = padding, which counts nowhere.
            group: add the counts of these ranks too, as in `route_fractions`.

        Returns:
            `fractions_1E`, float64, this microbatch included.

        Raises:
            TypeError: a dtype is not as above.
            ValueError: a shape, range or device is not as above.
        """
        counts_1E, slots_1 = _count(expert_ids_TK, self.num_experts, mask_T, 1, group)
        self._counts_1E += counts_1E
        self._slots_1 += slots_1
        return self._counts_1E.double() / self._slots_1.clamp(min=1)

    def reset(self) -> None:
        """Forget all microbatches."""
        self._counts_1E.zero_()
        self._slots_1.zero_()


def _count(
    expert_ids_TK: Tensor,
    num_experts: int,
    mask_T: Tensor | None,
    num_sequences: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Return `counts_BE` and the number of routes that the real tokens could have, `slots_B`."""
    check_positive("num_experts", num_experts)
    check_expert_ids(expert_ids_TK, num_experts)
    check_mask(mask_T, expert_ids_TK)
    check_num_sequences(num_sequences, expert_ids_TK.shape[0])
    counts_BE, tokens_B = reference.requested_counts(
        expert_ids_TK, num_experts, mask_T, num_sequences
    )
    slots_B = expert_ids_TK.shape[1] * tokens_B
    if group is not None:
        both = torch.cat([counts_BE, slots_B[:, None]], dim=1)
        dist.all_reduce(both, group=group)
        counts_BE, slots_B = both[:, :-1], both[:, -1]
    return counts_BE, slots_B
