"""The safetensors files of an export."""

from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from olmo_trainer.hugging_face.tensor_files import TensorFolder, write_tensors


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 200))
def test_files_hold_every_tensor_and_at_most_their_bytes(tmp_path_factory, sizes, shard_bytes):
    folder = tmp_path_factory.mktemp("files")
    whole = torch.arange(sum(sizes), dtype=torch.float32)
    tensors = {str(i): part for i, part in enumerate(whole.split(sizes))}  # views of one storage
    write_tensors(folder, tensors.items(), shard_bytes=shard_bytes)
    found = TensorFolder(folder)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
    for path in folder.glob("*.safetensors"):
        held = [name for name in found if found._files[name] is _file_of(found, path)]
        assert len(held) <= 1 or sum(4 * sizes[int(name)] for name in held) <= shard_bytes
    assert not list(folder.glob("*.partial"))


def _file_of(found: TensorFolder, path: Path) -> Any:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        (name, *_) = file.keys()
    return found._files[name]
