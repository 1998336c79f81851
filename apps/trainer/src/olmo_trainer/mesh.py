"""World to groups: the only place that knows ranks.

The world is `pipeline x stage`, pipeline outermost, so that the ranks of a stage are neighbours.
The ranks of a stage are folded in two ways (report, section 7): `data x context` for all but the
experts, `expert replicas x expert shards` for these; the second is innermost in each:

    rank = pipeline * D C + s,   s = data * C + context = replica * M_E + expert,   D C = D_E M_E

So expert shards may lie within a context group, be one, or span several. Five groups follow:

* `dense_replicas` (D C): the same layers; they hold replicas of dense parameters.
* `context` (C): parts of the same sequences; attention exchanges heads.
* `expert` (M_E): different experts of the same layers; they exchange rows.
* `expert_replicas` (D_E): the same experts; they hold replicas of expert parameters.
* `pipeline` (P): the same tokens, different layers.

And one over the world for whoever talks beside training, from a thread: `checkpoint`, on gloo
always, since two threads must not share a group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from olmo_trainer.config import LayoutConfig


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This process's coordinates and groups; every group is `None` in a run of one process."""

    rank: int
    world: int
    data: int
    num_data: int
    context: int
    num_context: int
    expert: int
    num_expert: int
    pipeline: int
    device: torch.device
    world_group: dist.ProcessGroup | None = None
    dense_replica_group: dist.ProcessGroup | None = None
    context_group: dist.ProcessGroup | None = None
    expert_group: dist.ProcessGroup | None = None
    expert_replica_group: dist.ProcessGroup | None = None
    pipeline_group: dist.ProcessGroup | None = None
    checkpoint_group: dist.ProcessGroup | None = None
    store: dist.Store | None = None  # where the ranks met

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for the run."""
        return self.rank == 0

    @property
    def host_waits(self) -> bool:
        """Whether the host waits for the device when it reads it, as for any but a CPU."""
        return self.device.type != "cpu"

    def sum_over_world(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` over every rank, in place."""
        if self.world_group is not None:
            dist.all_reduce(tensor, group=self.world_group)
        return tensor

    def sum_over_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` over the ranks of this stage, which hold all tokens once, in place."""
        if self.dense_replica_group is not None:
            dist.all_reduce(tensor, group=self.dense_replica_group)
        return tensor

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_group is not None:
            self.sum_over_world(torch.zeros(1, device=self.device)).cpu()

    def broadcast_text(self, text: str) -> str:
        """Return the main rank's `text` on every rank."""
        if self.world_group is None:
            return text
        box = [text]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return, for each of `numbers`, what each rank has, on every rank."""
        table = torch.zeros(len(numbers), self.world, dtype=torch.float64, device=self.device)
        table[:, self.rank] = torch.tensor(numbers, dtype=torch.float64)
        return self.sum_over_world(table).tolist()

    def together(self, action: Callable[[], None]) -> None:
        """Do `action` on every rank, over the checkpoint group; fail on all when it fails on one.

        Raises:
            RuntimeError: On every rank alike, with what each rank that failed has to say.
        """
        failure = None
        try:
            action()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures = [failure]
        if self.checkpoint_group is not None:
            failures = [None] * self.world
            dist.all_gather_object(failures, failure, group=self.checkpoint_group)
        reasons = [f"rank {rank}: {each}" for rank, each in enumerate(failures) if each is not None]
        if reasons:
            raise RuntimeError("; ".join(reasons))


def create_mesh(
    layout: LayoutConfig, device: torch.device, *, store: dist.Store | None = None
) -> Mesh:
    """Make the groups of `layout` over the default process group, or of one process without one.

    Collective over the default group. `layout.data` must be set (`TrainerConfig.for_world`).
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    num_context, num_expert = layout.context, layout.expert
    num_data = layout.data or world // (layout.pipeline * num_context)
    num_stage = num_data * num_context
    pipeline, place = divmod(rank, num_stage)
    data, context = divmod(place, num_context)
    expert = place % num_expert

    def group(key: Callable[[int], tuple[int, ...]]) -> dist.ProcessGroup | None:
        # Every rank creates every group, in the same order, and keeps the one it is a member of.
        if not dist.is_initialized():
            return None
        members: dict[tuple[int, ...], list[int]] = {}
        for other in range(world):
            members.setdefault(key(other), []).append(other)
        made = {name: dist.new_group(ranks) for name, ranks in members.items()}
        own = made[key(rank)]
        assert isinstance(own, dist.ProcessGroup), "a rank is a member of each group it keeps"
        return own

    return Mesh(
        rank=rank,
        world=world,
        data=data,
        num_data=num_data,
        context=context,
        num_context=num_context,
        expert=expert,
        num_expert=num_expert,
        pipeline=pipeline,
        device=device,
        world_group=dist.group.WORLD if dist.is_initialized() else None,
        dense_replica_group=group(lambda r: (r // num_stage,)),
        context_group=group(lambda r: (r // num_context,)),
        expert_group=group(lambda r: (r // num_expert,)),
        expert_replica_group=group(lambda r: (r // num_stage, r % num_expert)),
        pipeline_group=group(lambda r: (r % num_stage,)),
        checkpoint_group=_gloo_group() if dist.is_initialized() else None,
        store=store,
    )


def _gloo_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group
