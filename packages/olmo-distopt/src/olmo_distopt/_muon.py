"""Muon on whole matrices, each owned by one process of its replica group; AdamW for the rest.

An orthogonalisation needs the whole matrix, so a matrix is never cut: one replica owns it
(`_matrix_owners` says which), keeps its FP32 main weights and its momentum, updates it and sends it
to the others. What `matrices` does not choose is AdamW's, cut as `ShardedAdamW` cuts it.

    B <- lerp(B, G, 1 - mu)      U = lerp(G, B, mu)      w <- (1 - lr wd) w - lr s O(U)

Bytes a parameter of a matrix: weight 2 + main_grad 4 (BF16 weights), plus 8 / D on average, or
6 / D with BF16 momentum: `6 + 8/D`, experts `6/M + 8/D_all`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, get_args

import torch
from torch import nn

from ._adamw_update import AdamWRule, AdamWUpdate, write
from ._arguments import require_count, require_range, require_rule
from ._bucket_order import BUCKET_BYTES
from ._flat_shard import Location
from ._groups import ReplicaGroups
from ._impl import Impl
from ._matrix_owners import share_out
from ._moments import require_moment_dtype
from ._newton_schulz import orthogonalize, scale_to_unit
from ._parameter_kinds import is_hidden_matrix
from ._partition import MIN_SHARD_NUMEL
from ._sharded_optimizer import Member, Rebuilt, ShardedOptimizer
from ._tensor_state import Plan, TensorState

Scale = Literal["shape", "adamw_rms"]
MOMENTUM = "momentum"


class ShardedMuon(ShardedOptimizer):
    """Muon over `main_grad` for matrices and stacks of them, AdamW for everything else.

    Args:
        named_parameters: `(global name, parameter)`, in the same order on all replicas. Frozen
            parameters are left out. A chosen parameter is (rows, columns), or (n, rows, columns)
            for a stack of n matrices that are orthogonalised one by one.
        replica_groups: who holds replicas of which parameter.
        lr: learning rate, >= 0; the attribute `lr` may be set between steps. Not saved. It is
            AdamW's too, times `lr_scale`: with `scale="adamw_rms"` one rate suits both.
        matrices: `(name, parameter) -> bool`, which parameters are Muon's. None:
            `is_hidden_matrix`.
        momentum: in [0, 1); at most 1 - 2^-8 with BF16 moments.
        nesterov: whether the gradient is mixed in once more.
        num_iterations: Newton-Schulz iterations, >= 1.
        scale: of a matrix's update: "shape", `sqrt(max(1, rows / columns))`; or "adamw_rms",
            `0.2 sqrt(max(rows, columns))`, which makes its root mean square that of AdamW's.
        product_dtype: of the Newton-Schulz products: bfloat16, or float32 for a check.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: as in `ShardedAdamW`, for both.
        decay: as in `ShardedAdamW`, for both.
        lr_scale: as in `ShardedAdamW`, for both.
        moment_dtype: of the momentum and of AdamW's moments, float32 or bfloat16.
        min_shard_numel: as in `ShardedAdamW`, for what is AdamW's.
        bucket_bytes: as in `ShardedAdamW`.
        locations: as in `ShardedAdamW`.
        after_rebuild: as in `ShardedAdamW`.
        impl: as in `ShardedAdamW`; of Muon's own work the Newton-Schulz products have kernels, for
            bfloat16 on compute capability 9.x. Theirs are the bits of torch's products there, up to
            the order of sums.

    Raises:
        ValueError: as `ShardedAdamW`; a chosen parameter has not two or three dimensions;
            `momentum`, `num_iterations`, `scale` or `product_dtype` is none of those above.
        RuntimeError: "triton" without triton.

    Note:
        The reducer must use `collective="all_reduce"`: an owner needs the whole sum. In one process
        and float32 it gives what `torch.optim.Muon` gives, up to the rounding of the products.
        A step reads nothing from the device. It holds, in `product_dtype`, two copies of all
        matrices owned here and four of those of one shape.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        replica_groups: ReplicaGroups,
        *,
        lr: float,
        matrices: Callable[[str, nn.Parameter], bool] | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        num_iterations: int = 5,
        scale: Scale = "adamw_rms",
        product_dtype: torch.dtype = torch.bfloat16,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        decay: Callable[[str, nn.Parameter], float] | None = None,
        lr_scale: Callable[[str, nn.Parameter], float] | None = None,
        moment_dtype: torch.dtype = torch.float32,
        min_shard_numel: int = MIN_SHARD_NUMEL,
        bucket_bytes: int = BUCKET_BYTES,
        locations: Mapping[str, Location] | None = None,
        after_rebuild: Rebuilt | None = None,
        impl: Impl = "auto",
    ) -> None:
        rule = AdamWRule(betas=betas, eps=eps, moment_dtype=moment_dtype, impl=impl)
        self._adamw = AdamWUpdate(rule)
        self._momentum, self._nesterov, self._scale = momentum, nesterov, scale
        self._num_iterations, self._product_dtype = num_iterations, product_dtype
        self._impl: Impl = impl

        def make_plans(members: list[Member]) -> list[Plan]:
            require_range("momentum", momentum, 0.0, 1.0)
            require_count("num_iterations", num_iterations, 1)
            require_count("min_shard_numel", min_shard_numel, 0)
            require_rule("matrices", matrices)
            if scale not in get_args(Scale):
                raise ValueError(f"`scale` must be one of {get_args(Scale)}, got {scale!r}.")
            if product_dtype not in (torch.bfloat16, torch.float32):
                raise ValueError(
                    f"`product_dtype` must be bfloat16 or float32, got {product_dtype}."
                )
            require_moment_dtype(moment_dtype, "momentum", momentum)
            rule.check({parameter.device for _, parameter, _ in members})
            chosen = matrices or is_hidden_matrix
            ranges = share_out([each for each in members if chosen(each[0], each[1])])
            return [
                Plan(ranges[name], {MOMENTUM: moment_dtype})
                if name in ranges
                else rule.plan(parameter, group, min_shard_numel)
                for name, parameter, group in members
            ]

        super().__init__(
            named_parameters,
            replica_groups,
            make_plans,
            {
                **{"momentum": momentum, "nesterov": nesterov, "num_iterations": num_iterations},
                **{"scale": scale, "product_dtype": product_dtype},
                **{**rule.options(), "min_shard_numel": min_shard_numel},
            },
            lr=lr,
            weight_decay=weight_decay,
            decay=decay,
            lr_scale=lr_scale,
            locations=locations,
            bucket_bytes=bucket_bytes,
            after_rebuild=after_rebuild,
        )

    def _update(
        self, lr: float, grad_scale: torch.Tensor | None, skip: torch.Tensor | None
    ) -> None:
        self._adamw.update(
            *([state for state in self._states if MOMENTUM not in state.moments], self._num_steps),
            lr=lr,
            weight_decay=self._weight_decay,
            grad_scale=grad_scale,
            skip=skip,
        )
        owned = [each for each in self._states if MOMENTUM in each.moments and each.main.numel()]
        updates = [self._averaged(state, grad_scale, skip) for state in owned]
        directions = orthogonalize(updates, num_iterations=self._num_iterations, impl=self._impl)
        for state, direction in zip(owned, directions, strict=True):
            self._apply(state, direction, lr * state.lr_scale, skip)

    def _forget_places(self) -> None:
        self._adamw.forget_places()

    def _averaged(
        self, state: TensorState, grad_scale: torch.Tensor | None, skip: torch.Tensor | None
    ) -> torch.Tensor:
        """Update the momentum; return (n, rows, columns) to orthogonalise, in `product_dtype`."""
        grad = state.grad().float()
        if grad_scale is not None:
            grad = grad * grad_scale.to(grad.device, torch.float32)
        buffer = state.moments[MOMENTUM]
        skip = None if skip is None else skip.to(buffer.device)
        new = buffer.to(torch.float32, copy=skip is not None)
        new.lerp_(grad, 1 - self._momentum)
        update = grad.lerp(new, self._momentum) if self._nesterov else new
        write((buffer,), (new,), skip)
        matrices = update.view(-1, *state.parameter.shape[-2:])
        return scale_to_unit(matrices, self._product_dtype)

    def _apply(
        self, state: TensorState, direction: torch.Tensor, lr: float, skip: torch.Tensor | None
    ) -> None:
        rows, columns = state.parameter.shape[-2:]
        factor = (
            math.sqrt(max(1.0, rows / columns))
            if self._scale == "shape"
            else 0.2 * math.sqrt(max(rows, columns))
        )
        skip = None if skip is None else skip.to(state.main.device)
        new = state.main.clone() if skip is not None else state.main
        new.mul_(1 - lr * self._weight_decay * state.decay)
        new.view_as(direction).add_(direction, alpha=-lr * factor)
        write((state.main,), (new,), skip)
        state.slice_of(state.parameter).copy_(state.main)
