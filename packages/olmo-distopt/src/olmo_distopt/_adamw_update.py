"""One AdamW update of lines of elements, in place, by plain torch or by a Triton kernel.

The elementwise rule is that of `reference.adamw`, in the order of operations of
`torch.optim.AdamW`; in float32, whatever the dtype of the moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ._arguments import require_betas, require_number
from ._bucket_order import fill_buckets
from ._groups import ReplicaGroup
from ._impl import Impl, require_impl, runs_kernel
from ._moments import require_moment_dtype
from ._partition import equal_ranges
from ._tensor_state import Plan, TensorState

EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWRule:
    """What does not change between steps; `check` it before use."""

    betas: tuple[float, float]
    eps: float
    moment_dtype: torch.dtype
    impl: Impl

    def check(self, devices: Iterable[torch.device]) -> None:
        """Raise for what cannot be.

        Args:
            devices: those of the parameters.

        Raises:
            TypeError: `betas` are not two numbers, or `eps` is none.
            ValueError: a number out of range, BF16 moments that would stand still, or "triton" on
                a device that cannot run it.
            RuntimeError: "triton" without triton.
        """
        require_impl(self.impl)
        for device in devices:
            runs_kernel(self.impl, device)
        require_betas(self.betas)
        if not 0 < require_number("eps", self.eps) < math.inf:
            raise ValueError(f"`eps` must be > 0 and finite, got {self.eps}.")
        require_moment_dtype(self.moment_dtype, "betas", *self.betas)

    def options(self) -> dict[str, object]:
        """Return what must be the same on all replicas, by name."""
        return asdict(self)

    def plan(self, parameter: nn.Parameter, group: ReplicaGroup, min_shard_numel: int) -> Plan:
        """Return what is kept of a parameter: both moments, of equal ranges of it."""
        ranges = equal_ranges(parameter.numel(), group.size, min_shard_numel)
        return Plan(ranges, {EXP_AVG: self.moment_dtype, EXP_AVG_SQ: self.moment_dtype})

    def corrections(self, num_steps: torch.Tensor) -> Corrections:
        """Return the corrections of the step that makes the count `num_steps`, 0-d int64."""
        steps = num_steps.double()
        beta1, beta2 = self.betas
        return Corrections(1 - beta1**steps, (1 - beta2**steps).sqrt())


@dataclass(frozen=True, slots=True)
class Corrections:
    """How far the moments still are from averages: `1 - b1^t` and `sqrt(1 - b2^t)`, 0-d float64."""

    mean: torch.Tensor
    root: torch.Tensor


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Main weights, gradient, both moments, and the parameter's elements that receive the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """What one step does to all elements of the same factors, on their device.

    Attributes:
        minus_rate: 0-d float32, `-lr / (1 - b1^t)`.
        root_correction: 0-d float32, `sqrt(1 - b2^t)`.
        grad_scale: 0-d float32 or None.
        skip: 0-d bool or None.
        keep: `1 - lr * weight_decay`.
    """

    minus_rate: torch.Tensor
    root_correction: torch.Tensor
    grad_scale: torch.Tensor | None
    skip: torch.Tensor | None
    keep: float


RateKey = tuple[torch.device, float, float]
"""What decides the rates of a state: its device, and its factors of `lr` and `weight_decay`."""

# Plain torch updates tensors of at most so many elements together, up to so many in all: a dozen
# operations on each cost the host more than to copy them to one line and back.
_SMALL_NUMEL, _TOGETHER_NUMEL = 2**14, 2**20

# Of what the kernel reads and writes; other floating dtypes are plain torch's.
_KERNEL_WEIGHTS = {torch.float32, torch.bfloat16, torch.float16}
_KERNEL_GRADS = {torch.float64, *_KERNEL_WEIGHTS}


class AdamWUpdate:
    """The update of many parameters' states, in place.

    With the kernel there is one launch for all that share device, rates, dtypes and alignment, and
    what it reads is looked up once and not in every step: see `forget_places`.

    Args:
        rule: the constants.
    """

    def __init__(self, rule: AdamWRule) -> None:
        self._rule = rule
        # What has been looked up; None: nothing. The kernel's lines are in tables on the device.
        self._plain: dict[RateKey, list[list[TensorState]]] | None = None
        self._tables: dict[RateKey, Any] = {}

    def forget_places(self) -> None:
        """Hear that a gradient or a parameter is no longer where the last update found it."""
        self._plain = None

    def update(
        self,
        states: Sequence[TensorState],
        num_steps: torch.Tensor,
        *,
        lr: float,
        weight_decay: float,
        grad_scale: torch.Tensor | None,
        skip: torch.Tensor | None,
    ) -> None:
        """Update main weights and moments, and write the weights into the parameters.

        Args:
            states: with the moments `exp_avg` and `exp_avg_sq`, the same at every call.
            num_steps: 0-d int64, this step included.
            lr: learning rate, of which each state has a factor.
            weight_decay: likewise, a rate.
            grad_scale: 0-d factor of the gradients, or None.
            skip: 0-d bool; where True nothing changes a bit. None: False.
        """
        plain = self._look_up(states) if self._plain is None else self._plain
        corrections = self._rule.corrections(num_steps)
        for key in self._tables | plain:
            device, lr_scale, decay = key
            rates = _Rates(
                minus_rate=(-(lr * lr_scale) / corrections.mean).to(device, torch.float32),
                root_correction=corrections.root.to(device, torch.float32),
                grad_scale=None if grad_scale is None else grad_scale.to(device, torch.float32),
                skip=None if skip is None else skip.to(device),
                keep=1 - lr * lr_scale * (weight_decay * decay),
            )
            if key in self._tables:
                self._launch(self._tables[key], rates)
            for together in plain.get(key, ()):
                _update_together([_tensors(state) for state in together], rates, self._rule)

    def _look_up(self, states: Sequence[TensorState]) -> dict[RateKey, list[list[TensorState]]]:
        """Make the tables of what the kernel updates; return the other states, in lots."""
        plain: dict[RateKey, list[TensorState]] = {}
        lines: dict[RateKey, list[Tensors]] = {}
        for state in states:
            if not state.main.numel():
                continue
            key = (state.main.device, state.lr_scale, state.decay)
            if runs_kernel(self._rule.impl, state.main.device, _why_not_these(state)):
                lines.setdefault(key, []).append(_tensors(state))
            else:
                plain.setdefault(key, []).append(state)
        self._tables = {}
        if lines:
            from ._triton.adamw import Line, tabulate

            self._tables = {
                key: tabulate([Line(*line) for line in each]) for key, each in lines.items()
            }
        self._plain = {key: _lots(each) for key, each in plain.items()}
        return self._plain

    def _launch(self, tables: Any, rates: _Rates) -> None:
        from ._triton.adamw import adamw

        adamw(
            *(tables, rates.minus_rate, rates.root_correction, rates.grad_scale, rates.skip),
            betas=self._rule.betas,
            eps=self._rule.eps,
            keep=rates.keep,
        )


def _tensors(state: TensorState) -> Tensors:
    moments = state.moments[EXP_AVG], state.moments[EXP_AVG_SQ]
    return (state.main, state.grad(), *moments, state.slice_of(state.parameter))


def _why_not_these(state: TensorState) -> str | None:
    """Say why the kernel cannot take the dtypes of a state, or return None when it can."""
    weight, grad = state.parameter.dtype, state.grad().dtype
    if weight in _KERNEL_WEIGHTS and grad in _KERNEL_GRADS:
        return None
    return f"takes no weight of {weight} with a gradient of {grad}, as `{state.name}` has"


def _lots(states: Sequence[TensorState]) -> list[list[TensorState]]:
    """Return the states in lots: small ones of the same dtypes together, others by themselves."""
    return fill_buckets(
        states,
        key=lambda state: (str(state.grad().dtype), str(state.parameter.dtype)),
        num_bytes=lambda state: (
            _TOGETHER_NUMEL if state.main.numel() > _SMALL_NUMEL else state.main.numel()
        ),
        limit=_TOGETHER_NUMEL,
    )


def _update_together(lines: list[Tensors], rates: _Rates, rule: AdamWRule) -> None:
    """Update lines of the same dtypes, elementwise as each alone and so with the same bits."""
    if len(lines) == 1:
        _update(lines[0], rates, rule)
        return
    main, grad, exp_avg, exp_avg_sq, copy = zip(*lines, strict=True)
    sizes = [line.numel() for line in main]
    columns = (main, exp_avg, exp_avg_sq, copy)
    joined = [torch.cat(column) for column in columns]
    _update((joined[0], torch.cat(grad), *joined[1:]), rates, rule)  # pyright: ignore[reportArgumentType] # five
    for column, line in zip(columns, joined, strict=True):
        torch.split_with_sizes_copy(line, sizes, out=column)


def _update(line: Tensors, rates: _Rates, rule: AdamWRule) -> None:
    main, grad, exp_avg, exp_avg_sq, copy = line
    beta1, beta2 = rule.betas
    grad = grad.float() if rates.grad_scale is None else grad.float() * rates.grad_scale
    old = (main, exp_avg, exp_avg_sq)
    new_main, mean, square = (each.to(torch.float32, copy=rates.skip is not None) for each in old)
    if rates.keep != 1:
        new_main.mul_(rates.keep)
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = square.sqrt().div_(rates.root_correction).add_(rule.eps)
    new_main.addcdiv_(mean * rates.minus_rate, root)
    write(old, (new_main, mean, square), rates.skip)
    copy.copy_(main)


def write(
    old: tuple[torch.Tensor, ...], new: tuple[torch.Tensor, ...], skip: torch.Tensor | None
) -> None:
    """Copy each of `new` over its `old`, in the dtype of `old`, unless `skip`."""
    for before, after in zip(old, new, strict=True):
        if after is not before:
            before.copy_(after if skip is None else torch.where(skip, before, after))
