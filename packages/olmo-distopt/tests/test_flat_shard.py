import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from olmo_distopt import FlatShard, Location
from torch.distributed.checkpoint import CheckpointException


def _alone(call, *arguments, **options):
    """Save or load in a single process; torch warns that it is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return call(*arguments, **options)


def test_is_a_label_on_live_storage():
    tensor = torch.arange(6.0).view(2, 3)
    shard = FlatShard(tensor, start=4, global_numel=12)
    assert (shard.size(), shard.start, shard.dtype) == (torch.Size([12]), 4, torch.float32)
    assert shard.local.data_ptr() == tensor.data_ptr()
    assert repr(shard) == "FlatShard([4, 10) of 12, torch.float32)"
    assert FlatShard(tensor).size() == torch.Size([6])
    assert FlatShard(torch.tensor(3)).size() == torch.Size([1])


def test_does_no_arithmetic():
    shard = FlatShard(torch.ones(2), global_numel=4)
    for operation in (torch.sum, torch.clone, copy.deepcopy):
        with pytest.raises(TypeError, match=r"holds one piece of a tensor; use `\.local`"):
            operation(shard)


@pytest.mark.parametrize(("start", "total"), [(-1, 9), (3, 4), (0, 1), (9, 9)])
def test_refuses_a_range_outside_the_tensor(start, total):
    with pytest.raises(
        ValueError, match=rf"`global_numel`={total}\), got \[{start}, {start + 2}\)"
    ):
        FlatShard(torch.ones(2), start=start, global_numel=total)


def test_refuses_what_it_could_not_load_into():
    with pytest.raises(ValueError, match=r"`local` must be contiguous, got shape \(3, 2\)"):
        FlatShard(torch.ones(2, 3).t())


@pytest.mark.parametrize(
    ("shape", "rows", "first_row"),
    [
        ((4, 3), (2, 3), 3),
        ((4, 3), (2, 2), 0),
        ((4, 3), (2, 3), -1),
        ((), (), 0),
        ((4,), (4, 1), 0),
    ],
)
def test_refuses_rows_outside_the_tensor(shape, rows, first_row):
    with pytest.raises(ValueError, match="The rows of `w` must lie within the global tensor"):
        Location(shape, first_row).flat_range("w", rows)


def test_round_trip_in_one_process(tmp_path):
    buffer = torch.arange(1000.0)
    saved = {
        "slice.of.a.buffer": FlatShard(buffer[10:14]),
        "counts": FlatShard(torch.arange(6).view(2, 3)),
        "scalar": FlatShard(torch.tensor(2.5).bfloat16()),
        "empty": FlatShard(torch.zeros(0)),
        "step": torch.tensor(7),
    }
    _alone(dcp.save, saved, checkpoint_id=tmp_path / "saved")
    stored = sum(path.stat().st_size for path in (tmp_path / "saved").glob("*.distcp"))
    assert stored < 4 * 1000 + 6000, "the buffer behind a slice must not be written"

    target = torch.full((1000,), -1.0)
    loaded = {
        "slice.of.a.buffer": FlatShard(target[20:24]),
        "counts": FlatShard(torch.zeros(6, dtype=torch.int64)),
        "scalar": FlatShard(torch.tensor(0.0).bfloat16()),
        "empty": FlatShard(torch.zeros(0)),
        "step": torch.tensor(0),
    }
    _alone(dcp.load, loaded, checkpoint_id=tmp_path / "saved")
    assert target[20:24].tolist() == [10.0, 11.0, 12.0, 13.0]
    assert target[:20].eq(-1).all()
    assert target[24:].eq(-1).all()
    assert loaded["counts"].local.tolist() == list(range(6))
    assert loaded["scalar"].local.tolist() == [2.5]
    assert loaded["step"].item() == 7

    whole = {"slice.of.a.buffer": torch.zeros(4)}
    _alone(dcp.load, whole, checkpoint_id=tmp_path / "saved")
    assert whole["slice.of.a.buffer"].tolist() == [10.0, 11.0, 12.0, 13.0]

    other_size = {"counts": FlatShard(torch.zeros(7, dtype=torch.int64))}
    with pytest.raises(CheckpointException, match="Size mismatch"):
        _alone(dcp.load, other_size, checkpoint_id=tmp_path / "saved")


def _bytes_of(folder):
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


def _pieces(rank, world, folder):
    """Ranks 1 and 2 hold the same piece, 3 the next, 0 an empty one at the first one's offset."""
    line = torch.arange(30_000.0)
    start, stop = [(0, 0), (0, 10_000), (0, 10_000), (10_000, 30_000)][rank]
    shard = FlatShard(line[start:stop], start=start, global_numel=len(line))
    dcp.save({"line": shard}, checkpoint_id=folder)
    start, stop = [(29_999, 30_000), (0, 0), (5, 25_000), (9_999, 10_001)][rank]
    local = torch.full((stop - start,), -1.0)
    dcp.load({"line": FlatShard(local, start=start, global_numel=len(line))}, checkpoint_id=folder)
    return torch.equal(local, line[start:stop])


@pytest.mark.dist
def test_pieces_are_written_once_and_read_anywhere(processes, tmp_path):
    assert processes.run(_pieces, tmp_path, world=4) == [True] * 4
    assert 4 * 30_000 <= _bytes_of(tmp_path) < 4 * 30_000 + 8_000
