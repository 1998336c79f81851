"""What every sharded optimizer does around its update: state, step, rebuild, checkpoint.

    own range of main, moments  <-  update(own range of main_grad)      each replica its own
    own range of parameter      <-  cast(main)
    parameter                   <-  all-gather over the replica group

The main weights stay FP32 between steps and are what a checkpoint holds, beside the moments. After
a step every replica holds the same bits: a range is computed once and gathered, a tensor that is
not cut is computed from the same inputs by the same operations.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from ._decay import decays_matrices
from ._flat_shard import FlatShard, Location
from ._gather import Gather, plan_gathers
from ._groups import ReplicaGroup, ReplicaGroups
from ._parameters import trainable
from ._tensor_state import Plan, TensorState, new_state

Member = tuple[str, nn.Parameter, ReplicaGroup]
Rebuilt = Callable[[Sequence[tuple[str, nn.Parameter]]], None]


class ShardedOptimizer(ABC):
    """State cut over replica groups; a subclass says how and gives the update."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        replica_groups: ReplicaGroups,
        plan: Callable[[list[Member]], list[Plan]],
        *,
        lr: float,
        weight_decay: float,
        decay: Callable[[str, nn.Parameter], float] | None,
        lr_scale: Callable[[str, nn.Parameter], float] | None,
        locations: Mapping[str, Location] | None,
        bucket_bytes: int,
        after_rebuild: Rebuilt | None,
    ) -> None:
        require_range("lr", lr, 0.0, math.inf)
        require_range("weight_decay", weight_decay, 0.0, math.inf)
        if bucket_bytes <= 0:
            raise ValueError(f"`bucket_bytes` must be > 0, got {bucket_bytes}.")
        listed = list(named_parameters)
        parameters = trainable(listed)
        locations = locations or {}
        unlisted = sorted(set(locations) - {name for name, _ in listed})
        if unlisted:
            raise ValueError(f"`locations` must name listed parameters, got {unlisted}.")
        factors = {
            name: (
                float((decay or decays_matrices)(name, parameter)),
                1.0 if lr_scale is None else float(lr_scale(name, parameter)),
            )
            for name, parameter in parameters
        }
        for name, (decay_factor, lr_factor) in factors.items():
            require_range(f"decay({name!r})", decay_factor, 0.0, math.inf)
            require_range(f"lr_scale({name!r})", lr_factor, 0.0, math.inf)
        replica_groups.require_agreement(parameters)
        replica_groups.require_equal_values(parameters)
        self.lr = lr
        self._weight_decay = weight_decay
        self._replica_groups, self._bucket_bytes = replica_groups, bucket_bytes
        members = [(name, p, replica_groups.of(name, p)) for name, p in parameters]
        self._states = [
            new_state(
                *(name, parameter, group, each),
                decay=factors[name][0],
                lr_scale=factors[name][1],
                location=locations.get(name),
            )
            for (name, parameter, group), each in zip(members, plan(members), strict=True)
        ]
        self._groups = sorted({state.group for state in self._states}, key=lambda group: group.name)
        device = self._states[0].main.device if self._states else None
        self._num_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._after_rebuild = after_rebuild
        self._places: list[tuple[object, ...]] = []
        self._gathers: list[Gather] = []
        self._gather_dtypes: list[torch.dtype] = []
        self._pending: list[Gather] = []
        self._awaited_later: set[nn.Parameter] = set()
        self._loading = False

    @property
    def num_steps(self) -> int:
        """Steps taken, those before a checkpoint included. Reads the device."""
        return int(self._num_steps)

    @torch.no_grad()
    def step(
        self,
        *,
        lr: float | None = None,
        grad_scale: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Take one step from every parameter's `main_grad` and rebuild the parameters.

        Args:
            lr: learning rate of this step alone, >= 0. None: the attribute `lr`.
            grad_scale: 0-d factor of every gradient, as `clip_factor` gives; the gradients stay as
                they are. None: 1.
            skip: 0-d bool, the same on every process, as `StepGuard` gives. Where it is True, main
                weights, moments, parameters and the number of steps keep their bits. It stays on
                its device.

        Raises:
            ValueError: `lr` is out of range, `grad_scale` or `skip` is not 0-d (or `skip` not
                bool), or a parameter has no `main_grad`, or holds its sum elsewhere.
            RuntimeError: loading has begun and not finished.
        """
        self._require_loaded("step")
        lr = self.lr if lr is None else lr
        require_range("lr", lr, 0.0, math.inf)
        if grad_scale is not None and grad_scale.ndim != 0:
            raise ValueError(f"`grad_scale` must be 0-d, got shape {tuple(grad_scale.shape)}.")
        if skip is not None and (skip.ndim != 0 or skip.dtype != torch.bool):
            raise ValueError(
                f"`skip` must be 0-d and bool, got {tuple(skip.shape)} and {skip.dtype}."
            )
        self._require_gradients()
        self.wait()
        if skip is None:
            self._num_steps += 1
        else:
            self._num_steps += (~skip).to(self._num_steps.device, torch.int64)
        self._update(lr, grad_scale, skip)
        self._rebuild()

    def wait(self) -> None:
        """Make every parameter whole; needed only after `overlap_gather`, before a direct read."""
        for gather in self._pending:
            self._finish(gather)
        self._pending = []

    def overlap_gather(self, units: Iterable[nn.Module]) -> None:
        """Let the gathers after a step run on into the next forward.

        Before a unit's forward its parameters are waited for, those of its submodules included;
        parameters under no unit are waited for within `step()`. Whoever reads a parameter of a unit
        in another way (a checkpoint of the model, a forward that takes a submodule's weight) calls
        `wait()` first. The optimizer's own methods do.

        Args:
            units: modules that read no parameters of each other, in order of their use: the blocks
                of a transformer.

        Note:
            Up to the parameters of all units are in flight at a time: bytes of the parameters that
            share a gather, on top of the model.
        """
        for unit in units:
            parameters = set(unit.parameters())
            self._awaited_later |= parameters
            unit.register_forward_pre_hook(
                lambda *_, parameters=parameters: self._wait_for(parameters)
            )

    def state_dict(self) -> dict[str, FlatShard | torch.Tensor]:
        """Return the state for torch.distributed.checkpoint: labels on live storage, no copies.

        Keys: `main.NAME` and one `MOMENT.NAME` a moment of every parameter held, and `step` (0-d
        int64). Save it as it is. To load, use `start_loading`. No key, shape or offset depends on
        buckets, groups or the number of processes.

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
        self.wait()
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
        for state in self._states:
            state.slice_of(state.parameter).copy_(state.main)
        self._rebuild()
        self.wait()

    @torch.no_grad()
    def adopt_parameters(self) -> None:
        """Start afresh from the parameters as they are now: main weights from them, moments zero.

        For weights that came without optimizer state; else the next step would write the old main
        weights over them. Collective, and compares the replicas as construction does.

        Raises:
            ValueError: replicas hold different values of a parameter; nothing is changed.
        """
        self.wait()
        self._replica_groups.require_equal_values(
            [(state.name, state.parameter) for state in self._states]
        )
        self._loading = False
        self._num_steps.zero_()
        for state in self._states:
            state.main.copy_(state.slice_of(state.parameter))
            for moment in state.moments.values():
                moment.zero_()

    @abstractmethod
    def _update(
        self, lr: float, grad_scale: torch.Tensor | None, skip: torch.Tensor | None
    ) -> None:
        """Update every state from its gradient, and write main into its range of the parameter."""

    @abstractmethod
    def _forget_places(self) -> None:
        """Hear that a gradient or a parameter is no longer where the last step found it."""

    def _require_gradients(self) -> None:
        """Check every gradient; only what has moved since the last step is looked at twice."""
        places = [state.whereabouts() for state in self._states]
        if places != self._places:
            self._places = []
            for state in self._states:
                state.require_gradient()
            self._forget_places()
            self._places = places

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

    def _rebuild(self) -> None:
        """Gather the parameters from the ranges; wait for those that no unit waits for."""
        dtypes = [state.parameter.dtype for state in self._states]
        if dtypes != self._gather_dtypes:  # a model may be cast after its optimizer is made
            self._gathers = plan_gathers(self._states, self._bucket_bytes)
            self._gather_dtypes = dtypes
        self._report([state for state in self._states if state.ranges is None])
        running: Gather | None = None
        for gather in self._gathers:
            gather.launch()
            if gather.parameters <= self._awaited_later:
                self._pending.append(gather)
                continue
            if running is not None:  # one gather runs while the one before it is copied out
                self._finish(running)
            running = gather
        if running is not None:
            self._finish(running)

    @torch.no_grad()
    def _wait_for(self, parameters: set[nn.Parameter]) -> None:
        for gather in [each for each in self._pending if each.parameters & parameters]:
            self._pending.remove(gather)
            self._finish(gather)

    @torch.no_grad()
    def _finish(self, gather: Gather) -> None:
        gather.finish()
        self._report(gather.states)

    def _report(self, states: Sequence[TensorState]) -> None:
        if self._after_rebuild is not None and states:
            self._after_rebuild([(state.name, state.parameter) for state in states])


def require_range(name: str, value: float, low: float, high: float) -> None:
    """Raise unless `low <= value < high`."""
    if not low <= value < high:
        raise ValueError(f"`{name}` must be in [{low:g}, {high:g}), got {value}.")
