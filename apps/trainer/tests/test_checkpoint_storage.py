"""What lies in a checkpoint's folder: tensors and plain data, whole or refused, never executed."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from olmo_distopt import FlatShard
from olmo_trainer import checkpoint as checkpoint_module
from olmo_trainer.checkpoint import load_checkpoint, write_checkpoint
from olmo_trainer.checkpoint_manifest import CheckpointError, find_checkpoint, read_manifest
from olmo_trainer.checkpoint_storage import TensorReader
from olmo_trainer.mesh import create_mesh
from olmo_trainer.safetensors_file import TensorFile, write_tensors
from safetensors.torch import load_file, save_file

CPU = torch.device("cpu")
TENSORS = {
    "weights": torch.randn(3, 5),
    "half": torch.randn(7).bfloat16(),
    "counts": torch.arange(4),
    "flags": torch.tensor([True, False]),
    "step": torch.tensor(12),
    "none": torch.empty(0),
}


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> list[int]:
    shapes = {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
    return write_tensors(path, shapes, tensors.values())


def test_the_safetensors_package_reads_what_we_write(tmp_path):
    _write(tmp_path / "a", TENSORS)
    read = load_file(tmp_path / "a")
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_we_read_what_the_safetensors_package_writes(tmp_path):
    save_file(TENSORS, tmp_path / "a", metadata={"format": "pt"})
    with TensorFile(tmp_path / "a") as file:
        assert file.header.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert torch.equal(file.read(name, 0, tensor.numel()), tensor.view(-1)), name
        assert torch.equal(file.read("weights", 4, 6), TENSORS["weights"].view(-1)[4:10])


def test_views_of_one_buffer_are_written_once_each(tmp_path):
    buffer = torch.randn(10_000)
    views = {f"p{index}": buffer[100 * index : 100 * (index + 1)] for index in range(5)}
    _write(tmp_path / "a", views)
    assert (tmp_path / "a").stat().st_size < 4 * 500 + 1000
    read = load_file(tmp_path / "a")
    assert all(torch.equal(read[name], view) for name, view in views.items())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08",
        (2**62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"nope",
        *(
            len(text).to_bytes(8, "little") + text + bytes(8)
            for text in (
                b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}',
                b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
                b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]}}',
                b'{"a": {"dtype": "OBJ", "shape": [2], "data_offsets": [0, 8]}}',
                b'{"a": 3}',
            )
        ),
        pickle.dumps({"a": 1}),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file"):
        TensorFile(tmp_path / "a")


def test_ranges_and_checksums_are_checked(tmp_path):
    (checksum,) = _write(tmp_path / "a", {"x": torch.arange(8)})
    with TensorFile(tmp_path / "a") as file:
        assert file.read("x", 0, 8, checksum=checksum).tolist() == list(range(8))
        for start, length in ((-1, 2), (7, 2), (0, 9)):
            with pytest.raises(ValueError, match=r"x has elements \[0, 8\)"):
                file.read("x", start, length)
        with pytest.raises(ValueError, match="no tensor y"):
            file.read("y", 0, 1)
    content = bytearray((tmp_path / "a").read_bytes())
    content[-1] ^= 1  # one bit, such as a disk may turn
    (tmp_path / "a").write_bytes(content)
    with TensorFile(tmp_path / "a") as file, pytest.raises(ValueError, match="checksum differs"):
        file.read("x", 0, 8, checksum=checksum)


def test_a_tensor_of_another_form_than_stated_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"tensor x must be torch.float32 of shape \(2,\)"):
        write_tensors(tmp_path / "a", {"x": (torch.float32, (2,))}, [torch.zeros(3)])
    with pytest.raises(ValueError, match="must be of F64"):
        write_tensors(tmp_path / "a", {"x": (torch.complex64, (2,))}, [torch.zeros(2)])


@pytest.fixture
def checkpoint(make_config, tmp_path) -> Path:
    config = make_config("steps=3")
    state = {"main.a": FlatShard(torch.arange(6.0)), "step": torch.tensor(3)}
    return write_checkpoint(
        state,
        config,
        create_mesh(config.layout, CPU),
        tmp_path / "run" / "checkpoints" / "step-00000003",
        step=3,
        data_fingerprint="",
        versions={},
    )


class Bomb:
    """A pickle that leaves a mark when something loads it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def _load(checkpoint: Path) -> None:
    state = {"main.a": FlatShard(torch.zeros(6)), "step": torch.tensor(0)}
    checkpoint_module._read(state, read_manifest(checkpoint), alone=True)
    assert torch.equal(state["main.a"].local, torch.arange(6.0))
    assert state["step"] == 3


def test_a_checkpoint_holds_tensors_and_json_alone(checkpoint):
    _load(checkpoint)
    names = sorted(path.name for path in checkpoint.iterdir())
    assert names == ["checkpoint.json", "tensors-00000.safetensors", "tensors.json"]
    for path in checkpoint.glob("*.json"):
        json.loads(path.read_text())
    assert load_file(checkpoint / names[1]).keys() == {"main.a", "step"}


@pytest.mark.parametrize(
    "place", [".metadata", "__0_0.distcp", "extra.pt", "checkpoint.json", "tensors.json", "tensors"]
)
def test_a_planted_pickle_is_refused_and_never_runs(checkpoint, tmp_path, place):
    mark = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(mark))
    file = checkpoint / ("tensors-00000.safetensors" if place == "tensors" else place)
    if file.exists():  # of the same length, so that no size tells
        size = file.stat().st_size
        assert len(bomb) <= size
        bomb += bytes(size - len(bomb))
    file.write_bytes(bomb)
    with pytest.raises(CheckpointError, match=r"may be a pickle|cannot be read"):
        _load(checkpoint)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()  # it would have


def test_a_checkpoint_of_the_pickled_format_is_refused(checkpoint):
    raw = json.loads((checkpoint / "checkpoint.json").read_text())
    (checkpoint / "checkpoint.json").write_text(json.dumps(raw | {"format": 1}))
    with pytest.raises(CheckpointError, match="format 1, whose index is a pickle"):
        read_manifest(checkpoint)


def _reindexed(checkpoint: Path, edit) -> TensorReader:
    index = json.loads((checkpoint / "tensors.json").read_text())
    edit(index["main.a"])
    (checkpoint / "tensors.json").write_text(json.dumps(index))
    return TensorReader(checkpoint)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda a: a["pieces"][0].update(start=1), "gap or overlap at element 0"),
        (lambda a: a["pieces"].append(a["pieces"][0]), "gap or overlap at element 6"),
        (lambda a: a["pieces"][0].update(length=5), "not its 6 elements"),
        (lambda a: a["pieces"][0].update(file="../../other"), "must lie in a file tensors-"),
        (lambda a: a["pieces"][0].update(file="/etc/passwd"), "must lie in a file tensors-"),
        (lambda a: a["pieces"][0].update(more=1), "TypeError"),
        (lambda a: a.update(dtype="object"), "KeyError"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(checkpoint, edit, message):
    with pytest.raises(CheckpointError, match=message):
        _reindexed(checkpoint, edit).read_metadata()


def test_the_newest_whole_checkpoint_is_found(checkpoint, tmp_path):
    run = tmp_path / "run"
    for step in (5, 7, 9):
        shutil.copytree(checkpoint, checkpoint.with_name(f"step-{step:08d}"))
    assert find_checkpoint(run).name == "step-00000009"
    file = checkpoint.with_name("step-00000009") / "tensors-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (checkpoint.with_name("step-00000007") / "checkpoint.json").unlink()
    assert find_checkpoint(run).name == "step-00000005"
    # A kill between the two renames of a save that is done again.
    checkpoint.with_name("step-00000005").rename(checkpoint.with_name("step-00000005.replaced"))
    assert find_checkpoint(run).name == "step-00000005.replaced"
    for name in ("step-00000005.replaced", "step-00000003"):
        (checkpoint.with_name(name) / "tensors.json").unlink()
    with pytest.raises(CheckpointError, match=r"no whole checkpoint here: .*truncated"):
        find_checkpoint(run)


def test_another_model_does_not_load(checkpoint, make_config):
    from olmo_trainer.build import assemble

    config = make_config("steps=3")
    assembly = assemble(config, create_mesh(config.layout, CPU))
    with pytest.raises(CheckpointError, match=r"exp_avg\.embedding.weight has none there"):
        load_checkpoint(assembly, read_manifest(checkpoint))
