"""Any layout loads any other's checkpoint, element for element, optimizer state included."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from olmo_trainer.build import Assembly, assemble
from olmo_trainer.checkpoint import load_checkpoint, save_checkpoint, state_of
from olmo_trainer.checkpoint_manifest import read_manifest
from olmo_trainer.config import InterleavedOneFOneB, LayoutConfig, OneFOneB
from olmo_trainer.mesh import create_mesh
from olmo_trainer.recipes import nano

# Data ranks, expert ranks within them, pipeline ranks, stages a pipeline rank.
Layout = tuple[int, int, int, int]
LAYOUTS: tuple[Layout, ...] = (
    *((1, 1, 1, 1), (2, 2, 1, 1), (4, 1, 1, 1), (4, 4, 1, 1), (1, 1, 2, 1), (2, 2, 2, 1)),
    (1, 1, 2, 2),
)


def _assembly(layout: Layout) -> Assembly:
    data, expert, pipeline, chunks = layout
    schedule = InterleavedOneFOneB(chunks=chunks) if chunks > 1 else OneFOneB()
    made = LayoutConfig(data=data, expert=expert, pipeline=pipeline, schedule=schedule)
    config = nano()
    batch = config.batch.model_copy(update={"accumulation": pipeline})
    config = config.model_copy(update={"layout": made, "batch": batch})
    config = config.for_world(data * pipeline)
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


def _save(rank: int, world: int, layout: Layout, folder: str) -> str:
    assembly = _assembly(layout)
    _mark(assembly)
    versions = {"olmo-trainer": "test"}
    path = save_checkpoint(assembly, Path(folder), 7, data_fingerprint="", versions=versions)
    return str(path)


def _load(rank: int, world: int, layouts: list[Layout], path: str) -> int:
    checked = 0
    for layout in layouts:
        assembly = _assembly(layout)
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
@pytest.mark.parametrize("saved", LAYOUTS, ids=str)
def test_every_layout_loads(processes, tmp_path, saved):
    world = saved[0] * saved[2]
    paths = processes.run(_save, saved, str(tmp_path), world=world)
    assert len(set(paths)) == 1
    manifest = read_manifest(Path(paths[0]))
    experts = [name for name in manifest.elements if ".experts." in name]
    config = nano().model
    assert len(experts) == 3 * 2 * len(config.moe_layers)
    assert all(manifest.elements[name] % config.moe.num_experts == 0 for name in experts)
    total = 4 * sum(manifest.elements.values())
    written = sum(size for name, size in manifest.files.items() if name.endswith(".safetensors"))
    assert total <= written < 1.5 * total + 100_000
    by_world: dict[int, list[Layout]] = {}
    for layout in LAYOUTS:
        by_world.setdefault(layout[0] * layout[2], []).append(layout)
    for world, layouts in by_world.items():
        counts = processes.run(_load, layouts, paths[0], world=world)
        assert all(counts)


def test_the_marks_tell_elements_apart():
    place = torch.arange(5000, dtype=torch.float64)
    names = ("main.head.weight", "exp_avg.head.weight", "exp_avg_sq.head.weight")
    marks = torch.cat([_mark_of(name, place) for name in names])
    assert len(marks.unique()) == len(marks)
    assert len(set(itertools.chain(names))) == 3
