"""The benchmarks run: every step that a CPU can take, at tiny sizes."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_a_dry_run_compares_the_contenders_and_prints_the_buffers(tmp_path):
    command = [sys.executable, str(BENCHMARKS), "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (report,) = tmp_path.glob("exchange_cpu-dry-run_*.md")
    text = report.read_text()
    for contender, cells in (
        *(("rowwise, put", 4), ("rowwise, get", 4), ("all_to_all", 4)),
        *(("eager", 2), ("torch, no barrier", 2), ("moves", 2), ("mxfp8", 1)),
        ("grouped product alone", 1),
    ):
        assert text.count(f"| {contender} |") == cells, contender
    # T * ranks * K rows of D values of 2 bytes, twice: for one live forward and for gradients.
    assert f"rows 0 {16384 * 2 * 8 * 4096 * 2 / 2**20:.1f}, gradients" in text


@pytest.fixture
def programs(monkeypatch):
    """The module of the benchmark, in a group of one."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield importlib.import_module("programs")
    finally:
        dist.destroy_process_group()
        for name in ("programs", "cells", "timing"):
            sys.modules.pop(name, None)


def test_the_product_beside_the_writes_is_grouped_by_the_routes(programs, monkeypatch):
    given = {}

    def keep(rows_RD, w_EDF, *, offs):
        given.update(rows=rows_RD, weights=w_EDF, ends=offs)
        return real(rows_RD, w_EDF, offs=offs)

    real = torch.nn.functional.grouped_mm
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", keep)
    shape = programs.Shape(T=50, D=64, E=8, K=2)
    y_RF = programs.grouped_product(shape, torch.device("cpu"))()
    assert {given["rows"].dtype, given["weights"].dtype} == {torch.bfloat16}
    assert given["ends"].dtype == torch.int32
    assert given["ends"][-1] == shape.T * shape.K == len(given["rows"])
    want, start = torch.empty_like(y_RF), 0
    for weight_DF, end in zip(given["weights"], given["ends"].tolist(), strict=True):
        assert end > start
        want[start:end] = given["rows"][start:end] @ weight_DF
        start = end
    torch.testing.assert_close(y_RF, want, rtol=2.0**-7, atol=2.0**-5)
