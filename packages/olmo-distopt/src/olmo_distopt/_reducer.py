"""Gradients summed in FP32 over the microbatches of a window, then over each parameter's replicas.

Autograd leaves one microbatch's gradient in `parameter.grad`, in the parameter's dtype. A hook adds
it at once into `parameter.main_grad`, a view of a flat FP32 bucket, and frees it. BF16 rounds each
microbatch's gradient once; every sum, over microbatches and over processes, is in FP32. (1 plus 512
times 2^-9 is 2 in FP32 and stays 1 in BF16.)

    main_grad = sum over replicas r, microbatches m of  d loss(r, m) / d parameter

SUM is the only rule. An average over a replica group would be right for no parameter: an expert
already sees the tokens of all expert-parallel ranks, so dividing by its own, smaller group leaves
it that many times too large. The mean over tokens is made in one of two ways, alike for dense
weights and experts: each process scales its loss by `1 / (tokens of the whole step, on all
processes)`, or leaves each loss a sum over tokens and gives `reduce()` its number of tokens.

Shapes: a bucket is one line of elements; P elements of parameters in all cost `4 P` bytes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

import torch
import torch.distributed as dist
from torch import nn

from ._accumulate import accumulate
from ._agreement import agree
from ._arguments import require_count, require_positive, require_range, require_zero_d
from ._bucket_order import BUCKET_BYTES, fill_buckets
from ._collective import collective_device, is_together
from ._gradient_bucket import GradientBucket
from ._groups import ReplicaGroups
from ._impl import Impl, require_impl, runs_kernel
from ._parameters import GradientWindow, require_own_memory, require_values, trainable
from ._partition import MIN_SHARD_NUMEL, equal_ranges

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Collective = Literal["all_reduce", "reduce_scatter"]

# Reduce-scatters whose copies may exist at a time.
_MOST_COPIES = 2


class GradientReducer:
    """Accumulates gradients in flat buckets and sums them over the replica groups, once a window.

    One window is one optimizer step: any number of backward passes, `reduce()`, then `zero()` for
    the next. A parameter whose gradient never arrives keeps zeros on its replicas and still takes
    part in the sum, so an expert without tokens is neither a hang nor a missing tensor. What a
    parameter received early in a window stays, whatever the last microbatch does not touch.

    With `overlap`, a bucket's reduction starts within backward, as soon as every gradient in it has
    arrived outside of `no_sync()` and the buckets before it have started; `reduce()` starts the
    rest and waits. All backward passes but the last one of each parameter then belong in
    `no_sync()`: the last microbatch's, or with a pipeline the last one of each chunk. Where a
    schedule mixes them, `zero(num_gradients=...)` says instead how many each parameter gets.

    Args:
        named_parameters: `(global name, parameter)`, in the same order on all replicas; the order
            in which forward uses them is best for `overlap`. Frozen parameters are left out
            (`requires_grad` is read here, once). A tied weight is listed once.
        replica_groups: who holds replicas of which parameter.
        bucket_bytes: size above which a bucket is closed, > 0; a larger parameter has its own.
        accumulate_dtype: float32, or float64 for a check.
        collective: "all_reduce": every replica holds the whole sum. "reduce_scatter": half the
            traffic; of a tensor that `ShardedAdamW` cuts, each replica holds the sum of its own
            range, which `main_grad_range` names, and scratch elsewhere. Not for `ShardedMuon`.
        overlap: start reductions within backward. The sums have the same bits either way.
        min_shard_numel: for "reduce_scatter", as in `ShardedAdamW`.
        impl: how gradients are added, with the same bits: "triton" on CUDA, "reference" in plain
            torch. "auto" is "triton" on CUDA of compute capability 8.0 or newer, else "reference".

    Raises:
        TypeError: an argument of another kind than those above.
        ValueError: an option is none of those above; a parameter is listed twice, is not
            contiguous, not of real floating numbers or without memory of its own, holds a `.grad`
            or a `main_grad` already; or, on all members of a replica group, one was refused, or
            they list different parameters or have different options.
        RuntimeError: "triton" without triton.

    Note:
        Every parameter gets the attribute `main_grad`, of its shape. A kernel may add to it itself
        and give autograd no gradient; see `gradient_added`. Buckets fill from the end of the list,
        where backward begins; see `_bucket_order` for that of the collectives. Nothing is read from
        the device. An all-reduce needs no memory of its own, a reduce-scatter up to two copies of a
        bucket. Members of a group must use the same options: construction is collective and
        compares them, apart from `overlap` and `impl`, which change no bit.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        replica_groups: ReplicaGroups,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        accumulate_dtype: torch.dtype = torch.float32,
        collective: Collective = "all_reduce",
        overlap: bool = False,
        min_shard_numel: int = MIN_SHARD_NUMEL,
        impl: Impl = "auto",
    ) -> None:
        def check() -> list[tuple[str, nn.Parameter]]:
            if accumulate_dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"`accumulate_dtype` must be float32 or float64, got {accumulate_dtype}: sums "
                    "of many gradients need more bits than one gradient."
                )
            if collective not in get_args(Collective):
                raise ValueError(
                    f"`collective` must be one of {get_args(Collective)}, got {collective!r}."
                )
            require_positive("bucket_bytes", bucket_bytes)
            require_count("min_shard_numel", min_shard_numel, 0)
            require_impl(impl)
            if impl == "triton" and accumulate_dtype != torch.float32:
                raise ValueError("`impl='triton'` adds to float32, got `accumulate_dtype` float64.")
            parameters = trainable(named_parameters)
            require_own_memory(parameters)
            for name, parameter in parameters:
                require_values(name, parameter)
                _require_clean(name, parameter, accumulate_dtype)
                runs_kernel(impl, parameter.device)
            return parameters

        self._parameters = agree(
            replica_groups,
            check,
            lambda pair: (
                replica_groups.of(*pair),
                (pair[0], tuple(pair[1].shape), str(pair[1].dtype)),
            ),
            {
                **{"bucket_bytes": bucket_bytes, "accumulate_dtype": accumulate_dtype},
                **{"collective": collective, "min_shard_numel": min_shard_numel},
            },
        )
        self._impl: Impl = impl
        self._overlap, self._syncs = overlap, True
        self._buckets = _pack(
            self._parameters,
            replica_groups,
            bucket_bytes=bucket_bytes,
            dtype=accumulate_dtype,
            # A size that no tensor reaches: nothing is cut, so everything is all-reduced.
            min_shard_numel=min_shard_numel if collective == "reduce_scatter" else sys.maxsize,
        )
        self._name_of = {parameter: name for name, parameter in self._parameters}
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._main_grads = {p: vars(p)["main_grad"] for p in self._bucket_of}
        self._window = GradientWindow()
        for _, parameter in self._parameters:
            vars(parameter)["main_grad_window"] = self._window
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulate)
            for _, parameter in self._parameters
        ]
        self._open_window()

    def zero(self, *, num_gradients: int | None = None) -> None:
        """Clear every bucket and open the next window.

        Args:
            num_gradients: how many gradients each parameter gets in it, >= 1: one a microbatch,
                whatever the order in which a pipeline brings them. With `overlap` its reduction may
                begin with the last of them, and `no_sync()` is not needed; one that gets fewer is
                reduced in `reduce()`. None: `no_sync()` holds for all but the last.

        Raises:
            TypeError: `num_gradients` is no whole number.
            ValueError: it is below 1.
            RuntimeError: the reducer is closed; or reductions of this window have begun within
                backward, which `reduce()` ends on all replicas alike.
        """
        if num_gradients is not None:
            require_count("num_gradients", num_gradients, 1)
        self._require_not_closed("zero")
        if self._num_launched and not self._window.is_reduced:
            raise RuntimeError(
                "`zero()` must wait for `reduce()`: reductions of this window have begun within "
                "backward, and other replicas wait for them."
            )
        for bucket in self._buckets:
            bucket.zero()
        self._open_window(num_gradients)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Hold for backward passes after which more gradients of the same parameters come.

        With `overlap` they start no reduction. Without it none starts before `reduce()` anyway, and
        the context only refuses that call.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def gradient_added(self, parameter: nn.Parameter) -> None:
        """Say that a kernel has added a whole gradient to `parameter.main_grad` by itself.

        Called once a backward pass of the parameter, within it, after the kernel's launch and on
        its stream. Autograd calls the reducer for a parameter that got no gradient as well (torch
        2.11 does), so the call is needed only where the kernel has a stream of its own, or where
        another torch would let the parameter's reduction wait for `reduce()`.

        Args:
            parameter: a listed parameter that requires a gradient.

        Raises:
            ValueError: the parameter is not listed.
            RuntimeError: as for a gradient that autograd brings: the window is reduced, or the
                parameter has had its last gradient.
        """
        if parameter not in self._bucket_of:
            raise ValueError(
                "`parameter` must be one of the reducer's trainable parameters, got one of shape "
                f"{tuple(parameter.shape)} that is not listed."
            )
        self._require_open(parameter)
        self._said.add(parameter)
        self._note_arrival(parameter)

    def reduce(
        self,
        *,
        num_tokens: torch.Tensor | float | None = None,
        token_group: ProcessGroup | None = None,
    ) -> None:
        """Sum every bucket over its replica group, in place; ends the window.

        Args:
            num_tokens: tokens that this process's losses of the window were summed over, 0-d on the
                parameters' device or a number, >= 0; also where this process holds no parameter.
                Every gradient is then divided by their sum over `token_group` (by 1 if that is 0),
                after which it is the gradient of the mean over all tokens, whatever share of them
                each process and microbatch had. None: the losses were scaled before backward.
            token_group: the processes that hold different tokens, of one pipeline stage: the data
                group. None: the default group if torch.distributed is initialised, else this
                process alone.

        Raises:
            TypeError: `num_tokens` is neither a number nor a tensor.
            ValueError: it is a number below 0 or not finite, or not 0-d. Of a tensor that is below
                0 or NaN nothing is read: every gradient of every process becomes NaN.
            RuntimeError: the window is already reduced, the reducer is closed, `no_sync()` is
                active, a gradient was put in `.grad` by other means than a backward pass, or a
                `main_grad` is not the reducer's own.
        """
        self._require_reducible()
        if num_tokens is not None:
            _require_tokens(num_tokens)
        for bucket in self._buckets[self._num_launched :]:
            self._launch(bucket)
        for bucket in self._buckets:
            bucket.finish()
        self._window.is_reduced = True
        if num_tokens is not None:  # also where there is no bucket: the others count on this one
            lines = [bucket.flat for bucket in self._buckets]
            total = _sum_tokens(num_tokens, token_group, collective_device(lines, token_group))
            for bucket in self._buckets:
                bucket.divide(total)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: the hooks belong to the parameters of one model."""
        raise TypeError(
            "A `GradientReducer` belongs to the parameters of one model and cannot be copied or "
            "pickled; make one over the copy of a model."
        )

    def close(self) -> None:
        """Remove the hooks and every `main_grad`; the parameters are as they were before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for bucket in self._buckets:
            bucket.finish()
        for _, parameter in self._parameters:
            for attribute in ("main_grad", "main_grad_range", "main_grad_window"):
                vars(parameter).pop(attribute, None)
        self._buckets = []

    def _open_window(self, num_gradients: int | None = None) -> None:
        self._window.is_reduced = False
        self._num_gradients = num_gradients
        self._num_arrived: dict[nn.Parameter, int] = {}
        self._num_launched = 0
        self._arrived: set[nn.Parameter] = set()
        self._said: set[nn.Parameter] = set()  # by a kernel, before autograd's own news

    @torch.no_grad()  # also of a backward that makes a graph of itself
    def _accumulate(self, parameter: nn.Parameter) -> None:
        """Take one gradient from autograd, or the news that a backward left none."""
        if parameter.grad is None and parameter in self._said:
            self._said.remove(parameter)
            return
        self._require_open(parameter)
        if parameter.grad is not None:
            main_grad, grad = self._main_grads[parameter], parameter.grad
            if (
                grad.device != main_grad.device
                or grad.shape != main_grad.shape
                or grad.dtype.itemsize > main_grad.dtype.itemsize
            ):
                raise RuntimeError(
                    f"The gradient of `{self._name_of[parameter]}` must have the shape "
                    f"{tuple(main_grad.shape)} and the device {main_grad.device} of its "
                    f"`main_grad`, and no wider a dtype than {main_grad.dtype}, got "
                    f"{tuple(grad.shape)}, {grad.dtype} on {grad.device}; move a model first, then "
                    "make its reducer and its optimizer."
                )
            accumulate(main_grad, grad, self._impl)
            parameter.grad = None
        self._note_arrival(parameter)

    def _note_arrival(self, parameter: nn.Parameter) -> None:
        """Start what reductions can start now that `parameter` has had a gradient."""
        bucket = self._bucket_of[parameter]
        bucket.note_stream()
        if not (self._overlap and self._syncs):
            return
        if self._num_gradients is not None:
            count = self._num_arrived[parameter] = self._num_arrived.get(parameter, 0) + 1
            if count < self._num_gradients:
                return
        self._arrived.add(parameter)
        bucket.num_awaited -= 1
        while self._num_launched < len(self._buckets):
            bucket = self._buckets[self._num_launched]
            if bucket.num_awaited:
                break
            self._launch(bucket)

    def _launch(self, bucket: GradientBucket) -> None:
        """Start the next bucket's reduction; the copies of earlier ones are freed first."""
        if bucket.scatters:
            started = [each for each in self._buckets[: self._num_launched] if each.scatters]
            for earlier in started[: -(_MOST_COPIES - 1)]:
                earlier.finish()
        bucket.launch()
        self._num_launched += 1

    def _require_open(self, parameter: nn.Parameter) -> None:
        if self._window.is_reduced:
            raise RuntimeError(
                "A gradient arrived after `reduce()`; call `zero()` before the next backward."
            )
        if parameter in self._arrived and self._num_gradients is not None:
            raise RuntimeError(
                f"`{self._name_of[parameter]}` must get the {self._num_gradients} gradients that "
                "`zero(num_gradients=...)` announced, and no later one, but another arrived: with "
                "`overlap` its reduction may have begun."
            )
        if parameter in self._arrived:
            raise RuntimeError(
                f"`{self._name_of[parameter]}` must get one gradient a window outside of "
                "`no_sync()`, and no later one, but a second arrived: with `overlap` its reduction "
                "may have begun. Put all backward passes but its last into `no_sync()`."
            )

    def _require_not_closed(self, method: str) -> None:
        if not self._hooks and self._parameters:
            raise RuntimeError(f"`{method}()` was called on a closed `GradientReducer`.")

    def _require_reducible(self) -> None:
        self._require_not_closed("reduce")
        if not self._syncs:
            raise RuntimeError("`reduce()` must be called outside of `no_sync()`.")
        if self._window.is_reduced:
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
            if vars(parameter).get("main_grad") is not self._main_grads.get(parameter):
                raise RuntimeError(
                    f"`main_grad` of `{name}` must be the tensor that the reducer put there, a "
                    "part of what it reduces, got another one; write into it, as by `copy_`."
                )


def _require_clean(name: str, parameter: nn.Parameter, accumulate_dtype: torch.dtype) -> None:
    if parameter.grad is not None or "main_grad" in vars(parameter):
        raise ValueError(
            f"Parameter `{name}` must hold no gradient yet, got one in `.grad` or "
            "`.main_grad`; set `.grad = None` and close the reducer it had, or, of a model that "
            "was pickled, `del` its `.main_grad`."
        )
    if parameter.dtype.itemsize > accumulate_dtype.itemsize:
        raise ValueError(
            f"`accumulate_dtype` must not be narrower than the gradients it adds, got "
            f"{accumulate_dtype} for `{name}` of {parameter.dtype}."
        )


def _pack(
    parameters: list[tuple[str, nn.Parameter]],
    replica_groups: ReplicaGroups,
    *,
    bucket_bytes: int,
    dtype: torch.dtype,
    min_shard_numel: int,
) -> list[GradientBucket]:
    """Return the buckets in the order of their reductions, the last parameters first."""
    groups = {parameter: replica_groups.of(name, parameter) for name, parameter in parameters}
    ranges = {
        parameter: equal_ranges(parameter.numel(), groups[parameter].size, min_shard_numel)
        for _, parameter in parameters
    }
    buckets = fill_buckets(
        reversed(parameters),
        key=lambda item: (
            groups[item[1]].name,
            str(item[1].device),
            str(item[1].dtype),
            "whole" if ranges[item[1]] is None else "cut",
        ),
        num_bytes=lambda item: item[1].numel() * dtype.itemsize,
        limit=bucket_bytes,
    )
    packed = []
    for members in buckets:
        group = groups[members[0][1]]
        own = [cut[group.rank] for _, parameter in members if (cut := ranges[parameter])]
        packed.append(GradientBucket(group, [p for _, p in members], own or None, dtype))
    return packed


def _require_tokens(num_tokens: object) -> None:
    if isinstance(num_tokens, torch.Tensor):
        require_zero_d("num_tokens", num_tokens)
    else:
        require_range("num_tokens", num_tokens, 0.0, math.inf)


def _sum_tokens(
    num_tokens: torch.Tensor | float, group: ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """Return the number of tokens of all processes, a 0-d float64: 1 for 0, NaN for no number."""
    if isinstance(num_tokens, torch.Tensor):
        total = num_tokens.detach().to(device, torch.float64, copy=True)
        total = torch.where(total >= 0, total, math.nan)
    else:
        total = torch.full((), float(num_tokens), dtype=torch.float64, device=device)
    if is_together():
        dist.all_reduce(total, group=group)
    return torch.where(total == 0, 1.0, total)
