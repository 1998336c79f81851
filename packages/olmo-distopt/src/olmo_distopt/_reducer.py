"""Gradients summed in FP32 over the microbatches of a window, then over each parameter's replicas.

Autograd leaves one microbatch's gradient in `parameter.grad`, in the parameter's dtype. A hook adds
it at once into `parameter.main_grad`, a view of a flat FP32 bucket, and frees it. BF16 rounds each
microbatch's gradient once; every sum, over microbatches and over processes, is in FP32. (1 plus 512
times 2^-9 is 2 in FP32 and stays 1 in BF16.)

    main_grad = sum over replicas r, microbatches m of  d loss(r, m) / d parameter

SUM is the only rule. Each process scales its loss by `1 / (tokens of the whole step, on all
processes)` before backward; then the sum is the gradient of the mean loss for a dense weight and
for an expert alike, whatever the layout, the accumulation or the split of tokens. An average over a
replica group would be right for neither: an expert already sees the tokens of all expert-parallel
ranks, so dividing by its own, smaller group leaves it that many times too large.

Shapes: a bucket is one line of elements; P elements of parameters in all cost `4 P` bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ._groups import ReplicaGroup, ReplicaGroups
from ._parameters import BUCKET_BYTES, fill_buckets, trainable


@dataclass(frozen=True, slots=True)
class _Bucket:
    group: ReplicaGroup
    flat: torch.Tensor


class GradientReducer:
    """Accumulates gradients in flat buckets and sums them over the replica groups, once a window.

    One window is one optimizer step: any number of backward passes, `reduce()`, then `zero()` for
    the next. A parameter whose gradient never arrives keeps zeros on its replicas and still takes
    part in the sum, so an expert without tokens is neither a hang nor a missing tensor. What a
    parameter received early in a window stays, whatever the last microbatch does not touch.

    Args:
        named_parameters: `(global name, parameter)`, in the same order on all replicas. Frozen
            parameters are left out (`requires_grad` is read here, once). A tied weight is listed
            once.
        replica_groups: who holds replicas of which parameter.
        bucket_bytes: size above which a bucket is closed, > 0; a larger parameter has its own.
        accumulate_dtype: float32, or float64 for a check.

    Raises:
        ValueError: a parameter is listed twice, is not contiguous, holds a `.grad` or a `main_grad`
            already; or the members of a replica group list different parameters.

    Note:
        Every parameter gets the attribute `main_grad`, of its shape. The collectives run in one
        order: by group name, then in the order of `named_parameters`.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        replica_groups: ReplicaGroups,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        accumulate_dtype: torch.dtype = torch.float32,
    ) -> None:
        if accumulate_dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"`accumulate_dtype` must be float32 or float64, got {accumulate_dtype}: sums of "
                "many gradients need more bits than one gradient."
            )
        self._parameters = trainable(named_parameters)
        for name, parameter in self._parameters:
            if parameter.grad is not None or "main_grad" in vars(parameter):
                raise ValueError(
                    f"Parameter `{name}` must hold no gradient yet, got one in `.grad` or "
                    "`.main_grad`; set `.grad = None` and close the reducer it had."
                )
            if parameter.dtype.itemsize > accumulate_dtype.itemsize:
                raise ValueError(
                    f"`accumulate_dtype` must not be narrower than the gradients it adds, got "
                    f"{accumulate_dtype} for `{name}` of {parameter.dtype}."
                )
        replica_groups.require_agreement(self._parameters)
        item_bytes = accumulate_dtype.itemsize
        self._buckets = [
            _make_bucket(replica_groups.of(*members[0]), members, accumulate_dtype)
            for members in fill_buckets(
                self._parameters,
                key=lambda item: (replica_groups.of(*item).name, str(item[1].device)),
                num_bytes=lambda item: item[1].numel() * item_bytes,
                limit=bucket_bytes,
            )
        ]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulate)
            for _, parameter in self._parameters
        ]
        self._reduced = False

    def zero(self) -> None:
        """Clear every bucket and open the next window."""
        for bucket in self._buckets:
            bucket.flat.zero_()
        self._reduced = False

    def reduce(self) -> None:
        """Sum every bucket over its replica group, in place; ends the window.

        Raises:
            RuntimeError: the window is already reduced, the reducer is closed, or a gradient was
                put in `.grad` by other means than a backward pass.
        """
        if not self._hooks and self._parameters:
            raise RuntimeError("`reduce()` was called on a closed `GradientReducer`.")
        if self._reduced:
            raise RuntimeError(
                "`reduce()` must be called once a window; call `zero()` before the next one. A "
                "second sum would multiply the gradients by the size of their groups."
            )
        for name, parameter in self._parameters:
            if parameter.grad is not None:
                raise RuntimeError(
                    f"`.grad` of `{name}` must be empty, as backward leaves it; add a gradient "
                    "made by hand to `.main_grad`."
                )
        for bucket in self._buckets:
            if bucket.group.size > 1:
                dist.all_reduce(bucket.flat, group=bucket.group.process_group)
        self._reduced = True

    def close(self) -> None:
        """Remove the hooks and every `main_grad`; the parameters are as they were before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for _, parameter in self._parameters:
            vars(parameter).pop("main_grad", None)
        self._buckets = []

    def _accumulate(self, parameter: nn.Parameter) -> None:
        if self._reduced:
            raise RuntimeError(
                "A gradient arrived after `reduce()`; call `zero()` before the next backward."
            )
        vars(parameter)["main_grad"].add_(parameter.grad)
        parameter.grad = None


def _make_bucket(
    group: ReplicaGroup, members: list[tuple[str, nn.Parameter]], dtype: torch.dtype
) -> _Bucket:
    """Return a bucket of zeros and give each member its view of it."""
    sizes = [parameter.numel() for _, parameter in members]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=members[0][1].device)
    for (_, parameter), piece in zip(members, flat.split(sizes), strict=True):
        vars(parameter)["main_grad"] = piece.view_as(parameter)
    return _Bucket(group, flat)
