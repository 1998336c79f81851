"""Import and export beside `transformers` itself, on small random models."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_ep_comm import create_dispatcher
from olmo_trainer.build import assemble, build_part
from olmo_trainer.checkpoint import state_of, write_checkpoint
from olmo_trainer.checkpoint_manifest import checkpoint_path, find_checkpoint, read_manifest
from olmo_trainer.cli import main
from olmo_trainer.config import ModelConfig
from olmo_trainer.hugging_face import architecture, weights
from olmo_trainer.hugging_face.architecture import family_of, from_hugging_face, to_hugging_face
from olmo_trainer.hugging_face.tensor_files import TensorFolder, write_tensors
from olmo_trainer.loop import train
from olmo_trainer.mesh import create_mesh
from olmo_trainer.model.initialize import initialize
from olmo_trainer.model.transformer import Transformer
from olmo_trainer.open_data import open_data
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import RECIPES, nano
from olmo_trainer.sample import load_model
from olmo_trainer.sizes import count_parameters
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


_ROUTER = "layers.1.feed_forward.router.weight_ED"


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_configuration_comes_back_from_config_json(data):
    """Any model, written and read, is the same but for the coefficients of its losses."""
    draw = data.draw
    heads = draw(st.sampled_from([1, 2, 4]))
    window = draw(st.sampled_from([0, 5]))
    chosen = {
        "model.norms": draw(st.sampled_from(["peri", "pre"])),
        "model.num_dense_layers": draw(st.integers(0, 4)),
        "model.norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "model.attention.num_heads": heads,
        "model.attention.num_kv_heads": draw(st.sampled_from([1, heads])),
        "model.attention.head_dim": draw(st.sampled_from([8, 16, 32])),
        "model.attention.qk_norm": draw(st.sampled_from(["head", "projection"])),
        "model.attention.rope_theta": draw(st.sampled_from([1e4, 5e5])),
        "model.attention.window": window,
        "model.attention.full_every": draw(st.sampled_from([0, 3])) if window else 0,
        "model.moe.gate": draw(st.sampled_from(["softmax", "sigmoid"])),
        "model.moe.route_weights": draw(st.sampled_from(["mean_one", "sum_one", "scores"])),
        "model.moe.shared_hidden": draw(st.sampled_from([0, 16])),
        "model.moe.bias_rate": draw(st.sampled_from([0.0, 1e-3])),
    }
    model = apply_overrides(nano(), [f"{key}={value}" for key, value in chosen.items()]).model
    fields = to_hugging_face(model, num_positions=64, end_of_document=None, dtype="float32")
    back = from_hugging_face(json.loads(json.dumps(fields)))
    same = {"num_dense_layers": min(model.num_dense_layers, model.num_layers)}
    if family_of(model) == "olmoe":
        same["dense_hidden"] = back.dense_hidden  # it has no dense layer, and no word for one
    assert back == model.model_copy(update=same)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type must be one of 'olmoe', 'qwen3_moe'"),
        ({"clip_qkv": 8.0}, "clip_qkv must be None for this trainer, got 8.0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type must be 'default'"),
        ({"num_attention_heads": 5}, "num_attention_heads (5) must divide hidden_size (48)"),
        ({"head_dim": 16}, "head_dim must be hidden_size / num_attention_heads (12)"),
        ({"num_experts_per_tok": 9}, "top_k (9) must be at most num_experts (5)"),
        ({"rms_norm_eps": None}, "norm_eps: Input should be a valid number"),
        ({"intermediate_size": ...}, "intermediate_size: required for olmoe, not given"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 8, "mlp_only_layers": [1]}, "first"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step must be 1"),
    ],
)
def test_what_the_trainer_does_not_compute_is_named(changes, message, tmp_path, capsys):
    fields = {**SMALL, "model_type": "olmoe", "intermediate_size": 24, "rms_norm_eps": 1e-5}
    fields |= {"rope_theta": 1e4, "norm_topk_prob": False, **changes}
    fields = {key: value for key, value in fields.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert main(["import", str(tmp_path), str(tmp_path / "run"), "nano"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_config_of_another_model_is_refused_without_torch(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    code = (
        "import sys; from olmo_trainer.cli import main\n"
        f"assert main(['import', {str(tmp_path)!r}, {str(tmp_path / 'run')!r}]) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "config.json: model_type must be one of" in done.stderr


def test_wrong_words_are_answered_before_any_work(transformers, tmp_path, capsys):
    there, run = tmp_path / "there", tmp_path / "run"
    _theirs(transformers, "olmoe").save_pretrained(there)

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
def test_a_faulty_checkpoint_is_named_and_nothing_is_left(
    transformers, tmp_path, capsys, fault, message
):
    there = tmp_path / "there"
    _theirs(transformers, "olmoe").save_pretrained(there)
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
    _save_run(tmp_path / "run", ())
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
    _save_run(tmp_path / "run", ())
    for name in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "export")]) == 2
    assert "--package olmo-trainer --extra hugging-face" in capsys.readouterr().err
    assert not (tmp_path / "export").exists()


def test_olmoe_1b_7b_is_the_published_model():
    """Against the published config.json of OLMoE-1B-7B-0924, and its size: 6.92B, 1.28B active."""
    recipe = RECIPES["olmoe-1b-7b"]()
    fields = architecture.to_hugging_face(
        recipe.model, num_positions=4096, end_of_document=50_279, dtype="bfloat16"
    )
    published = {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "clip_qkv": None,
        "eos_token_id": 50_279,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10_000.0,
        "vocab_size": 50_304,
    }
    assert {key: fields[key] for key in published} == published
    counts = count_parameters(recipe.model)
    assert counts.total == 6_919_161_856
    assert round(counts.active / 1e9, 2) == 1.28
