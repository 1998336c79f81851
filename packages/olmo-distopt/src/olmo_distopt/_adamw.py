"""AdamW with FP32 main weights and moments, each tensor sharded over its own replica group.

Per tensor: flatten it and cut it into `D` equal contiguous slices, `D` the size of its replica
group; process `r` keeps the FP32 main weight and both moments of slice `r` alone. A tensor that is
small or does not divide by `D` is updated by every replica, whole; for the usual group sizes these
are the norms and biases. No tensor is ever cut by another tensor's neighbour, so a checkpoint needs
no map of buckets: a slice is a range of the flattened tensor and nothing else.

    main, m, v  <-  AdamW(main, slice r of main_grad, m, v)        each replica its slice
    parameter   <-  cast(all-gather over the replica group of main)

Bytes a parameter: weight 2 + main_grad 4 (BF16 weights), plus 12 / D here. An expert that is held
by one of M ranks: 6 / M + 12 / D_all in total, D_all being all data-parallel ranks.

The elementwise rule is that of `reference.adamw`, in the order of operations of
`torch.optim.AdamW`. A parameter without a gradient has a gradient of zeros: its moments fade, its
weight decays, and it does so alike in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from ._decay import decays_matrices
from ._flat_shard import FlatShard, Location
from ._groups import ReplicaGroups
from ._parameters import BUCKET_BYTES, fill_buckets, main_grad, trainable
from ._tensor_state import TensorState, gather_parameters, new_state


class ShardedAdamW:
    """AdamW over `main_grad`, with FP32 state cut per tensor over the replica groups.

    Args:
        named_parameters: `(global name, parameter)`, in the same order on all replicas. Frozen
            parameters are left out. Several optimizers over different parameters give groups with
            learning rates of their own.
        replica_groups: who holds replicas of which parameter.
        lr: learning rate, >= 0; the attribute `lr` may be set between steps. Not saved: the
            schedule owns it.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment, > 0.
        weight_decay: decoupled decay of the parameters that `decay` names, >= 0.
        decay: `(name, parameter) -> bool`. None: `decays_matrices`.
        min_shard_numel: tensors with fewer elements are kept whole on every replica.
        bucket_bytes: most bytes gathered at a time when the parameters are rebuilt, > 0.
        locations: by name, where this process's tensor lies in the global one (expert stacks). A
            name that is absent: the tensor is the whole global tensor.

    Raises:
        ValueError: a number out of range, a parameter listed twice, a location of an unlisted name
            or outside its tensor, or members of a replica group that list different parameters or
            hold different values of one (on every member, naming the parameters).

    Note:
        Main weights start from the parameters as they are now, which must be bitwise the same on
        all replicas. Construction is collective and compares them: a checksum of every parameter on
        its device, then one small all-reduce and one read from the device a replica group. After a
        step every replica holds the same bits again: a slice is computed once and gathered, a whole
        tensor is computed from the same inputs by the same operations.
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
        decay: Callable[[str, nn.Parameter], bool] | None = None,
        min_shard_numel: int = 4096,
        bucket_bytes: int = BUCKET_BYTES,
        locations: Mapping[str, Location] | None = None,
    ) -> None:
        _require_range("lr", lr, 0.0, math.inf)
        _require_range("betas[0]", betas[0], 0.0, 1.0)
        _require_range("betas[1]", betas[1], 0.0, 1.0)
        _require_range("weight_decay", weight_decay, 0.0, math.inf)
        if not 0 < eps < math.inf:
            raise ValueError(f"`eps` must be > 0 and finite, got {eps}.")
        listed = list(named_parameters)
        parameters = trainable(listed)
        locations = locations or {}
        unlisted = sorted(set(locations) - {name for name, _ in listed})
        if unlisted:
            raise ValueError(f"`locations` must name listed parameters, got {unlisted}.")
        replica_groups.require_agreement(parameters)
        replica_groups.require_equal_values(parameters)
        self.lr = lr
        self._replica_groups = replica_groups
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._states = [
            new_state(
                name,
                parameter,
                replica_groups.of(name, parameter),
                decays=(decay or decays_matrices)(name, parameter),
                min_shard_numel=min_shard_numel,
                location=locations.get(name),
            )
            for name, parameter in parameters
        ]
        self._gathers = fill_buckets(
            (state for state in self._states if state.sharded),
            key=lambda state: (
                state.group.name,
                str(state.parameter.device),
                str(state.parameter.dtype),
            ),
            num_bytes=lambda state: state.parameter.numel() * state.parameter.element_size(),
            limit=bucket_bytes,
        )
        self._groups = sorted({state.group for state in self._states}, key=lambda group: group.name)
        self._num_steps = torch.zeros((), dtype=torch.int64)
        self._loading = False

    @property
    def num_steps(self) -> int:
        """Steps taken, those before a checkpoint included."""
        return int(self._num_steps)

    @torch.no_grad()
    def step(self, *, lr: float | None = None) -> None:
        """Take one step from every parameter's `main_grad` and rebuild the parameters.

        Args:
            lr: learning rate of this step alone, >= 0. None: the attribute `lr`.

        Raises:
            ValueError: `lr` is out of range, or a parameter has no `main_grad`.
            RuntimeError: loading has begun and not finished.
        """
        self._require_loaded("step")
        lr = self.lr if lr is None else lr
        _require_range("lr", lr, 0.0, math.inf)
        grads = [state.slice_of(main_grad(state.name, state.parameter)) for state in self._states]
        self._num_steps += 1
        for state, grad in zip(self._states, grads, strict=True):
            self._update(state, grad.float(), lr)
        self._rebuild()

    def state_dict(self) -> dict[str, FlatShard | torch.Tensor]:
        """Return the state for torch.distributed.checkpoint: labels on live storage, no copies.

        Keys: `main.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME` of every parameter held, and `step`
        (0-d int64). Save it as it is. To load, use `start_loading`.

        Raises:
            RuntimeError: loading has begun and not finished.
        """
        self._require_loaded("state_dict")
        return self._labelled()

    def start_loading(self) -> dict[str, FlatShard | torch.Tensor]:
        """Erase the state and return it, in the form of `state_dict()`, to be loaded into.

        Everything is overwritten with NaN, so that `finish_loading` can tell what no checkpoint
        filled; until then the optimizer neither steps nor gives out its state.

        Note:
            torch.distributed.checkpoint compares names and numbers of elements, `finish_loading`
            that every element was filled. Shapes are not compared: a checkpoint holds lines of
            elements, and a weight of shape (4, 2) loads into one of shape (2, 4) without complaint.
            Where a model may have changed, keep its configuration beside the checkpoint.
        """
        self._loading = True
        self._num_steps.fill_(-1)
        for state in self._states:
            for shard in state.labelled().values():
                shard.local.fill_(math.nan)
        return self._labelled()

    @torch.no_grad()
    def finish_loading(self) -> None:
        """Check that every element was loaded and rebuild the parameters from the main weights.

        Collective over the replica groups, as a step is. What else a load compares, and that it
        does not compare shapes: see `start_loading`.

        Raises:
            RuntimeError: on every replica, naming the tensors: an element of the state was not
                loaded (or was saved as NaN). Or `start_loading` was not called.
        """
        if not self._loading:
            raise RuntimeError("`finish_loading()` must follow `start_loading()` and a load.")
        missing = {
            key
            for state in self._states
            for key, shard in state.labelled().items()
            if bool(shard.local.isnan().any())
        }
        if self.num_steps < 0:
            missing.add("step")
        for group in self._groups:
            missing = missing.union(*group.gather_objects(missing))
        if missing:
            raise RuntimeError(
                "Every element of the state must come from the checkpoint, but nothing (or "
                f"NaN) was loaded into part of: {', '.join(sorted(missing))}. Load into the "
                "mapping that `start_loading()` returned, from a checkpoint of the same model."
            )
        self._loading = False
        self._rebuild()

    @torch.no_grad()
    def adopt_parameters(self) -> None:
        """Start afresh from the parameters as they are now: main weights from them, moments zero.

        For weights that came without optimizer state; else the next step would write the old main
        weights over them. Collective, and compares the replicas as construction does.

        Raises:
            ValueError: replicas hold different values of a parameter; nothing is changed.
        """
        self._replica_groups.require_equal_values(
            [(state.name, state.parameter) for state in self._states]
        )
        self._loading = False
        self._num_steps.zero_()
        for state in self._states:
            state.main.copy_(state.slice_of(state.parameter))
            state.exp_avg.zero_()
            state.exp_avg_sq.zero_()

    def _labelled(self) -> dict[str, FlatShard | torch.Tensor]:
        state_dict: dict[str, FlatShard | torch.Tensor] = {"step": self._num_steps}
        for state in self._states:
            state_dict.update(state.labelled())
        return state_dict

    def _require_loaded(self, method: str) -> None:
        if self._loading:
            raise RuntimeError(
                f"`{method}()` must wait for `finish_loading()`: the state is not loaded."
            )

    def _update(self, state: TensorState, grad: torch.Tensor, lr: float) -> None:
        """Apply `reference.adamw` to one slice, in place."""
        (beta1, beta2), steps = self._betas, self.num_steps
        if state.decays:
            state.main.mul_(1 - lr * self._weight_decay)
        state.exp_avg.lerp_(grad, 1 - beta1)
        state.exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = state.exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(self._eps)
        state.main.addcdiv_(state.exp_avg, root, value=-lr / (1 - beta1**steps))

    def _rebuild(self) -> None:
        """Write the main weights into the parameters, gathering the slices."""
        for state in self._states:
            if not state.sharded:
                state.parameter.copy_(state.main.view_as(state.parameter))
        for states in self._gathers:
            gather_parameters(states)


def _require_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value < high:
        raise ValueError(f"`{name}` must be in [{low:g}, {high:g}), got {value}.")
