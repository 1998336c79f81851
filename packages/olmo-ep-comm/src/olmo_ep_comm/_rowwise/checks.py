"""Checks of what a caller of the one-sided exchange hands in."""

from typing import get_args

import torch
from torch import Tensor

from olmo_ep_comm._checks import (
    check_fits,
    check_inputs,
    check_num_experts,
    check_positive,
)
from olmo_ep_comm._pair_codec import PairCodec, check_codecs, pack_rows

from .buffers import Buffers
from .plan import Admit
from .sizes import ALIGN_BYTES, CombineBy, Form, dropless_capacity

DTYPES = (torch.bfloat16, torch.float32)
_LARGEST = 2**31 - 1


def check_shares(num_ranks: int, num_experts: int) -> None:
    """Raise ValueError unless the experts divide over the ranks."""
    check_num_experts(num_experts)
    check_positive("num_ranks", num_ranks)
    if num_experts % num_ranks:
        raise ValueError(
            f"`num_experts` must be a multiple of `num_ranks`, got {num_experts} and {num_ranks}."
        )


def make_form(
    *,
    num_ranks: int,
    num_experts: int,
    max_tokens: int,
    width: int,
    top_k: int,
    dtype: torch.dtype,
    capacity: int | None,
    admit: Admit | None,
    live_forwards: int,
    codec: PairCodec | None,
    backward_codec: PairCodec | None,
    combine_by: CombineBy,
) -> Form:
    """Return the sizes of an exchange, with the capacity that drops nothing if none is given.

    Raises:
        ValueError: If a number is out of range or `capacity` and `admit` do not come together.
        TypeError: If the dtype is neither bfloat16 nor float32.
    """
    for name, value in (("max_tokens", max_tokens), ("width", width), ("top_k", top_k)):
        check_positive(name, value)
    check_positive("live_forwards", live_forwards)
    check_codecs(codec, backward_codec)
    if admit is not None and not callable(admit):
        raise TypeError(
            f"`admit` must be a function of the requested routes and the capacity, got {admit!r}."
        )
    if combine_by not in get_args(CombineBy):
        raise ValueError(f"`combine_by` must be one of {get_args(CombineBy)}, got {combine_by!r}.")
    if dtype not in DTYPES:
        raise TypeError(f"`dtype` must be torch.bfloat16 or torch.float32, got {dtype}.")
    if width * dtype.itemsize % ALIGN_BYTES:
        raise ValueError(
            f"`width` must be a multiple of {ALIGN_BYTES // dtype.itemsize} for {dtype}, so that "
            f'rows fill whole words of {ALIGN_BYTES} bytes, got {width}; use "all_to_all" for '
            "other widths."
        )
    if (capacity is None) != (admit is None):
        given, absent = ("capacity", "admit") if admit is None else ("admit", "capacity")
        raise ValueError(
            f"`capacity` and `admit` must be given together, got `{given}` without `{absent}`; "
            "the first says how many rows fit and the second which are kept."
        )
    if capacity is None:
        capacity = dropless_capacity(num_ranks, num_experts, max_tokens, top_k)
    check_positive("capacity", capacity)
    for what, number in (
        ("`ranks * max_tokens * top_k`", num_ranks * max_tokens * top_k),
        ("`capacity`", capacity),
    ):
        if number > _LARGEST:
            raise ValueError(f"{what} must be less than 2^31, got {number}; lower `max_tokens`.")
    return Form(
        num_ranks=num_ranks,
        num_experts=num_experts,
        max_tokens=max_tokens,
        width=width,
        top_k=top_k,
        dtype=dtype,
        capacity=capacity,
        scale_bytes=_scale_bytes(codec, width, dtype),
        gradient_scale_bytes=_scale_bytes(backward_codec, width, dtype),
        live_forwards=live_forwards,
        combine_by=combine_by,
    )


def _scale_bytes(codec: PairCodec | None, width: int, dtype: torch.dtype) -> int | None:
    if codec is None:
        return None
    return pack_rows(codec, torch.empty(0, width, dtype=dtype)).bytes_NB.shape[1] - width


def check_call(buffers: Buffers, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> None:
    """Raise unless the inputs of a dispatch fit together and into the buffers.

    Ids are not looked at: unknown ones travel with the counts and are a fault of all ranks.
    """
    form = buffers.settings.form
    check_inputs(x_TD, expert_ids_TK, weights_TK)
    check_fits(x_TD, expert_ids_TK, form.max_tokens, form.width, form.top_k)
    if x_TD.dtype != form.dtype:
        raise TypeError(
            f"`x_TD` must have the `dtype` of the dispatcher, {form.dtype}, got {x_TD.dtype}."
        )
    if weights_TK.dtype != torch.float32:
        raise TypeError(f"`weights_TK` must be torch.float32, got {weights_TK.dtype}.")
    if x_TD.device != buffers.memory.device:
        raise ValueError(
            f"`x_TD` must be on the device of the buffers, {buffers.memory.device}, "
            f"got {x_TD.device}."
        )
