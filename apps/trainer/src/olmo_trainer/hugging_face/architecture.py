"""A model's configuration as `config.json` of `transformers` states it, both ways. No torch.

Three families: `olmoe` and `qwen3_moe` are modules of `transformers`; `olmo_trainer` is every other
model of this trainer, the report's among them, and brings its own module.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError

from olmo_trainer.config import AttentionConfig, ModelConfig, MoEConfig

Family = Literal["olmoe", "qwen3_moe", "olmo_trainer"]
MODULE = "modeling_olmo_trainer"  # of the family's own module, beside its config.json

_CLASSES: dict[Family, str] = {
    "olmoe": "OlmoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmo_trainer": "OlmoTrainerForCausalLM",
}
_SUMS: dict[bool, Literal["sum_one", "scores"]] = {True: "sum_one", False: "scores"}


class ArchitectureError(ValueError):
    """A `config.json` of a model that this trainer cannot compute."""


def family_of(model: ModelConfig) -> Family:
    """Return the family in which `transformers` computes what `model` computes."""
    moe, attention = model.moe, model.attention
    plain = (
        model.norms == "pre"
        and not moe.shared_hidden
        and not moe.bias_rate
        and moe.gate == "softmax"
        and moe.route_weights != "mean_one"
        and not attention.full_every
    )
    if not plain:
        return "olmo_trainer"
    if attention.qk_norm == "head":
        return "qwen3_moe"
    is_square = attention.num_heads * attention.head_dim == model.d_model
    if is_square and not attention.window and not model.num_dense_layers:
        return "olmoe"
    return "olmo_trainer"


def to_hugging_face(
    model: ModelConfig, *, num_positions: int, end_of_document: int | None, dtype: str
) -> dict[str, Any]:
    """Return the contents of `config.json`.

    Args:
        model: The model.
        num_positions: Of the sequences that it was trained on.
        end_of_document: The token that ends a text; `None` = not known.
        dtype: Of the exported weights, as torch names it: "float32" or "bfloat16".
    """
    family, attention, moe = family_of(model), model.attention, model.moe
    shared = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": num_positions,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "tie_word_embeddings": False,
        # Absent, `transformers` would take ids of its own, and train no embedding for one of them.
        "bos_token_id": None,
        "eos_token_id": end_of_document,
        "pad_token_id": None,
    }
    rope = {"rope_theta": attention.rope_theta}
    if family == "olmo_trainer":
        return shared | rope | _own_fields(model)
    shared |= rope | {
        "rope_parameters": {"rope_type": "default", **rope},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "norm_topk_prob": moe.route_weights == "sum_one",
    }
    if family == "olmoe":
        return shared | {"intermediate_size": moe.expert_hidden, "clip_qkv": None}
    return shared | {
        "head_dim": attention.head_dim,
        "intermediate_size": model.dense_hidden,
        "moe_intermediate_size": moe.expert_hidden,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(model.moe_layers.start)),
        "use_sliding_window": bool(attention.window),
        "sliding_window": attention.window or None,
    }


def from_hugging_face(fields: Mapping[str, Any]) -> ModelConfig:
    """Return the model that a `config.json` states; its loss coefficients are the defaults.

    Raises:
        ArchitectureError: The family is none of the three, a field is missing, or a field asks for
            what this trainer does not compute.
    """
    family = fields.get("model_type")
    try:
        if family == "olmo_trainer":
            return _own_model(fields)
        if family not in ("olmoe", "qwen3_moe"):
            raise ArchitectureError(
                f"model_type must be one of {', '.join(map(repr, _CLASSES))}, got {family!r}"
            )
        _require_plain(fields)
        return _olmoe(fields) if family == "olmoe" else _qwen3_moe(fields)
    except KeyError as error:
        raise ArchitectureError(f"{error.args[0]}: required for {family}, not given") from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        raise ArchitectureError(f"{key or 'model'}: {message}") from None


def _require_plain(fields: Mapping[str, Any]) -> None:
    """Refuse what changes the numbers and has no place in this trainer's model."""
    rope = _rope(fields)
    wanted = {
        "hidden_act": (fields.get("hidden_act", "silu"), "silu"),
        "attention_bias": (fields.get("attention_bias", False), False),
        "attention_dropout": (fields.get("attention_dropout", 0), 0),
        "clip_qkv": (fields.get("clip_qkv"), None),
        "tie_word_embeddings": (fields.get("tie_word_embeddings", False), False),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "decoder_sparse_step": (fields.get("decoder_sparse_step", 1), 1),
    }
    for key, (given, supported) in wanted.items():
        if given != supported:
            raise ArchitectureError(
                f"{key} must be {supported!r} for this trainer, got {given!r}; it computes no other"
            )


def _rope(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    # Version 5 writes `rope_parameters`; version 4 `rope_theta`, and `rope_scaling` if scaled.
    return fields.get("rope_parameters") or fields.get("rope_scaling") or {}


def _rope_theta(fields: Mapping[str, Any]) -> float:
    theta = _rope(fields).get("rope_theta")
    return fields["rope_theta"] if theta is None else theta


def _num_experts(fields: Mapping[str, Any]) -> int:
    # `transformers` knows it by two names and writes one of them.
    experts = fields.get("num_local_experts")
    return fields["num_experts"] if experts is None else experts


def _olmoe(fields: Mapping[str, Any]) -> ModelConfig:
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    if width % heads:
        raise ArchitectureError(
            f"num_attention_heads ({heads}) must divide hidden_size ({width}) for olmoe"
        )
    if fields.get("head_dim") not in (None, width // heads):
        raise ArchitectureError(
            f"head_dim must be hidden_size / num_attention_heads ({width // heads}) for olmoe, got "
            f"{fields['head_dim']}"
        )
    kv_heads = fields.get("num_key_value_heads")
    return ModelConfig(
        vocab_size=fields["vocab_size"],
        d_model=width,
        num_layers=fields["num_hidden_layers"],
        num_dense_layers=0,
        norms="pre",
        norm_eps=fields["rms_norm_eps"],
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=width // heads,
            rope_theta=_rope_theta(fields),
            qk_norm="projection",
        ),
        moe=_plain_moe(fields, fields["intermediate_size"]),
    )


def _qwen3_moe(fields: Mapping[str, Any]) -> ModelConfig:
    dense = sorted(fields.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise ArchitectureError(
            f"mlp_only_layers must be the first layers for this trainer, got {dense}; it has dense "
            "layers before the routed ones alone"
        )
    return ModelConfig(
        vocab_size=fields["vocab_size"],
        d_model=fields["hidden_size"],
        num_layers=fields["num_hidden_layers"],
        num_dense_layers=len(dense),
        dense_hidden=fields["intermediate_size"],
        norms="pre",
        norm_eps=fields["rms_norm_eps"],
        attention=AttentionConfig(
            num_heads=fields["num_attention_heads"],
            num_kv_heads=fields["num_key_value_heads"],
            head_dim=fields.get("head_dim")
            or fields["hidden_size"] // fields["num_attention_heads"],
            rope_theta=_rope_theta(fields),
            window=(fields.get("sliding_window") or 0) if fields.get("use_sliding_window") else 0,
        ),
        moe=_plain_moe(fields, fields["moe_intermediate_size"]),
    )


def _plain_moe(fields: Mapping[str, Any], expert_hidden: int) -> MoEConfig:
    return MoEConfig(
        num_experts=_num_experts(fields),
        top_k=fields["num_experts_per_tok"],
        expert_hidden=expert_hidden,
        shared_hidden=0,
        route_weights=_SUMS[bool(fields["norm_topk_prob"])],
        bias_rate=0.0,
    )


def _own_fields(model: ModelConfig) -> dict[str, Any]:
    attention, moe = model.attention, model.moe
    return {
        "auto_map": {
            "AutoConfig": f"{MODULE}.OlmoTrainerConfig",
            "AutoModelForCausalLM": f"{MODULE}.OlmoTrainerForCausalLM",
        },
        "head_dim": attention.head_dim,
        "qk_norm": attention.qk_norm,
        "window": attention.window,
        "full_every": attention.full_every,
        "norms": model.norms,
        "num_dense_layers": model.moe_layers.start,
        "dense_intermediate_size": model.dense_hidden,
        "moe_intermediate_size": moe.expert_hidden,
        "shared_intermediate_size": moe.shared_hidden,
        "gate": moe.gate,
        "route_weights": moe.route_weights,
        "has_selection_bias": bool(moe.bias_rate),
    }


def _own_model(fields: Mapping[str, Any]) -> ModelConfig:
    moe = MoEConfig(
        num_experts=fields["num_experts"],
        top_k=fields["num_experts_per_tok"],
        expert_hidden=fields["moe_intermediate_size"],
        shared_hidden=fields["shared_intermediate_size"],
        gate=fields["gate"],
        route_weights=fields["route_weights"],
    )
    if not fields["has_selection_bias"]:
        moe = moe.model_copy(update={"bias_rate": 0.0})
    return ModelConfig(
        vocab_size=fields["vocab_size"],
        d_model=fields["hidden_size"],
        num_layers=fields["num_hidden_layers"],
        num_dense_layers=fields["num_dense_layers"],
        dense_hidden=fields["dense_intermediate_size"],
        norms=fields["norms"],
        norm_eps=fields["rms_norm_eps"],
        attention=AttentionConfig(
            num_heads=fields["num_attention_heads"],
            num_kv_heads=fields["num_key_value_heads"],
            head_dim=fields["head_dim"],
            rope_theta=fields["rope_theta"],
            qk_norm=fields["qk_norm"],
            window=fields["window"],
            full_every=fields["full_every"],
        ),
        moe=moe,
    )
