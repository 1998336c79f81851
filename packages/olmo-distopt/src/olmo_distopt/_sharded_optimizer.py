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
from typing import NoReturn

import torch
from torch import nn

from ._agreement import agree, require_equal_values
from ._arguments import require_positive, require_range, require_rule, require_zero_d
from ._decay import decays_matrices
from ._flat_shard import FlatShard, Location
from ._gather import Gather, plan_gathers
from ._groups import ReplicaGroup, ReplicaGroups
from ._parameters import (
    GradientWindow,
    gradient_window,
    listed_pairs,
    require_own_memory,
    trainable,
)
from ._tensor_state import Plan, StatePlan, TensorState

Member = tuple[str, nn.Parameter, ReplicaGroup]
Rebuilt = Callable[[Sequence[tuple[str, nn.Parameter]]], None]


class ShardedOptimizer(ABC):
    """State cut over replica groups; a subclass says how and gives the update.

    A subclass passes on `make_plans`, which checks its own arguments and says what is kept of each
    parameter, and `options`: its arguments that must be the same on all replicas, by name.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        replica_groups: ReplicaGroups,
        make_plans: Callable[[list[Member]], list[Plan]],
        options: Mapping[str, object],
        *,
        lr: float,
        weight_decay: float,
        decay: Callable[[str, nn.Parameter], float] | None,
        lr_scale: Callable[[str, nn.Parameter], float] | None,
        locations: Mapping[str, Location] | None,
        bucket_bytes: int,
        after_rebuild: Rebuilt | None,
    ) -> None:
        # Everything is checked on every process, then agreed, and only then is anything kept.
        def check() -> list[StatePlan]:
            require_range("lr", lr, 0.0, math.inf)
            require_range("weight_decay", weight_decay, 0.0, math.inf)
            require_positive("bucket_bytes", bucket_bytes)
            if after_rebuild is not None and not callable(after_rebuild):
                raise TypeError(f"`after_rebuild` must be a function, got {after_rebuild!r}.")
            require_rule("decay", decay)
            require_rule("lr_scale", lr_scale)
            listed = list(listed_pairs(named_parameters))
            parameters = trainable(listed)
            require_own_memory(parameters)
            names = {name for name, _ in listed}
            unlisted = sorted(set(locations or {}) - names)
            if unlisted:
                raise ValueError(f"`locations` must name listed parameters, got {unlisted}.")
            members = [(name, p, replica_groups.of(name, p)) for name, p in parameters]
            return [
                StatePlan(
                    name=name,
                    parameter=parameter,
                    group=group,
                    plan=plan,
                    decay=_factor("decay", decay or decays_matrices, name, parameter),
                    lr_scale=_factor("lr_scale", lr_scale or _same_for_all, name, parameter),
                    location=(locations or {}).get(name),
                )
                for (name, parameter, group), plan in zip(members, make_plans(members), strict=True)
            ]

        common = {"lr": lr, "weight_decay": weight_decay, "bucket_bytes": bucket_bytes}
        plans = agree(
            replica_groups,
            check,
            lambda plan: (plan.group, plan.described()),
            {"optimizer": type(self).__name__, **common, **options},
        )
        require_equal_values(replica_groups, [(plan.name, plan.parameter) for plan in plans])
        self.lr = lr
        self._weight_decay = float(weight_decay)
        self._replica_groups, self._bucket_bytes = replica_groups, bucket_bytes
        self._states = [plan.make_state() for plan in plans]
        self._groups = sorted({state.group for state in self._states}, key=lambda group: group.name)
        device = self._states[0].main.device if self._states else None
        self._num_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._after_rebuild = after_rebuild
        self._places: list[tuple[object, ...]] = []
        self._windows: set[GradientWindow] = set()
        self._gathers: list[Gather] = []
        self._gather_dtypes: list[torch.dtype] = []
        self._pending: list[Gather] = []
        self._awaited_later: set[nn.Parameter] = set()
        self._loading = False

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: a copy would update parameters that no model reads."""
        raise TypeError(
            f"A `{type(self).__name__}` belongs to the parameters of one model and cannot be "
            "copied or pickled; save `state_dict()` with torch.distributed.checkpoint, and make "
            "an optimizer over the copy of a model."
        )

    @property
    def num_steps(self) -> int:
        """Steps taken, those before a checkpoint included. Reads the device."""
        return int(self._num_steps)

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Those that the optimizer updates."""
        return {state.parameter for state in self._states}

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
            TypeError: `lr` is no number, `grad_scale` or `skip` no tensor.
            ValueError: `lr` is out of range, `grad_scale` or `skip` is not 0-d (or `skip` not
                bool), a parameter has no `main_grad`, or holds its sum elsewhere, or has moved.
            RuntimeError: gradients are not reduced; loading has begun and not finished.
        """
        self._require_loaded("step")
        lr = require_range("lr", self.lr if lr is None else lr, 0.0, math.inf)
        if grad_scale is not None:
            require_zero_d("grad_scale", grad_scale)
        if skip is not None:
            require_zero_d("skip", skip)
            if skip.dtype != torch.bool:
                raise ValueError(f"`skip` must be bool, got {skip.dtype}.")
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

        Raises:
            TypeError: `units` does not list modules.
            ValueError: a unit has no forward of its own, as a `ModuleList` has none, so that its
                parameters would never be waited for.

        Note:
            Up to the parameters of all units are in flight at a time: bytes of the parameters that
            share a gather, on top of the model.
        """
        if not isinstance(units, Iterable):
            raise TypeError(f"`units` must list modules, got a {type(units).__name__} by itself.")
        units = list(units)
        for unit in units:
            if not isinstance(unit, nn.Module):
                raise TypeError(f"`units` must list modules, got a {type(unit).__name__}.")
            if type(unit).forward is nn.Module.forward and "forward" not in vars(unit):
                raise ValueError(
                    "Each of `units` must be called in the forward pass, or its parameters are "
                    f"never waited for, but a {type(unit).__name__} has no forward; list what it "
                    "holds."
                )
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
        require_equal_values(
            self._replica_groups, [(state.name, state.parameter) for state in self._states]
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
            windows = (gradient_window(state.parameter) for state in self._states)
            self._windows = {window for window in windows if window is not None}
            self._forget_places()
            self._places = places
        for window in self._windows:
            window.require_reduced()

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


def _same_for_all(name: str, parameter: nn.Parameter) -> float:
    return 1.0


def _factor(
    rule: str, ask: Callable[[str, nn.Parameter], object], name: str, parameter: nn.Parameter
) -> float:
    return require_range(f"{rule}({name!r})", ask(name, parameter), 0.0, math.inf)
