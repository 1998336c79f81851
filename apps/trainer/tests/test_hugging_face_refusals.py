"""Wrong arguments and faulty files of `import` and `export`: named, and nothing is left behind."""

import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from olmo_trainer.build import assemble
from olmo_trainer.checkpoint import save_checkpoint
from olmo_trainer.checkpoint_manifest import find_checkpoint, read_manifest
from olmo_trainer.cli import main
from olmo_trainer.hugging_face.tensor_files import TensorFolder, write_tensors
from olmo_trainer.mesh import create_mesh
from olmo_trainer.recipes import nano

# Fields of a small model; no dimension equals another by chance.
SMALL = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random OLMoE as `transformers` saves it; copy it to change it."""
    transformers, folder = import_module("transformers"), tmp_path_factory.mktemp("olmoe")
    transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**SMALL)).save_pretrained(folder)
    return folder


def _save_run(run: Path) -> None:
    config = nano().for_world(1)
    assembly = assemble(config, create_mesh(config.layout, torch.device("cpu")))
    save_checkpoint(assembly, run, 7, data_fingerprint="0", versions={"olmo-trainer": "0"})


def test_wrong_words_are_answered_before_any_work(olmoe, tmp_path, capsys):
    there, run = tmp_path / "there", tmp_path / "run"
    shutil.copytree(olmoe, there)

    def refused(*words: str) -> str:
        capsys.readouterr()
        assert main(list(words)) == 2
        return capsys.readouterr().err

    assert "config.json: cannot be read" in refused("import", str(tmp_path), str(run))
    expert = "layout.expert (8) must divide model.moe.num_experts (5)"
    assert expert in refused("import", str(there), str(run))
    setting = ("--set", "model.attention.rope_theta=5")
    stated = refused("import", str(there), str(run), "nano", *setting)
    assert "model.attention.rope_theta: the model is what config.json states" in stated
    assert not run.exists()
    coefficient = ("--set", "model.moe.balance_loss=0.25")
    assert main(["import", str(there), str(run), "nano", *coefficient]) == 0
    assert read_manifest(find_checkpoint(run)).config.model.moe.balance_loss == 0.25
    assert "exists already" in refused("import", str(there), str(run), "nano")
    assert "exists already" in refused("export", str(run), str(there))
    export = ("export", str(run), str(tmp_path / "out"))
    assert "must be a token, in [0, 61), got 61" in refused(*export, "--end", "61")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "model.norm.weight of them are missing"),
        ("extra", "has no place for model.layers.0.mlp.gate.bias"),
        ("expert missing", "model.layers.1.mlp.experts"),
        ("another shape", "layers.0.attention_in_norm.weight must have shape (48,)"),
        ("integers", "must be of a floating dtype, got torch.int8"),
        ("file missing", "no such file"),
        ("file cut", "damaged"),
    ],
)
def test_a_faulty_checkpoint_is_named_and_nothing_is_left(olmoe, tmp_path, capsys, fault, message):
    there = tmp_path / "there"
    shutil.copytree(olmoe, there)
    tensors = dict(TensorFolder(there))
    match fault:
        case "missing":
            del tensors["model.norm.weight"]
        case "extra":
            tensors["model.layers.0.mlp.gate.bias"] = torch.zeros(5)
        case "expert missing":
            del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
        case "another shape":
            tensors["model.layers.0.input_layernorm.weight"] = torch.ones(47)
        case "integers":
            tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    (there / "model.safetensors").unlink()
    if fault != "file missing":
        write_tensors(there, tensors.items())
    if fault == "file cut":
        content = (there / "model.safetensors").read_bytes()
        (there / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert main(["import", str(there), str(tmp_path / "run"), "nano"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_place_that_takes_no_file_is_named(tmp_path, capsys):
    _save_run(tmp_path / "run")
    (tmp_path / "file").touch()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "file" / "export")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert str(tmp_path / "file") in error
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "export")]) == 0
    capsys.readouterr()
    assert main(["import", str(tmp_path / "export"), str(tmp_path / "file" / "run"), "nano"]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_without_safetensors_the_extra_is_named(tmp_path, monkeypatch, capsys):
    _save_run(tmp_path / "run")
    for name in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "export")]) == 2
    assert "--package olmo-trainer --extra hugging-face" in capsys.readouterr().err
    assert not (tmp_path / "export").exists()
