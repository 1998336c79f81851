"""AdamW with FP32 main weights, each tensor sharded over its own replica group.

Per tensor: flatten it and cut it into `D` equal contiguous ranges, `D` the size of its replica
group; process `r` keeps the FP32 main weight and both moments of range `r` alone. A tensor that is
small or does not divide by `D` is updated by every replica, whole; for the usual group sizes these
are the norms and biases. No tensor is ever cut by another tensor's neighbour, so a checkpoint needs
no map of buckets: a range is a range of the flattened tensor and nothing else.

Bytes a parameter: weight 2 + main_grad 4 (BF16 weights), plus 12 / D here, or 8 / D with BF16
moments. An expert that is held by one of M ranks: 6 / M + 12 / D_all in total, D_all being all
data-parallel ranks.

A parameter without a gradient has a gradient of zeros: its moments fade, its weight decays, and it
does so alike in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from ._adamw_update import AdamWRule, AdamWUpdate
from ._arguments import require_count
from ._bucket_order import BUCKET_BYTES
from ._flat_shard import Location
from ._groups import ReplicaGroups
from ._impl import Impl
from ._partition import MIN_SHARD_NUMEL
from ._sharded_optimizer import Member, Rebuilt, ShardedOptimizer
from ._tensor_state import Plan


class ShardedAdamW(ShardedOptimizer):
    """AdamW over `main_grad`, with its state cut per tensor over the replica groups.

    Args:
        named_parameters: `(global name, parameter)`, in the same order on all replicas. Frozen
            parameters are left out.
        replica_groups: who holds replicas of which parameter.
        lr: learning rate, >= 0; the attribute `lr` may be set between steps. Not saved: the
            schedule owns it.
        betas: decay of the two moments, each in [0, 1); at most 1 - 2^-8 with BF16 moments.
        eps: added to the root of the second moment, > 0.
        weight_decay: decoupled decay, >= 0: a weight shrinks by `lr * weight_decay` of itself.
        decay: `(name, parameter) -> factor of weight_decay`, or a bool. None: `decays_matrices`;
            `DecayPolicy` makes other ones.
        lr_scale: `(name, parameter) -> factor of lr`, >= 0. None: 1. Both rules are asked once and
            belong to names, so that no checkpoint can bring back old ones.
        moment_dtype: float32, or bfloat16 for 4 / D bytes less.
        min_shard_numel: tensors with fewer elements are kept whole on every replica.
        bucket_bytes: most bytes gathered at a time when the parameters are rebuilt, > 0.
        locations: by name, where this process's tensor lies in the global one (expert stacks). A
            name that is absent: the tensor is the whole global tensor.
        after_rebuild: called with `(name, parameter)` pairs whenever those parameters have new
            values, to rebuild what is derived from them (quantised copies). Every parameter comes
            once a step, on every process alike.
        impl: how elements are updated. "reference" is plain torch, with the bits of
            `torch.optim.AdamW(foreach=False)`. "triton" needs CUDA and is not bitwise equal to it:
            it fuses products and sums, so that main weights and moments differ in their last bits
            and stay as near to exact arithmetic. "auto" is "triton" on CUDA of compute capability
            8.0 or newer, for parameters of 16 or 32 bits, else "reference".

    Raises:
        TypeError: an argument of another kind than those above.
        ValueError: a number out of range; a parameter listed twice, without memory of its own or of
            other than real floating numbers of up to 32 bits; a location of an unlisted name or
            outside its tensor; members of a replica group of which one was refused, or that list
            different parameters, have different arguments, or hold different values of a parameter
            (on every member, naming them).
        RuntimeError: "triton" without triton.

    Note:
        Main weights start from the parameters as they are now, which must be bitwise the same on
        all replicas. Construction is collective and compares them: a checksum of every parameter on
        its device, then one small all-reduce and one read from the device a replica group.
        A step reads nothing from the device. In one process a model on the meta device has an
        optimizer too, which takes no step: its `state_dict()` says what a checkpoint holds.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        replica_groups: ReplicaGroups,
        *,
        lr: float,
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

        def make_plans(members: list[Member]) -> list[Plan]:
            rule.check({parameter.device for _, parameter, _ in members})
            require_count("min_shard_numel", min_shard_numel, 0)
            return [rule.plan(parameter, group, min_shard_numel) for _, parameter, group in members]

        super().__init__(
            named_parameters,
            replica_groups,
            make_plans,
            {**rule.options(), "min_shard_numel": min_shard_numel},
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
            *(self._states, self._num_steps),
            lr=lr,
            weight_decay=self._weight_decay,
            grad_scale=grad_scale,
            skip=skip,
        )

    def _forget_places(self) -> None:
        self._adamw.forget_places()
