"""Any layout loads any other's checkpoint, element for element, optimizer state included.

And training goes on from it: within the bound that another order of sums allows.
"""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from olmo_trainer.build import Assembly, assemble
from olmo_trainer.checkpoint import load_checkpoint, save_checkpoint, state_of
from olmo_trainer.checkpoint_manifest import checkpoint_path, read_manifest
from olmo_trainer.config import InterleavedOneFOneB, LayoutConfig, OneFOneB
from olmo_trainer.data import Batch
from olmo_trainer.mesh import create_mesh
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import nano
from olmo_trainer.step import accumulate_gradients, update


def _layout(
    data: int = 1, expert: int = 1, pipeline: int = 1, *, chunks: int = 1, context: int = 1
) -> LayoutConfig:
    schedule = InterleavedOneFOneB(chunks=chunks) if chunks > 1 else OneFOneB()
    sizes = {"data": data, "expert": expert, "pipeline": pipeline, "context": context}
    return LayoutConfig(**sizes, schedule=schedule)


ONE = _layout()
LAYOUTS = (
    *(ONE, _layout(2, 2), _layout(4), _layout(4, 4), _layout(pipeline=2), _layout(2, 2, 2)),
    *(_layout(pipeline=2, chunks=2), _layout(expert=2, context=2), _layout(2, 4, context=2)),
    _layout(expert=2, pipeline=2, context=2),
)
# A matrix of Muon's is whole with one of its replicas: who they are is another in each of these.
OF_MUON = (_layout(2, 2), _layout(4), _layout(pipeline=2, chunks=2), _layout(2, 2, context=2))
NUM_STATES = {"adamw": 3, "muon": 2}  # of a matrix of experts: its main weight and moments


def _world(layout: LayoutConfig) -> int:
    return (layout.data or 1) * layout.context * layout.pipeline


def _name(layout: LayoutConfig) -> str:
    return f"{layout.describe()}, {layout.schedule.kind}"


def _assembly(layout: LayoutConfig, optimizer: str, *settings: str) -> Assembly:
    config = apply_overrides(nano(), [f"optimizer.kind={optimizer}", *settings])
    batch = config.batch.model_copy(update={"accumulation": layout.pipeline})
    config = config.model_copy(update={"layout": layout, "batch": batch})
    config = config.for_world(_world(layout))
    return assemble(config, create_mesh(config.layout, torch.device("cpu")))


def _mark(assembly: Assembly) -> None:
    """Give every element of the global state a value of its own."""
    for name, shard in state_of(assembly).items():
        if name == "step":
            shard.fill_(7)
        else:
            place = torch.arange(shard.local.numel(), dtype=torch.float64) + shard.start
            shard.local.copy_(_mark_of(name, place))


def _mark_of(name: str, place: torch.Tensor) -> torch.Tensor:
    offset = sum(name.encode()) % 1000
    return (place + offset * 2.0**-10).to(torch.float32)


def _save(rank: int, world: int, layout: LayoutConfig, optimizer: str, folder: str) -> str:
    assembly = _assembly(layout, optimizer)
    _mark(assembly)
    return _write(assembly, Path(folder), 7)


def _write(assembly: Assembly, folder: Path, step: int) -> str:
    versions = {"olmo-trainer": "test"}
    return str(save_checkpoint(assembly, folder, step, data_fingerprint="", versions=versions))


def _load(rank: int, world: int, layouts: list[LayoutConfig], optimizer: str, path: str) -> int:
    checked = 0
    for layout in layouts:
        assembly = _assembly(layout, optimizer)
        load_checkpoint(assembly, read_manifest(Path(path)))
        for name, shard in state_of(assembly).items():
            if name == "step":
                assert shard == 7
                continue
            place = torch.arange(shard.local.numel(), dtype=torch.float64) + shard.start
            assert torch.equal(shard.local, _mark_of(name, place)), (layout, name)
            checked += shard.local.numel()
        for name, parameter in assembly.parameters:
            start = 0
            if ".experts." in name:
                start = assembly.mesh.expert * parameter.numel()
            place = torch.arange(parameter.numel(), dtype=torch.float64) + start
            assert torch.equal(parameter.flatten(), _mark_of(f"main.{name}", place)), (layout, name)
    assert dist.is_initialized() or world == 1
    return checked


@pytest.mark.dist
@pytest.mark.parametrize(
    ("optimizer", "layouts", "saved"),
    [
        pytest.param(optimizer, layouts, saved, id=f"{optimizer}, {_name(saved)}")
        for optimizer, layouts in (("adamw", LAYOUTS), ("muon", OF_MUON))
        for saved in layouts
    ],
)
def test_every_layout_loads(processes, tmp_path, optimizer, layouts, saved):
    paths = processes.run(_save, saved, optimizer, str(tmp_path), world=_world(saved))
    assert len(set(paths)) == 1
    manifest = read_manifest(Path(paths[0]))
    experts = [name for name in manifest.elements if ".experts." in name]
    config = nano().model
    assert len(experts) == NUM_STATES[optimizer] * 2 * len(config.moe_layers)
    assert all(manifest.elements[name] % config.moe.num_experts == 0 for name in experts)
    total = 4 * sum(manifest.elements.values())
    written = sum(size for name, size in manifest.files.items() if name.endswith(".safetensors"))
    assert total <= written < 1.5 * total + 100_000
    by_world: dict[int, list[LayoutConfig]] = {}
    for layout in layouts:
        by_world.setdefault(_world(layout), []).append(layout)
    for world, group in by_world.items():
        counts = processes.run(_load, group, optimizer, paths[0], world=world)
        assert all(counts)


# AdamW turns the last bit of a tiny gradient into a whole step, unless epsilon stands above it.
STEADY = ("optimizer.epsilon=1e-3", "optimizer.moments=fp32", "data.sequence_length=16")


def _batches(assembly: Assembly, step: int) -> list[Batch]:
    """Return this rank's part of the global batch: of two, in turn, of eight sequences of 16."""
    mesh, config = assembly.mesh, assembly.config
    tokens = torch.randint(0, 257, (8, 17), generator=torch.Generator().manual_seed(step % 2))
    own = tokens.chunk(mesh.num_data)[mesh.data].chunk(config.batch.accumulation)
    whole = [
        Batch(each[:, :-1].clone(), each[:, 1:].clone(), torch.ones(len(each), 16).bool())
        for each in own
    ]
    return [each.context_part(mesh.context, mesh.num_context) for each in whole]


def _go_on(
    rank: int, world: int, layout: LayoutConfig, optimizer: tuple[str, ...], folder: str, first: int
) -> tuple[list[float], str]:
    """Train two steps, from a checkpoint unless they are the first, and save them."""
    assembly = _assembly(layout, *optimizer, *STEADY)
    if first:
        load_checkpoint(assembly, read_manifest(checkpoint_path(Path(folder), first)))
    losses = []
    for step in (first + 1, first + 2):
        accumulate_gradients(assembly, _batches(assembly, step))
        losses.append(float(assembly.statistics.loss))
        update(assembly, step, 1e-2)
    return losses, _write(assembly, Path(folder), first + 2)


def _weights(rank: int, world: int, optimizer: tuple[str, ...], path: str) -> dict:
    assembly = _assembly(ONE, *optimizer, *STEADY)
    load_checkpoint(assembly, read_manifest(Path(path)))
    return {name: shard.local for name, shard in state_of(assembly).items() if name != "step"}


@pytest.mark.dist
@pytest.mark.parametrize(
    "optimizer", [("adamw",), ("muon", "optimizer.products=fp32")], ids=lambda each: each[0]
)
def test_a_run_goes_on_under_other_layouts(processes, tmp_path, optimizer):
    road = (_layout(2, 4, context=2), _layout(2, 2, 2), _layout(2), _layout(1, 2, 2, context=2))
    losses: dict[str, list[float]] = {"straight": [], "other": []}
    for turn, layout in enumerate(road):
        for name, taken in (("straight", ONE), ("other", layout)):
            folder = str(tmp_path / name)
            found = processes.run(_go_on, taken, optimizer, folder, 2 * turn, world=_world(taken))
            assert all(each == found[0] for each in found)
            losses[name] += found[0][0]
    assert losses["other"] == pytest.approx(losses["straight"], rel=1e-5)
    assert losses["other"][-1] < losses["other"][0]
    straight, other = (
        processes.run(_weights, optimizer, str(checkpoint_path(tmp_path / name, 8)), world=1)[0]
        for name in losses
    )
    assert straight.keys() == other.keys()
    for name, tensor in straight.items():
        distance = (tensor - other[name]).norm() / tensor.norm().clamp_min(1e-6)
        assert distance < 1e-4, (name, float(distance))


def test_the_marks_tell_elements_apart():
    place = torch.arange(5000, dtype=torch.float64)
    names = ("main.head.weight", "exp_avg.head.weight", "exp_avg_sq.head.weight")
    marks = torch.cat([_mark_of(name, place) for name in names])
    assert len(marks.unique()) == len(marks)
    assert len(set(itertools.chain(names))) == 3
