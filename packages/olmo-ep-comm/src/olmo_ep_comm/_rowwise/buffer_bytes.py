"""The memory of a one-sided exchange before there is one."""

import torch
from torch import Tensor

from olmo_ep_comm._pair_codec import PairCodec

from .checks import check_shares, make_form
from .sizes import CombineBy


def rowwise_buffer_bytes(
    *,
    num_ranks: int,
    num_experts: int,
    max_tokens: int,
    width: int,
    top_k: int,
    dtype: torch.dtype = torch.bfloat16,
    capacity: int | None = None,
    live_forwards: int = 1,
    codec: PairCodec | None = None,
    backward_codec: PairCodec | None = None,
    combine_by: CombineBy = "get",
) -> dict[str, int]:
    """Return the bytes of each buffer that a `RowwiseDispatcher` allocates on every rank, by name.

    Nothing is allocated and no process group is needed. The arguments are those of
    `RowwiseDispatcher` and mean the same; `num_ranks` is the size of its group.

    Raises:
        ValueError: If a number is out of range or the experts do not divide over the ranks.
        TypeError: If the dtype is neither bfloat16 nor float32.
    """
    check_shares(num_ranks, num_experts)
    return make_form(
        num_ranks=num_ranks,
        num_experts=num_experts,
        max_tokens=max_tokens,
        width=width,
        top_k=top_k,
        dtype=dtype,
        capacity=capacity,
        admit=None if capacity is None else _keep_all,
        live_forwards=live_forwards,
        codec=codec,
        backward_codec=backward_codec,
        combine_by=combine_by,
    ).buffer_bytes()


def _keep_all(requested_SQL: Tensor, capacity: int) -> Tensor:
    return requested_SQL
