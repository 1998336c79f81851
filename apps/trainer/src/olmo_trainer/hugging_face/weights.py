"""The tensors of a model by their names here and in `transformers`, both ways.

Most have the same shape and another name. Gate and up projections are one matrix here and two there
(gate first); the experts of a layer are two stacks here, and there one tensor an expert and a
projection, or in the own family the same two stacks.

Names of peri-norm blocks are those of Gemma 2 in `transformers`; of the others, OLMoE's.
"""

from collections.abc import Iterator, Mapping

import torch
from olmo_experts_gemm import experts_from_hugging_face, experts_to_hugging_face
from torch import Tensor

from olmo_trainer.config import ModelConfig
from olmo_trainer.hugging_face.architecture import Family

NamedTensors = Iterator[tuple[str, Tensor]]

_ENDS = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_ATTENTION = {
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
}
_NORMS = {
    "pre": {
        "attention_in_norm.weight": "input_layernorm.weight",
        "feed_forward_in_norm.weight": "post_attention_layernorm.weight",
    },
    "peri": {
        "attention_in_norm.weight": "input_layernorm.weight",
        "attention_out_norm.weight": "post_attention_layernorm.weight",
        "feed_forward_in_norm.weight": "pre_feedforward_layernorm.weight",
        "feed_forward_out_norm.weight": "post_feedforward_layernorm.weight",
    },
}
_ROUTER = ("feed_forward.router.weight_ED", "mlp.gate.weight")
_BIAS = ("feed_forward.router.selection_bias.bias_E", "mlp.gate.e_score_correction_bias")
_STACKS = ("feed_forward.experts.w_gate_up_E2HD", "feed_forward.experts.w_down_EDH")
# What older releases of `transformers` wrote beside the weights; computed from the configuration.
_DERIVED = "rotary_emb.inv_freq"


def to_hugging_face(
    weights: Mapping[str, Tensor], model: ModelConfig, family: Family
) -> NamedTensors:
    """Return the tensors of `transformers`, in the order of the layers, as views of `weights`.

    Args:
        weights: The state dict of a whole model.
        model: Its configuration.
        family: As `family_of` says.
    """
    same = _same_shape(model)
    yield from ((theirs, weights[ours]) for ours, theirs in same.items())
    for ours, theirs in _gated(model).items():
        gate, up = weights[f"{ours}.gate_up.weight"].chunk(2)
        yield f"{theirs}.gate_proj.weight", gate
        yield f"{theirs}.up_proj.weight", up
        yield f"{theirs}.down_proj.weight", weights[f"{ours}.down.weight"]
    for layer in model.moe_layers:
        gate_up, down = (weights[f"layers.{layer}.{name}"] for name in _STACKS)
        stacked = family == "olmo_trainer"
        # Both families of `transformers` name experts alike; the own one has them stacked.
        yield from experts_to_hugging_face(
            gate_up, down, _experts(layer), family="olmoe", stacked=stacked
        ).items()


def from_hugging_face(tensors: Mapping[str, Tensor], model: ModelConfig) -> NamedTensors:
    """Return the tensors of this trainer's model, each made when it is asked for.

    Args:
        tensors: Those of a checkpoint of `transformers`, of any family; may load when asked.
        model: As `architecture.from_hugging_face` says.

    Raises:
        ValueError: A tensor is missing, one is left over, or experts are not whole.
    """
    same, gated = _same_shape(model), _gated(model)
    _check_names(tensors, model, same, gated)
    yield from ((ours, tensors[theirs]) for ours, theirs in same.items())
    for ours, theirs in gated.items():
        halves = [tensors[f"{theirs}.{name}_proj.weight"] for name in ("gate", "up")]
        yield f"{ours}.gate_up.weight", torch.cat(halves)
        yield f"{ours}.down.weight", tensors[f"{theirs}.down_proj.weight"]
    for layer in model.moe_layers:
        try:
            stacks = experts_from_hugging_face(
                tensors, _experts(layer), num_experts=model.moe.num_experts
            )
        except TypeError as error:  # of a file, not of an argument
            raise ValueError(str(error)) from None
        yield from zip((f"layers.{layer}.{name}" for name in _STACKS), stacks, strict=True)


def _same_shape(model: ModelConfig) -> dict[str, str]:
    names = dict(_ENDS)
    for layer in range(model.num_layers):
        inside = _ATTENTION | _NORMS[model.norms]
        if layer in model.moe_layers:
            inside |= dict([_ROUTER, _BIAS] if model.moe.bias_rate else [_ROUTER])
        names |= {
            f"layers.{layer}.{ours}": f"model.layers.{layer}.{theirs}"
            for ours, theirs in inside.items()
        }
    return names


def _gated(model: ModelConfig) -> dict[str, str]:
    """Return the SwiGLU layers of every token: dense layers, and shared experts."""
    names = {}
    for layer in range(model.num_layers):
        if layer not in model.moe_layers:
            names[f"layers.{layer}.feed_forward"] = f"model.layers.{layer}.mlp"
        elif model.moe.shared_hidden:
            names[f"layers.{layer}.feed_forward.shared"] = f"model.layers.{layer}.mlp.shared_expert"
    return names


def _experts(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts"


def _check_names(
    tensors: Mapping[str, Tensor],
    model: ModelConfig,
    same: Mapping[str, str],
    gated: Mapping[str, str],
) -> None:
    """All but the experts is there and nothing else; experts are checked as they are read."""
    wanted = set(same.values())
    for theirs in gated.values():
        wanted |= {f"{theirs}.{name}_proj.weight" for name in ("gate", "up", "down")}
    experts = tuple(f"{_experts(layer)}." for layer in model.moe_layers)
    found = {
        name for name in tensors if not name.startswith(experts) and not name.endswith(_DERIVED)
    }
    rule = "the tensors must be those that config.json states"
    if missing := wanted - found:
        raise ValueError(f"{rule}, but {_some(missing)} of them are missing")
    if extra := found - wanted:
        raise ValueError(f"{rule}, but it has no place for {_some(extra)}")


def _some(names: set[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
