"""Import and export beside `transformers` itself, on small random models."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_ep_comm import create_dispatcher
from olmo_trainer.build import assemble, build_part
from olmo_trainer.checkpoint import state_of, write_checkpoint
from olmo_trainer.checkpoint_manifest import checkpoint_path, find_checkpoint, read_manifest
from olmo_trainer.cli import main
from olmo_trainer.config import ModelConfig
from olmo_trainer.hugging_face import weights
from olmo_trainer.hugging_face.architecture import family_of, from_hugging_face
from olmo_trainer.hugging_face.tensor_files import TensorFolder
from olmo_trainer.loop import train
from olmo_trainer.mesh import create_mesh
from olmo_trainer.model.initialize import initialize
from olmo_trainer.model.transformer import Transformer
from olmo_trainer.open_data import open_data
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import nano
from olmo_trainer.sample import load_model
from rich.console import Console

VOCABULARY = 61
# What every small model of `transformers` here shares; no dimension equals another by chance.
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # of the size of one over the root of a width: nothing is linear
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("Olmoe", {"intermediate_size": 24}),
    "olmoe, sum one, all heads": (
        "Olmoe",
        {"intermediate_size": 24, "norm_topk_prob": True, "num_key_value_heads": 4},
    ),
    "qwen3": (
        "Qwen3Moe",
        {"intermediate_size": 40, "moe_intermediate_size": 24, "head_dim": 16},
    ),
    "qwen3, dense first, sliding, sum one": (
        "Qwen3Moe",
        {
            "intermediate_size": 40,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
}


@pytest.fixture
def transformers(monkeypatch, tmp_path_factory):
    """The library, which keeps remote code in a folder of this test."""
    modules = import_module("transformers.dynamic_module_utils")
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
    return import_module("transformers")


def _theirs(transformers, name: str, **changes: Any):
    """Return a random model of `transformers`, norms included, in the mode of training."""
    family, own = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **own, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
    return model


def _ours(model: ModelConfig, *, seed: int = 0) -> Transformer:
    """Return a random model of this trainer, norms and selection biases included."""
    config = nano().model_copy(update={"model": model})
    part = build_part(
        config,
        range(model.num_layers),
        create_dispatcher("local", num_experts=model.moe.num_experts),
        num_expert_ranks=1,
    )
    initialize(part, seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for key, parameter in part.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
        for bias in part.selection_biases.values():
            bias.bias_E.uniform_(-0.1, 0.1)
    return part


def _tokens(*shape: int, below: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(1))


def _our_logits(part: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    return part(tokens, torch.ones_like(tokens, dtype=torch.bool))[0]


def _close(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Equal but for rounding in float32, relative to the greatest element."""
    assert ours.shape == theirs.shape, what
    ours, theirs = ours.detach(), theirs.detach()
    assert theirs.abs().max() > 0, what
    distance = float((ours - theirs).abs().max() / theirs.abs().max())
    assert distance < 2e-5, (what, distance)


def _assert_same_gradients(part: Transformer, model: ModelConfig, theirs, family) -> None:
    """Every parameter's gradient, by the names of `transformers`."""
    gradients = {
        key: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for key, parameter in part.named_parameters()
    }
    biases = {key: value for key, value in part.state_dict().items() if "selection_bias" in key}
    named = dict(weights.to_hugging_face(gradients | biases, model, family))
    found = dict(_stacked(named, model))
    for key, parameter in theirs.named_parameters():
        assert parameter.grad is not None, key
        _close(found.pop(key), parameter.grad, key)
    assert all(key.endswith("_bias") for key in found)


def _stacked(named: dict[str, torch.Tensor], model: ModelConfig):
    """Stack experts as the modules of `transformers` hold them."""
    for layer in model.moe_layers:
        prefix = f"model.layers.{layer}.mlp.experts"
        if f"{prefix}.gate_up_proj" in named:
            continue
        experts = range(model.moe.num_experts)
        gate, up, down = (
            torch.stack([named.pop(f"{prefix}.{e}.{word}_proj.weight") for e in experts])
            for word in ("gate", "up", "down")
        )
        named |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
    return named.items()


@pytest.mark.parametrize("name", MODELS)
def test_imported_logits_and_gradients_are_those_of_transformers(transformers, tmp_path, name):
    theirs = _theirs(transformers, name)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    model = from_hugging_face(json.loads((tmp_path / "config.json").read_text()))
    assert family_of(model) == theirs.config.model_type
    tensors = TensorFolder(tmp_path)
    assert len(set(tensors._files.values())) > 1, "several files"
    part = _ours(model)
    missing = part.load_state_dict(dict(weights.from_hugging_face(tensors, model)))
    assert not missing.missing_keys
    tokens = _tokens(2, 17)
    logits, expected = _our_logits(part, tokens), theirs(tokens).logits
    _close(logits, expected, "logits")
    slopes = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * slopes).sum().backward()
    (expected * slopes).sum().backward()
    _assert_same_gradients(part, model, theirs, family_of(model))


OWN = {
    "the report's": (),
    "sigmoid, no shared expert, all dense first": (
        "model.moe.gate=sigmoid",
        "model.moe.shared_hidden=0",
        "model.num_dense_layers=3",
    ),
    "sliding, no bias, q/k norm of all heads": (
        "model.attention.window=5",
        "model.attention.full_every=2",
        "model.attention.qk_norm=projection",
        "model.moe.bias_rate=0",
    ),
    "pre-norm, weights that sum to one": (
        "model.norms=pre",
        "model.moe.route_weights=sum_one",
        "model.num_dense_layers=0",
    ),
    "olmoe": (
        "model.norms=pre",
        "model.attention.qk_norm=projection",
        "model.moe.route_weights=scores",
        "model.moe.shared_hidden=0",
        "model.moe.bias_rate=0",
        "model.num_dense_layers=0",
    ),
    "qwen3": (
        "model.norms=pre",
        "model.attention.window=6",
        "model.moe.route_weights=sum_one",
        "model.moe.shared_hidden=0",
        "model.moe.bias_rate=0",
    ),
}
FAMILIES = {"olmoe": "olmoe", "qwen3": "qwen3_moe"}


def _save_run(run: Path, settings: tuple[str, ...]) -> Transformer:
    """Write a checkpoint of a random model as a run would; return the model."""
    config = apply_overrides(nano(), settings).for_world(1)
    mesh = create_mesh(config.layout, torch.device("cpu"))
    assembly = assemble(config, mesh)
    part = _ours(config.model, seed=3)
    state = state_of(assembly)
    for key, parameter in part.named_parameters():
        state[f"main.{key}"].local.copy_(parameter.detach().flatten())
    for layer, bias in part.selection_biases.items():
        state[f"selection_bias.{layer}"].local.copy_(bias.bias_E)
    versions = {"olmo-trainer": "0"}
    write_checkpoint(
        state,
        config,
        mesh,
        checkpoint_path(run, 7),
        step=7,
        data_fingerprint="0",
        versions=versions,
    )
    return part


@pytest.mark.parametrize("name", OWN)
def test_an_export_is_the_model_in_transformers(transformers, tmp_path, capsys, name):
    """Logits, gradients, the words of the command, greedy generation, and the way back."""
    part = _save_run(tmp_path / "run", OWN[name])
    folder, family = tmp_path / "export", FAMILIES.get(name, "olmo_trainer")
    assert main(["export", str(tmp_path / "run"), str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"{family}: AutoModelForCausalLM")
    remote = {"trust_remote_code": True} if family == "olmo_trainer" else {}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **remote)
    assert type(theirs).__module__.startswith("transformers" if not remote else "transformers_mod")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **remote)
    assert tokenizer("def ")["input_ids"] == list(b"def ")
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id == 256
    tokens = _tokens(2, 19, below=257)
    logits, expected = _our_logits(part, tokens), theirs(tokens).logits
    _close(logits, expected, "logits")
    slopes = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * slopes).sum().backward()
    (expected * slopes).sum().backward()
    model = read_manifest(find_checkpoint(tmp_path / "run")).config.model
    _assert_same_gradients(part, model, theirs, family)
    _assert_generates(part, theirs)
    _assert_way_back(tmp_path, part, model)


def _assert_generates(part: Transformer, theirs) -> None:
    """The cache of `transformers` and padding on the left change no token."""
    prompts, steps = _tokens(2, 9, below=256), 8
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    made = theirs.eval().generate(prompts, max_new_tokens=steps, do_sample=False)
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.int64), prompts), 1)
    real = torch.cat((torch.zeros(2, 3), torch.ones(2, 9)), 1).long()
    shifted = theirs.generate(padded, attention_mask=real, max_new_tokens=steps, do_sample=False)
    tokens = prompts
    for _ in range(steps):
        tokens = torch.cat((tokens, _our_logits(part, tokens)[:, -1:].argmax(-1)), 1)
    assert torch.equal(made, tokens)
    assert torch.equal(shifted[:, 3:], tokens)


def _assert_way_back(folder: Path, part: Transformer, model: ModelConfig) -> None:
    """An import of an export holds every bit of the weights and biases, and can be resumed."""
    back = folder / "back"
    settings = ["--set", "layout.expert=1"]
    assert main(["import", str(folder / "export"), str(back), "nano", *settings]) == 0
    manifest = read_manifest(find_checkpoint(back))
    same = {"dense_hidden": manifest.config.model.dense_hidden}  # OLMoE has no word for it
    assert manifest.step == 0
    assert manifest.config.model == model.model_copy(update={} if model.num_dense_layers else same)
    again = load_model(manifest).state_dict()
    for key, value in part.state_dict().items():
        assert torch.equal(again[key], value), key


def test_an_imported_run_trains_from_the_weights_it_was_given(transformers, tmp_path, make_config):
    """Nothing is drawn anew: its first loss is that of `transformers`, and it goes down."""
    theirs = _theirs(transformers, "olmoe", vocab_size=257)
    theirs.save_pretrained(tmp_path / "there")
    run = tmp_path / "imported"
    assert main(["import", str(tmp_path / "there"), str(run), "nano"]) == 0
    manifest = read_manifest(find_checkpoint(run))
    base = make_config("batch.sequences=4", "steps=3", "run.log_every=1", "run.heldout_every=1")
    config = base.model_copy(
        update={
            "model": manifest.config.model,
            "run": base.run.model_copy(update={"folder": None}),
        }
    )
    outcome = train(config, resume=manifest, console=Console(quiet=True))
    assert outcome is not None
    assert outcome.checkpoint.parent.parent == run
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "heldout"]
    data = open_data(config)
    (batch,) = data.heldout_batches(128, num_replicas=1, replica=0, limit_sequences=16)
    with torch.no_grad():
        logits = theirs(batch.tokens_BS).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch.targets_BS.flatten())
    assert losses[0] == pytest.approx(float(expected), rel=1e-5)
    assert losses[-1] < losses[0]


_ROUTER = "layers.1.feed_forward.router.weight_ED"


def test_bfloat16_exports_round_the_weights_and_keep_the_bias(transformers, tmp_path):
    part = _save_run(tmp_path / "run", ())
    arguments = [str(tmp_path / "run"), str(tmp_path / "export"), "--dtype", "bfloat16"]
    assert main(["export", *arguments, "--end", "9"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", trust_remote_code=True
    )
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == 9
    gate = model.model.layers[1].mlp.gate
    assert torch.equal(gate.weight, part.state_dict()[_ROUTER].bfloat16())
    bias = part.selection_biases[1].bias_E
    assert torch.equal(gate.e_score_correction_bias, bias)
    assert gate.e_score_correction_bias.dtype == torch.float32
