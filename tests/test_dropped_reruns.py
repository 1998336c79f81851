"""Steps that are run again with more room are bitwise those that had the room from the start."""

import io
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from olmo_trainer import loop
from olmo_trainer.build import Assembly, assemble
from olmo_trainer.checkpoint_manifest import find_checkpoint, read_manifest
from olmo_trainer.config import TrainerConfig
from olmo_trainer.data import Batch
from olmo_trainer.growing_dispatcher import GrowingDispatcher
from olmo_trainer.mesh import Mesh, create_mesh
from olmo_trainer.metrics import StepRecord, read_metrics
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import nano
from olmo_trainer.rerun import DroppedError, StepRerun
from olmo_trainer.statistics import LayerBalance, StepTotals
from olmo_trainer.step import Update, accumulate_gradients, update
from rich.console import Console

LENGTH, STEPS = 32, 3
SHARED = (
    *("layout.expert=2", "layout.dispatcher.kind=rowwise", f"data.sequence_length={LENGTH}"),
    *("batch.sequences=8", "batch.accumulation=2"),
)
DROPS = ("rerun.kind=drops", "rerun.growth=1.25")
TO_THE_FIRST_RANK = torch.tensor([9.0, 9.0, -9.0, -9.0])

pytestmark = pytest.mark.dist


@dataclass
class Taken:
    """A step, and what it left behind on this rank."""

    update: Update
    totals: StepTotals
    layers: list[LayerBalance]
    parameters: dict[str, torch.Tensor]
    biases: dict[int, torch.Tensor]
    random: torch.Tensor


def _assemble(world: int, *settings: str) -> Assembly:
    config = apply_overrides(nano(), [*SHARED, *settings]).for_world(world)
    return assemble(config, create_mesh(config.layout, torch.device("cpu")))


def _batches(data_rank: int, step: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(100 * data_rank + step)
    tokens = torch.randint(0, 257, (4, LENGTH + 1), generator=draw)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    return [
        Batch(half[:, :-1].contiguous(), half[:, 1:].contiguous(), mask)
        for half in tokens.chunk(2)  # two microbatches
    ]


def _steps(
    rank: int, assembly: Assembly, *, factors: list[float] | None = None, crowd_at: int = 2
) -> list[Taken]:
    """Take the steps; from `crowd_at` all routes go to one rank.

    `factors` gives the dispatcher its capacity before each.
    """
    torch.manual_seed(0)  # which nothing of a step may move
    taken = []
    for step in range(1, STEPS + 1):
        if factors is not None:
            assert isinstance(assembly.dispatcher, GrowingDispatcher)
            dist.barrier()
            assembly.dispatcher.resize(factors[step - 1])
        if step == crowd_at:
            for bias in assembly.selection_biases.values():
                bias.bias_E.copy_(TO_THE_FIRST_RANK)
        accumulate_gradients(assembly, _batches(assembly.mesh.data, step))
        done = update(assembly, step, 1e-2)
        taken.append(
            Taken(
                done,
                assembly.statistics.totals(),
                assembly.statistics.layers(),
                {name: each.detach().clone() for name, each in assembly.parameters},
                {layer: each.bias_E.clone() for layer, each in assembly.selection_biases.items()},
                torch.get_rng_state(),
            )
        )
    return taken


def _require_same(ours: list[Taken], theirs: list[Taken]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.totals == other.totals
        assert one.layers == other.layers
        assert one.update.norm == other.update.norm
        assert torch.equal(one.random, other.random)
        for mine, yours in ((one.parameters, other.parameters), (one.biases, other.biases)):
            assert mine.keys() == yours.keys()
            for name, tensor in mine.items():
                assert torch.equal(tensor, yours[name]), name


def _without_drops(rank: int, world: int, *settings: str) -> list[tuple[int, float | None]]:
    room = "layout.dispatcher.capacity_factor"
    grown = _steps(rank, _assemble(world, *settings, *DROPS, f"{room}=1.1"))
    last = grown[-1].update.reruns.capacity_factor
    with_room = _steps(rank, _assemble(world, *settings, f"{room}={last}"))
    _require_same(grown, with_room)
    assert with_room[-1].update.reruns.capacity_factor is None
    assert all(each.totals.dropped == 0 for each in grown)
    assert all(not each.update.reruns.over_limit for each in grown)
    return [(each.update.reruns.times, each.update.reruns.capacity_factor) for each in grown]


@pytest.mark.parametrize("settings", [(), ("recompute.kind=blocks",)])
def test_a_run_with_reruns_is_bitwise_the_run_that_had_the_room(processes, settings):
    answers = processes.run(_without_drops, *settings, world=2)
    assert answers[0] == answers[1]  # every rank runs again, or none
    times, factors = zip(*answers[0], strict=True)
    assert times[1] >= 1
    assert times[2] == 0  # the larger buffers stay
    assert factors[-1] == 2.0  # the worst case, where growth ends


def _with_drops(rank: int, world: int) -> list[tuple[int, float]]:
    settings = ("layout.dispatcher.capacity_factor=0.7", *DROPS)
    grown = _steps(rank, _assemble(world, *settings, "rerun.most_dropped=0.3"))
    factors = [each.update.reruns.capacity_factor for each in grown]
    # One that takes every step as it comes, with the capacity of each given to it.
    given = _assemble(world, *settings, "rerun.most_dropped=0.99")
    theirs = _steps(rank, given, factors=factors)
    assert all(each.update.reruns.times == 0 for each in theirs)
    _require_same(grown, theirs)
    for each in grown:
        assert 0 < each.update.reruns.dropped_part <= 0.3
        requested = sum(sum(layer.counts) for layer in each.layers)
        assert each.update.reruns.dropped_part == each.totals.dropped / requested
    return [(each.update.reruns.times, each.update.reruns.capacity_factor) for each in grown]


def test_some_drops_may_stay_and_then_too_the_last_run_alone_counts(processes):
    answers = processes.run(_with_drops, world=2)
    assert answers[0] == answers[1]
    times, factors = zip(*answers[0], strict=True)
    assert times[1] >= 2
    assert factors[1] < 2.0


def _at_the_limit(rank: int, world: int, limits: tuple[str, ...]) -> list[tuple[int, float, float]]:
    settings = ("layout.dispatcher.capacity_factor=0.5", *DROPS, *limits)
    assembly = _assemble(world, *settings)
    before = {name: each.detach().clone() for name, each in assembly.parameters}
    taken = _steps(rank, assembly, crowd_at=1)
    assert any(not torch.equal(each, before[name]) for name, each in assembly.parameters)
    assert taken[0].update.reruns.over_limit
    stops = _assemble(world, *settings, "rerun.at_limit=stop")
    kept = {name: each.detach().clone() for name, each in stops.parameters}
    with pytest.raises(DroppedError, match=r"step 1: .*% of its routes found no room, 0.00% may, "):
        _steps(rank, stops, crowd_at=1)
    assert all(torch.equal(each, kept[name]) for name, each in stops.parameters)
    return [
        (reruns.times, reruns.capacity_factor, reruns.dropped_part)
        for reruns in (each.update.reruns for each in taken)
    ]


@pytest.mark.parametrize(
    ("limits", "times", "factor"),
    [
        (("rerun.most_times=2",), 2, 0.5 * 1.25**2),
        (("rerun.most_capacity_factor=0.6",), 1, 0.6),
    ],
)
def test_a_step_that_drops_at_the_limit_is_taken_or_ends_the_run(processes, limits, times, factor):
    answers = processes.run(_at_the_limit, limits, world=2)
    assert answers[0] == answers[1]
    # All to one rank, whose room is that part of twice the even load.
    assert answers[0][0] == (times, factor, pytest.approx(1 - factor / 2, abs=2e-3))


def _buffers_go(rank: int, world: int) -> None:
    assembly = _assemble(world, "layout.dispatcher.capacity_factor=0.5", *DROPS)
    grown = assembly.dispatcher
    assert isinstance(grown, GrowingDispatcher)
    original, alive = grown._make, []

    def make(factor: float):
        assert not any(_is_mapped(address) for address in alive)
        made = original(factor)
        alive[:] = [made._buffers.rows.buffers[0].own[0].data_ptr()]
        return made

    grown._make = make
    grown.resize(0.55)
    accumulate_gradients(assembly, _batches(assembly.mesh.data, 1))
    assert grown.factor > 0.55


def _is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= address < last and "olmo-ep-comm" in line:
            return True
    return False


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what is mapped")
def test_old_buffers_are_gone_before_new_ones_come(processes):
    processes.run(_buffers_go, world=2)


def _train(
    rank: int, world: int, folder: str, texts: str, settings: tuple[str, ...], resume: str
) -> str:
    base = (
        *("data.source.kind=text_folder", f"data.source.path={texts}"),
        *("run.heldout_every=0", "run.sample_bytes=0", "run.threads=1", f"run.folder={folder}"),
        *("device=cpu", "run.log_every=99"),
    )
    config: TrainerConfig = apply_overrides(nano(), [*SHARED, *base, *settings]).for_world(world)
    said = io.StringIO()
    manifest = read_manifest(find_checkpoint(Path(resume))) if resume else None
    run = loop._Run(
        config,
        create_mesh(config.layout, torch.device("cpu")),
        loop.open_data(config),
        Path(folder),
        Console(file=said, width=200),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_conclude", lambda heldout, saved: saved)
        run.train(manifest)
    return said.getvalue()


def _stop_late(
    rank: int, world: int, folder: str, texts: str, settings: tuple[str, ...], at: int
) -> None:
    """Train until a step drops too much, on ranks that read a step when the next is under way."""

    def refuse(self: StepRerun, step: int) -> None:
        if step == at:
            raise DroppedError("too many")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mesh, "host_waits", True)
        patch.setattr(StepRerun, "require_room", refuse)
        with pytest.raises(DroppedError, match="too many"):
            _train(rank, world, folder, texts, settings, "")


def _records(folder: Path) -> list[StepRecord]:
    records = read_metrics(folder / "metrics.jsonl")
    return [each for each in records if isinstance(each, StepRecord)]


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(6):
        (folder / f"{index}.txt").write_text(f"{index} and the words of the day " * 60)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_says_what_was_run_again_and_a_resume_goes_on_with_the_room(
    processes, tmp_path, texts
):
    room = ("layout.dispatcher.capacity_factor=0.6", *DROPS, "rerun.most_dropped=0.2", "steps=6")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    arguments = (str(straight), str(texts), (*room, "run.save_every=3"), "")
    said = processes.run(_train, *arguments, world=2)
    records = _records(straight)
    assert records[0].reruns >= 1
    assert f"step 1 was run {records[0].reruns + 1} times, up to a capacity factor of " in said[0]
    assert records[2].capacity_factor is not None
    assert records[2].capacity_factor > 0.6  # what the resume must begin with
    assert all(each.dropped for each in records)  # so that the room matters
    assert all(each.over_capacity == 0 for each in records)
    middle = str(straight / "checkpoints" / "step-00000003")
    processes.run(_train, str(resumed), str(texts), room, middle, world=2)
    timed = {"seconds", "tokens_per_second", "phase_seconds", "flops_per_second"}
    for one, other in zip(records[3:], _records(resumed), strict=True):
        for name in set(StepRecord.__dataclass_fields__) - timed:
            assert getattr(one, name) == getattr(other, name), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_steps_before_one_that_ends_the_run_are_in_the_log(processes, tmp_path, texts):
    settings = ("layout.dispatcher.capacity_factor=0.6", *DROPS, "steps=6")
    processes.run(_stop_late, str(tmp_path / "run"), str(texts), settings, 4, world=2)
    assert [each.step for each in _records(tmp_path / "run")] == [1, 2, 3]
