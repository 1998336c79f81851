"""A model's `config.json`: written and read alike; what it asks for and is not here is named."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_trainer.cli import main
from olmo_trainer.hugging_face.architecture import family_of, from_hugging_face, to_hugging_face
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import RECIPES, nano
from olmo_trainer.sizes import count_parameters

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
    fields = {**SMALL, "model_type": "olmoe", "rms_norm_eps": 1e-5}
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


def test_olmoe_1b_7b_is_the_published_model():
    """Against the published config.json of OLMoE-1B-7B-0924, and its size: 6.92B, 1.28B active."""
    recipe = RECIPES["olmoe-1b-7b"]()
    fields = to_hugging_face(
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
