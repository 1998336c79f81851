"""The benchmark of step times runs: on gloo in a dry run, on two GPUs as it is meant."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from gpu_ranks import launch

FOLDER = Path(__file__).parent.parent / "benchmarks" / "step_time"
NAMES = (
    "torch 1f1b", "torch interleaved", "1f1b", "interleaved", "v_shape", "search, whole",
    "zero_bubble h1", "zero_bubble v", "search, split", "dual_pipe_v",
)  # fmt: skip


def _rows(report):
    rows = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[1:]}


def _dry_run(rank, world):
    modules = {"contenders", "layers", "table", "timing"}
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("step_time", FOLDER / "__main__.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        shape = module.SHAPES["dry"]._replace(tokens=8, num_microbatches=4)
        with pytest.raises(ValueError, match=r"the 8 layers must make two equal stages .* got 3"):
            module.measure(rank, 3, torch.device("cpu"), shape, rounds=1)
        return module.measure(rank, world, torch.device("cpu"), shape, rounds=1)
    finally:
        sys.path.remove(str(FOLDER))
        for name in modules:
            sys.modules.pop(name, None)


@pytest.mark.dist
def test_a_dry_run_has_a_row_for_every_schedule(processes):
    report = processes.run(_dry_run, world=2)[0]
    rows = _rows(report)
    assert tuple(rows) == NAMES
    assert report.startswith("# Step time on 2 x CPU, dry run")
    for name, cells in rows.items():
        step = float(cells[0].split()[0])
        assert step > 0
        if not name.startswith("torch"):
            assert 0 <= float(cells[5].removesuffix(" %")) < 100, "the simulated idle share"


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_time_every_schedule():
    said = launch(FOLDER, "--rounds", "2", world=2)
    assert tuple(_rows(said)) == NAMES
