"""Expert weights from and to Hugging Face, and the forward that `transformers` can call.

OLMoE, Qwen3-MoE and Mixtral hold SwiGLU experts without biases. Under the prefix of a layer's
experts their tensors have one of two layouts:

                  gate (H, D)            up (H, D)             down (D, H)
    per expert    {e}.gate_proj.weight   {e}.up_proj.weight    {e}.down_proj.weight
    (Mixtral)     {e}.w1.weight          {e}.w3.weight         {e}.w2.weight
    stacked       gate_up_proj (E, 2H, D), gate rows first     down_proj (E, D, H)

Checkpoints on disk are per expert, and so are the modules of `transformers` 4. The modules of
`transformers` 5 are stacked, in the very layout of `w_gate_up_E2HD` and `w_down_EDH`. The prefix is
`model.layers.{i}.mlp.experts`; for Mixtral on disk, and in `transformers` 4, it is
`model.layers.{i}.block_sparse_moe.experts`.

The converters take and return plain mappings of tensors, and nothing here imports `transformers`.

Shapes: T tokens, K experts a token, E experts, D model width, H expert hidden width.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

from torch import Tensor, nn

from ._checks import check_device, name_of
from ._grouped_mm import Impl
from ._moe import moe_mlp

Family = Literal["olmoe", "qwen3_moe", "mixtral"]

# Gate, up, down.
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_PER_EXPERT: dict[Family, tuple[str, str, str]] = {
    "olmoe": _PROJECTIONS,
    "qwen3_moe": _PROJECTIONS,
    "mixtral": ("w1", "w3", "w2"),
}
_STACKED = ("gate_up_proj", "down_proj")
_KEY_OF_EXPERTS = re.compile(
    r"(?:(.*)\.)?(?:\d+\.(?:gate_proj|up_proj|down_proj|w[123])\.weight|gate_up_proj|down_proj)"
)


def experts_from_hugging_face(
    state_dict: Mapping[str, Tensor], prefix: str, *, num_experts: int | None = None
) -> tuple[Tensor, Tensor]:
    """Find the experts of one layer, in either layout, and return them as two stacks.

    Args:
        state_dict: Tensors by name: `model.state_dict()`, or what was read from a checkpoint. Only
            tensors under `prefix` are read, so the mapping may load them when asked.
        prefix: The name of the layer's experts, such as `"model.layers.0.mlp.experts"`, without a
            dot at its end; `""` for the state dict of the experts themselves.
        num_experts: E, if known. It is what tells a missing last expert from none: give it when
            a layer may be spread over several files.

    Returns:
        `w_gate_up_E2HD` (E, 2H, D) and `w_down_EDH` (E, D, H), of the dtype and on the device of
        the tensors found, bit for bit, without gradient. Stacks that lie under `prefix` already are
        returned as they are and share their memory; single experts are copied.

    Raises:
        TypeError: The tensors differ in dtype.
        ValueError: There are no experts under `prefix`, one of their tensors is missing or has
            another shape or device than the rest, or there is a tensor that is none of them, such
            as a bias or the scale of a quantised weight.
    """
    start = f"{prefix}." if prefix else ""
    names = {key.removeprefix(start) for key in state_dict if key.startswith(start)}
    layout = _layout(names)
    if layout is None:
        raise ValueError(_no_experts(state_dict, prefix, names))
    if layout is _STACKED:
        _check_names(names, list(_STACKED), prefix)
        w_gate_up_E2HD, w_down_EDH = (state_dict[start + name].detach() for name in _STACKED)
        labels = (f"{start}{_STACKED[0]}", f"{start}{_STACKED[1]}")
        E = _check_stacks(labels, w_gate_up_E2HD, w_down_EDH)
        if num_experts not in (None, E):
            raise ValueError(
                f"`{start}down_proj` must hold `num_experts`={num_experts} experts, got {E}."
            )
        return w_gate_up_E2HD, w_down_EDH
    E = num_experts
    if E is None:
        E = 1 + max(int(name.partition(".")[0]) for name in names if re.match(r"\d+\.", name))
    wanted = [f"{e}.{projection}.weight" for e in range(E) for projection in layout]
    _check_names(names, wanted, prefix)
    return _stack({start + name: state_dict[start + name].detach() for name in wanted})


def experts_to_hugging_face(
    w_gate_up_E2HD: Tensor,
    w_down_EDH: Tensor,
    prefix: str,
    *,
    family: Family,
    stacked: bool = False,
) -> dict[str, Tensor]:
    """Name the experts of one layer as Hugging Face does; the inverse of the other converter.

    Args:
        w_gate_up_E2HD: Gate rows first, then up rows, (E, 2H, D), any dtype.
        w_down_EDH: (E, D, H), of the same dtype and device.
        prefix: The name of the layer's experts, such as `"model.layers.0.mlp.experts"`, or
            `"model.layers.0.block_sparse_moe.experts"` for a Mixtral checkpoint; `""` for none.
        family: `"olmoe"`, `"qwen3_moe"` or `"mixtral"`: whose names the tensors get.
        stacked: `False` gives the per-expert tensors of a checkpoint, and of the modules of
            `transformers` 4; `True` the two stacks of the modules of `transformers` 5.

    Returns:
        Tensors by name, `3 E` of them or 2, expert by expert. They are views of the arguments,
        without gradient: no memory is taken, and a change in place shows on both sides.

    Raises:
        TypeError: The stacks differ in dtype.
        ValueError: `family` is unknown, or the shapes or devices of the stacks do not match.
    """
    if family not in _PER_EXPERT:
        families = ", ".join(map(repr, get_args(Family)))
        raise ValueError(f"`family` must be one of {families}, got {family!r}.")
    E = _check_stacks(("w_gate_up_E2HD", "w_down_EDH"), w_gate_up_E2HD, w_down_EDH)
    w_gate_up_E2HD, w_down_EDH = w_gate_up_E2HD.detach(), w_down_EDH.detach()
    start = f"{prefix}." if prefix else ""
    if stacked:
        return {f"{start}{_STACKED[0]}": w_gate_up_E2HD, f"{start}{_STACKED[1]}": w_down_EDH}
    tensors: dict[str, Tensor] = {}
    for e in range(E):
        weights = (*w_gate_up_E2HD[e].chunk(2), w_down_EDH[e])
        for projection, weight in zip(_PER_EXPERT[family], weights, strict=True):
            tensors[f"{start}{e}.{projection}.weight"] = weight
    return tensors


def hugging_face_experts_forward(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Run the experts of a `transformers` model with `moe_mlp`.

    Register it under a name and choose that name; this takes `transformers` 5.7 or newer:

        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        ALL_EXPERTS_FUNCTIONS.register("olmo", hugging_face_experts_forward)
        model.set_experts_implementation("olmo")

    or, in place of the last line, `from_pretrained(..., experts_implementation="olmo")`. Router,
    parameters and checkpoints stay as they are; `set_experts_implementation("eager")` goes back.
    For another product register `functools.partial(hugging_face_experts_forward, impl="torch")`.

    Args:
        experts: The module, with `gate_up_proj` (E, 2H, D) and `down_proj` (E, D, H): that of
            OLMoE, Qwen3-MoE, Mixtral, and of any other model with the same experts.
        hidden_states: Tokens, (T, D), any float dtype.
        top_k_index: The experts of each token, (T, K) int64 or int32. E is no route: it is what
            `transformers` puts for the experts of other ranks.
        top_k_weights: The weight of each route, (T, K), any float dtype.
        impl: Which grouped product, as for `moe_mlp`.

    Returns:
        (T, D), of the dtype of `hidden_states`. The experts themselves run in the dtype of their
        weights, under autocast too.

    Raises:
        TypeError: As `moe_mlp`.
        ValueError: The experts are not SwiGLU experts in this layout, or as `moe_mlp`.
    """
    reason = _why_not(experts)
    if reason:
        raise ValueError(
            "`hugging_face_experts_forward` needs SwiGLU experts without biases, gate rows before "
            f"up rows, but {type(experts).__name__} {reason}; use another experts implementation "
            "for this model."
        )
    w_gate_up_E2HD, w_down_EDH = experts.gate_up_proj, experts.down_proj
    expert_ids_TK = top_k_index.masked_fill(top_k_index == w_down_EDH.shape[0], -1)
    x_TD = hidden_states.to(w_down_EDH.dtype)
    y_TD = moe_mlp(x_TD, expert_ids_TK, top_k_weights, w_gate_up_E2HD, w_down_EDH, impl=impl)
    return y_TD.to(hidden_states.dtype)


def _why_not(experts: Any) -> str:
    """What keeps `moe_mlp` from computing what this module computes, or nothing."""
    # What the decorator of `transformers` notes on the module; older releases note fewer of them.
    plain = {
        "has_bias": False,
        "is_transposed": False,
        "is_concatenated": True,
        "has_gate": True,
        "has_post_expert_norm": False,
    }
    for trait, wanted in plain.items():
        if getattr(experts, trait, wanted) != wanted:
            return f"has {trait}={not wanted}"
    # A class without a gate of its own is given the one in `transformers.integrations.moe`.
    gate = getattr(type(experts), "_apply_gate", None)
    if gate is not None and gate.__module__ != "transformers.integrations.moe":
        return "has a gate of its own"
    # "swish" is torch's module, "silu" a class of `transformers` that does the same.
    activation = experts.act_fn
    if not isinstance(activation, nn.SiLU) and type(activation).__name__ != "SiLUActivation":
        return f"has the activation {type(activation).__name__}"
    return ""


def _layout(names: Collection[str]) -> tuple[str, ...] | None:
    """The stacks or the three projections of the experts that have these names."""
    if any(name in _STACKED for name in names):
        return _STACKED
    for layout in _PER_EXPERT.values():
        pattern = re.compile(rf"\d+\.(?:{'|'.join(layout)})\.weight")
        if any(pattern.fullmatch(name) for name in names):
            return layout
    return None


def _no_experts(keys: Collection[str], prefix: str, names: Collection[str]) -> str:
    found = {match[1] or "": None for match in map(_KEY_OF_EXPERTS.fullmatch, keys) if match}
    hint = f"experts lie under {_some(found)}" if found else "none of its keys look like experts"
    return (
        "`state_dict` must hold the experts of OLMoE, Qwen3-MoE or Mixtral under "
        f"`prefix`={prefix!r}, got {len(names)} other tensors there; {hint}."
    )


def _check_names(names: Collection[str], wanted: list[str], prefix: str) -> None:
    """Every tensor of the experts is there, and nothing else is."""
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ValueError(
            f"`state_dict` must hold all {len(wanted)} tensors of the experts under {prefix!r}, "
            f"{len(missing)} are missing: {_some(missing)}; merge the files of a checkpoint first."
        )
    extra = sorted(set(names) - set(wanted))
    if extra:
        raise ValueError(
            f"`state_dict` must hold nothing but the {len(wanted)} weights of the experts under "
            f"{prefix!r}, got {len(extra)} more: {_some(extra)}; biases, quantised weights and "
            "experts past `num_experts` have no place in the stacks."
        )


def _some(names: Collection[str]) -> str:
    first = ", ".join(repr(name) for name in list(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"


def _stack(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Copy gate, up and down of each expert, in this order, to where they belong."""
    (label, first), *_ = tensors.items()
    if first.ndim != 2:
        raise ValueError(f"`{label}` must have shape (H, D), got {tuple(first.shape)}.")
    H, D = first.shape
    for i, (name, tensor) in enumerate(tensors.items()):
        _check_alike(name, tensor, label, first)
        shape = (D, H) if i % 3 == 2 else (H, D)
        if tensor.shape != shape:
            raise ValueError(
                f"`{name}` must have shape {shape}, as `{label}` has {(H, D)}, "
                f"got {tuple(tensor.shape)}."
            )
    E = len(tensors) // 3
    w_gate_up_E2HD, w_down_EDH = first.new_empty(E, 2 * H, D), first.new_empty(E, D, H)
    weights = iter(tensors.values())
    for e in range(E):
        for place in (*w_gate_up_E2HD[e].chunk(2), w_down_EDH[e]):
            place.copy_(next(weights))
    return w_gate_up_E2HD, w_down_EDH


def _check_stacks(labels: tuple[str, str], w_gate_up_E2HD: Tensor, w_down_EDH: Tensor) -> int:
    """The two stacks fit one another; return E."""
    gate_up, down = labels
    if w_down_EDH.ndim != 3 or w_down_EDH.shape[0] == 0:
        raise ValueError(
            f"`{down}` must have shape (E, D, H) with at least one expert, "
            f"got {tuple(w_down_EDH.shape)}."
        )
    _check_alike(gate_up, w_gate_up_E2HD, down, w_down_EDH)
    E, D, H = w_down_EDH.shape
    if w_gate_up_E2HD.shape != (E, 2 * H, D):
        raise ValueError(
            f"`{gate_up}` must have shape (E, 2H, D) = {(E, 2 * H, D)}, as `{down}` has "
            f"(E, D, H) = {(E, D, H)}, got {tuple(w_gate_up_E2HD.shape)}."
        )
    return E


def _check_alike(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.dtype != other.dtype:
        raise TypeError(
            f"`{name}` must have the dtype of `{other_name}`, {name_of(other.dtype)}, "
            f"got {name_of(tensor.dtype)}; cast one of them."
        )
    check_device(name, tensor, other_name, other)
