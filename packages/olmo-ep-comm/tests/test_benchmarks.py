"""The benchmarks run: every step that a CPU can take, at tiny sizes."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from olmo_ep_comm import AllToAllDispatcher, RowwiseDispatcher
from olmo_ep_comm._rowwise import moves
from torch.overrides import TorchFunctionMode

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


class LinkMeter(TorchFunctionMode):
    """The moves, and the bytes of rows that they write into or read from other ranks' buffers."""

    def __init__(self, dispatcher: RowwiseDispatcher) -> None:
        super().__init__()
        buffers, rank = dispatcher._buffers, dist.get_rank()
        stacks = (*buffers.rows.buffers, *buffers.gradients.buffers, buffers.sums)
        far = [one for stack in stacks for at, one in enumerate(stack.every) if at != rank]
        self.far = {one.data_ptr() for one in far}
        self.bytes = 0

    def __getattr__(self, name):
        def metered(*arguments):
            with self:
                return getattr(moves, name)(*arguments)

        return metered

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_write, is_read = func is torch.Tensor.index_copy_, func is torch.Tensor.__getitem__
        if (is_write or is_read) and args[0].data_ptr() in self.far:
            self.bytes += (args[3] if is_write else out).nbytes
        return out


def _meter(rank: int, world: int) -> list[tuple[str, int, int]]:
    """Return contender and exchange, the bytes that the report says, and those of the link."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        for name in ("cells", "timing"):  # names that benchmarks of other packages have, too
            sys.modules.pop(name, None)
        cells = importlib.import_module("cells")
        patch.setattr(cells.timing, "interleave", lambda *arguments: {})  # nothing is timed here
        shape = cells.Shape(T=12, D=64, E=4, K=3)
        said = [cell.wire for cell in cells.layers(shape, torch.device("cpu"), 1)]
    counted, exchange = [], dist.all_to_all_single
    inputs = cells.make_inputs(shape, torch.device("cpu"), torch.float32)
    calls = [torch.no_grad()(cells.forward), cells.both]
    for combine_by in ("put", "get"):
        dispatcher = cells.make_rowwise(shape, torch.float32, combine_by=combine_by)
        for call, wire in zip(calls, said, strict=True):
            meter = LinkMeter(dispatcher)
            object.__setattr__(dispatcher._buffers.settings, "moves", meter)
            call(dispatcher, inputs)
            counted.append((combine_by, wire[f"rowwise, {combine_by}"], meter.bytes))

    sent = 0

    def logged(output, rows, received=None, splits=None, **options):
        nonlocal sent
        if rows.ndim == 2 and rows.dtype == torch.float32:  # not counts, nor weights
            away = [size for to, size in enumerate(splits) if to != rank]
            sent += sum(away) * rows.shape[1] * rows.itemsize
        return exchange(output, rows, received, splits, **options)

    dist.all_to_all_single = logged
    try:
        dispatcher = AllToAllDispatcher(num_experts=shape.E)
        for call, wire in zip(calls, said, strict=True):
            sent = 0
            call(dispatcher, inputs)
            counted.append(("all_to_all", wire["all_to_all"], sent))
    finally:
        dist.all_to_all_single = exchange
    return counted


@pytest.mark.dist
def test_the_bytes_of_the_report_are_those_that_crossed(processes):
    """A bandwidth above that of the link, made of rows that never left, could not be reported."""
    ranks = processes.run(_meter, world=2)
    # What one rank sends or fetches is not what it is sent, but all of it is that of all.
    for cells in zip(*ranks, strict=True):
        wire, link = (sum(cell[place] for cell in cells) for place in (1, 2))
        assert 0.98 * link <= wire <= 1.02 * link, (cells[0][0], wire, link)
        assert link > 0


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
