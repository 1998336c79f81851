"""The experts of Hugging Face models: their weights both ways, and their forward on `moe_mlp`."""

import re
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from olmo_experts_gemm import (
    experts_from_hugging_face,
    experts_to_hugging_face,
    hugging_face_experts_forward,
    moe_mlp,
)
from torch import nn

# More experts than ten, so that their order by name is not their order by number.
E, D, H, K = 11, 24, 20, 3
FAMILIES = ["olmoe", "qwen3_moe", "mixtral"]
PREFIX = "model.layers.1.mlp.experts"
# Where a checkpoint has them.
ON_DISK = {
    "olmoe": PREFIX,
    "qwen3_moe": PREFIX,
    "mixtral": "model.layers.1.block_sparse_moe.experts",
}


@pytest.fixture(scope="module")
def transformers():
    """Absent it skips; one that cannot be imported fails."""
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    return import_module("transformers")


@pytest.fixture
def registry(transformers):
    """The experts implementations; what a test registers is gone after it."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    before = dict(ALL_EXPERTS_FUNCTIONS._global_mapping)
    yield ALL_EXPERTS_FUNCTIONS
    ALL_EXPERTS_FUNCTIONS._global_mapping.clear()
    ALL_EXPERTS_FUNCTIONS._global_mapping.update(before)


def _model(transformers, family, **changes):
    sizes = {
        "vocab_size": 31,
        "hidden_size": D,
        "intermediate_size": H,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": K,
        "max_position_embeddings": 32,
        # Weights of the size of one over the root of a width, so that no activation is linear.
        "initializer_range": 0.25,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    own = {
        "olmoe": {"num_experts": E},
        "qwen3_moe": {"num_experts": E, "moe_intermediate_size": H, "head_dim": 12},
        "mixtral": {"num_local_experts": E},
    }
    name = {"olmoe": "Olmoe", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}[family]
    config = getattr(transformers, f"{name}Config")(**{**sizes, **own[family], **changes})
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def _tokens(*shape):
    return torch.randint(31, shape, generator=torch.Generator().manual_seed(1))


def _random_bits(*shape, dtype=torch.float32, seed=0):
    """Every pattern of bits, NaN with a payload among them."""
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(
        256, (*shape, size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    return raw.view(dtype).squeeze(-1)


def _assert_same_bits(got, want):
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def _stacks(dtype=torch.float32, device="cpu"):
    gate_up, down = _random_bits(E, 2 * H, D, dtype=dtype), _random_bits(E, D, H, dtype=dtype)
    return gate_up.to(device), down.to(device)


def _layer(family="olmoe", prefix=PREFIX, **options):
    return experts_to_hugging_face(*_stacks(), prefix, family=family, **options)


class OnlyUnder(dict):
    """A mapping that fails when a tensor outside of the prefix is read."""

    def __getitem__(self, key):
        assert key.startswith(PREFIX + "."), key
        return super().__getitem__(key)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_module_and_of_the_checkpoint(transformers, tmp_path, family):
    """Both layouts as `transformers` itself makes them, and ours against them, bit for bit."""
    from safetensors.torch import load_file, save_file

    model = _model(transformers, family)
    model.save_pretrained(tmp_path)
    disk = load_file(tmp_path / "model.safetensors")
    module = {key: value for key, value in model.state_dict().items() if key.startswith(PREFIX)}

    stacks = experts_from_hugging_face(model.state_dict(), PREFIX, num_experts=E)
    for got, want in zip(experts_from_hugging_face(disk, ON_DISK[family]), stacks, strict=True):
        _assert_same_bits(got, want)

    ours = experts_to_hugging_face(*stacks, ON_DISK[family], family=family)
    assert ours.keys() == {key for key in disk if key.startswith(ON_DISK[family])}
    assert len(ours) == 3 * E
    for key, value in ours.items():
        _assert_same_bits(value, disk[key])
    stacked = experts_to_hugging_face(*stacks, PREFIX, family=family, stacked=True)
    assert stacked.keys() == module.keys()
    for key, value in stacked.items():
        _assert_same_bits(value, module[key])

    # Views, but such that can be written as they are.
    save_file(ours, tmp_path / "ours.safetensors")
    for key, value in load_file(tmp_path / "ours.safetensors").items():
        _assert_same_bits(value, disk[key])


@pytest.mark.parametrize("family", FAMILIES)
def test_moe_mlp_gives_what_the_block_gives_by_its_own_routing(transformers, assert_same, family):
    model = _model(transformers, family, experts_implementation="eager")
    block, seen = model.model.layers[1].mlp, []
    block.experts.register_forward_pre_hook(
        lambda _, args, kwargs: seen.extend((*args, *kwargs.values())), with_kwargs=True
    )
    x = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = block(x)
        rows, ids, weights = seen
        stacks = experts_from_hugging_face(model.state_dict(), PREFIX)
        got = moe_mlp(rows, ids, weights, *stacks).view_as(x)
        # That gate and up are not the same thing shows in the outputs.
        swapped = stacks[0].roll(H, dims=1)
        other = moe_mlp(rows, ids, weights, swapped, stacks[1]).view_as(x)
    assert_same({"y": got}, {"y": want}, 2e-6)
    assert (other - want).abs().max() > 0.1 * want.abs().max()


def _run_model(model, ids, d_logits):
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.backward(d_logits)
    gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
    return {"logits": logits.detach(), **gradients}


@pytest.mark.parametrize("renormalised", [False, True])
def test_olmoe_with_our_experts_has_the_same_logits_and_gradients(
    transformers, registry, assert_same, renormalised
):
    model = _model(
        transformers, "olmoe", norm_topk_prob=renormalised, experts_implementation="eager"
    )
    calls, weights = [], []

    def counted(experts, *args, **kwargs):
        calls.append(experts)
        return hugging_face_experts_forward(experts, *args, **kwargs)

    model.model.layers[0].mlp.gate.register_forward_hook(
        lambda _module, _inputs, outputs: weights.append(outputs[1].detach().sum(dim=-1))
    )
    ids = _tokens(2, 13)
    d_logits = torch.randn(2, 13, 31, generator=torch.Generator().manual_seed(3))
    want = _run_model(model, ids, d_logits)
    assert calls == []
    # The case is what its name says.
    assert (weights[0] - 1).abs().max().item() < 1e-6 if renormalised else weights[0].max() < 0.95

    registry.register("olmo", counted)
    model.set_experts_implementation("olmo")
    got = _run_model(model, ids, d_logits)
    assert calls == [layer.mlp.experts for layer in model.model.layers]
    assert all(value.abs().max() > 0 for value in want.values())
    assert_same(got, want, 3e-6)

    model.set_experts_implementation("eager")
    again = _run_model(model, ids, d_logits)
    assert len(calls) == 2
    assert all(torch.equal(again[name], value) for name, value in want.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_checkpoint_runs_on_our_experts(
    transformers, registry, assert_same, tmp_path, family
):
    model = _model(transformers, family, experts_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    registry.register("olmo", partial(hugging_face_experts_forward, impl="torch"))
    loaded = type(model).from_pretrained(
        tmp_path, experts_implementation="olmo", local_files_only=True
    )
    assert loaded.config._experts_implementation == "olmo"
    ids = _tokens(2, 5)
    with torch.no_grad():
        want = {"all": model(input_ids=ids).logits}
        want["one token"] = want["all"][:1, :1]
        got = {"all": loaded(input_ids=ids).logits}
        got["one token"] = loaded(input_ids=ids[:1, :1]).logits
    assert_same(got, want, 1e-5)


def test_it_compiles_into_one_graph(transformers, registry, assert_same):
    experts = _model(transformers, "olmoe").model.layers[0].mlp.experts
    registry.register("olmo", hugging_face_experts_forward)
    experts.config._experts_implementation = "olmo"
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(7, D, generator=generator)
    ids = torch.rand(7, E, generator=generator).topk(K).indices
    weights = torch.rand(7, K, generator=generator)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    assert_same({"y": compiled(x, ids, weights)}, {"y": experts(x, ids, weights)}, 1e-6)


def _gpt_oss(transformers):
    config = transformers.GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=2)
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return GptOssExperts(config)


def _gelu(transformers):
    return _model(transformers, "olmoe", hidden_act="gelu").model.layers[0].mlp.experts


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_gpt_oss, "GptOssExperts has has_bias=True; use another experts implementation"),
        (_gelu, "OlmoeExperts has the activation GELUActivation"),
    ],
)
def test_other_experts_of_transformers_are_refused(transformers, make, reason):
    experts = make(transformers)
    with pytest.raises(ValueError, match=f"needs SwiGLU experts without biases, .* {reason}"):
        hugging_face_experts_forward(experts, None, None, None)


@pytest.mark.parametrize("activation", ["silu", "swish"])
def test_both_names_of_silu_are_taken(transformers, activation):
    experts = _model(transformers, "olmoe", hidden_act=activation).model.layers[0].mlp.experts
    y = hugging_face_experts_forward(
        experts, torch.zeros(2, D), torch.tensor([[0], [3]]), torch.ones(2, 1)
    )
    assert y.shape == (2, D)


# From here on nothing needs `transformers`.


def _experts(dtype=torch.float32, **traits):
    generator = torch.Generator().manual_seed(5)
    return SimpleNamespace(
        gate_up_proj=torch.randn(E, 2 * H, D, generator=generator).to(dtype),
        down_proj=torch.randn(E, D, H, generator=generator).to(dtype),
        act_fn=nn.SiLU(),
        **traits,
    )


@pytest.mark.parametrize(
    ("trait", "value"),
    [
        ("has_bias", True),
        ("is_transposed", True),
        ("is_concatenated", False),
        ("has_gate", False),
        ("has_post_expert_norm", True),
    ],
)
def test_experts_of_another_make_are_refused(trait, value):
    with pytest.raises(ValueError, match=f"SimpleNamespace has {trait}={value}; use another"):
        hugging_face_experts_forward(_experts(**{trait: value}), None, None, None)


def test_experts_with_a_gate_of_their_own_are_refused():
    class Clamped(SimpleNamespace):
        def _apply_gate(self, gate_up):
            return gate_up

    with pytest.raises(ValueError, match="but Clamped has a gate of its own"):
        hugging_face_experts_forward(Clamped(**vars(_experts())), None, None, None)


def test_a_route_to_another_rank_is_no_route():
    """`transformers` gives such a route the id E, several times in one token, and the weight 0."""
    experts, x = _experts(), torch.randn(4, D, generator=torch.Generator().manual_seed(6))
    ids = torch.tensor([[E, 2, E], [E, E, E], [0, 1, E], [E - 1, E, 3]])
    weights = torch.rand(4, 3, generator=torch.Generator().manual_seed(7)).masked_fill(ids == E, 0)
    got = hugging_face_experts_forward(experts, x, ids, weights)
    dropped = torch.where(ids == E, -1, ids)
    assert torch.equal(got, moe_mlp(x, dropped, weights, experts.gate_up_proj, experts.down_proj))
    assert (got[1] == 0).all()
    assert ids.max() == E
    with pytest.raises(ValueError, match=f"got ids from 2 to {E + 1}"):
        hugging_face_experts_forward(experts, x[:1], torch.tensor([[2, E + 1]]), weights[:1, :2])


def test_the_product_can_be_named():
    arguments = (torch.zeros(1, D), torch.tensor([[0]]), torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"`impl` must be .* got 'sonic'"):
        hugging_face_experts_forward(_experts(), *arguments, impl="sonic")


def test_experts_run_in_the_dtype_of_their_weights():
    """As under autocast, where a norm has left float32 tokens."""
    experts = _experts(torch.bfloat16)
    x = torch.randn(4, D, generator=torch.Generator().manual_seed(8))
    ids, weights = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 0]]), torch.full((4, 2), 1 / 3)
    want = moe_mlp(x.bfloat16(), ids, weights, experts.gate_up_proj, experts.down_proj)
    for context in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", torch.float16)):
        with context:
            got = hugging_face_experts_forward(experts, x, ids, weights)
        assert got.dtype == torch.float32
        assert torch.equal(got, want.float())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
)
def test_round_trips_keep_every_bit(family, stacked, dtype):
    stacks = _stacks(dtype)
    tensors = experts_to_hugging_face(*stacks, PREFIX, family=family, stacked=stacked)
    # The order of the keys is that of a file; the neighbours are not read.
    around = {
        "model.layers.1.mlp.gate.weight": torch.zeros(E, D),
        "model.layers.1.mlp.experts_of_others.0.w1.weight": torch.zeros(1),
        "model.layers.11.mlp.experts.0.up_proj.weight": torch.zeros(1),
    }
    state_dict = OnlyUnder(sorted({**tensors, **around}.items()))
    for got, want in zip(experts_from_hugging_face(state_dict, PREFIX), stacks, strict=True):
        _assert_same_bits(got, want)


@pytest.mark.parametrize("stacked", [False, True])
def test_meta_tensors_pass_through(stacked):
    stacks = _stacks(torch.bfloat16, "meta")
    tensors = experts_to_hugging_face(*stacks, "", family="mixtral", stacked=stacked)
    assert tensors.keys() == (
        {"gate_up_proj", "down_proj"}
        if stacked
        else {f"{e}.w{i}.weight" for e in range(E) for i in (1, 2, 3)}
    )
    for got, want in zip(experts_from_hugging_face(tensors, ""), stacks, strict=True):
        assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)


def test_only_single_experts_are_copied():
    gate_up, down = (nn.Parameter(stack) for stack in _stacks())
    single = experts_to_hugging_face(gate_up, down, PREFIX, family="mixtral")
    stacked = experts_to_hugging_face(gate_up, down, PREFIX, family="mixtral", stacked=True)
    assert not any(tensor.requires_grad for tensor in (*single.values(), *stacked.values()))
    assert single[f"{PREFIX}.2.w3.weight"].data_ptr() == gate_up[2, H:].data_ptr()
    assert experts_from_hugging_face(stacked, PREFIX)[1].data_ptr() == down.data_ptr()
    leaves = {key: nn.Parameter(tensor) for key, tensor in single.items()}
    copied = experts_from_hugging_face(leaves, PREFIX)
    assert copied[1].data_ptr() != down.data_ptr()
    assert not copied[0].requires_grad


def _changed(tensors, **changes):
    """With some tensors replaced, or left out where they are `None`."""
    tensors = {**tensors, **{f"{PREFIX}.{name}": value for name, value in changes.items()}}
    return {key: value for key, value in tensors.items() if value is not None}


UP, SCALE = "3.up_proj.weight", "3.up_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({UP: None}, ValueError, f"all 33 tensors .*{PREFIX}', 1 are missing: '{UP}'; merge"),
        (
            {f"{e}.{name}.weight": None for e in (4, 6) for name in ("gate_proj", "down_proj")},
            ValueError,
            "4 are missing: '4.gate_proj.weight', '4.down_proj.weight', .* and 1 more",
        ),
        ({SCALE: torch.ones(1)}, ValueError, f"nothing but the 33 .* got 1 more: '{SCALE}'; bias"),
        ({"0.up_proj.bias": torch.ones(H)}, ValueError, r"got 1 more: '0\.up_proj\.bias'"),
        ({"03.up_proj.weight": torch.ones(H, D)}, ValueError, r"got 1 more: '03\.up_proj"),
        ({"0.w1.weight": torch.ones(H, D)}, ValueError, r"got 1 more: '0\.w1\.weight'"),
        ({"down_proj": torch.ones(E, D, H)}, ValueError, "all 2 tensors .* 'gate_up_proj'; merge"),
        (
            {UP: torch.ones(D, H)},
            ValueError,
            rf"{UP}` must have shape \(20, 24\), as .*0\.gate_proj.* \(20, 24\), got \(24, 20\)",
        ),
        (
            {"2.down_proj.weight": torch.ones(D, H - 1)},
            ValueError,
            r"2.down_proj.weight` must have shape \(24, 20\), .* got \(24, 19\)",
        ),
        (
            {"0.gate_proj.weight": torch.ones(H)},
            ValueError,
            r"gate_proj.weight` must have shape \(H, D\), got \(20,\)",
        ),
        ({UP: torch.ones(H, D).half()}, TypeError, "the dtype of .*, float32, got float16; cast"),
        ({UP: torch.ones(H, D, device="meta")}, ValueError, "on the device of .*, cpu, got meta"),
    ],
)
def test_single_experts_that_do_not_fit_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        experts_from_hugging_face(_changed(_layer(), **changes), PREFIX)


def test_the_number_of_experts_shows_a_missing_last_one():
    tensors = {key: value for key, value in _layer().items() if f"experts.{E - 1}." not in key}
    assert len(experts_from_hugging_face(tensors, PREFIX)[0]) == E - 1
    with pytest.raises(ValueError, match=r"3 are missing: '10\.gate_proj\.weight'"):
        experts_from_hugging_face(tensors, PREFIX, num_experts=E)
    with pytest.raises(ValueError, match=r"3 more: '9\.down_proj\.weight', .*past `num_ex"):
        experts_from_hugging_face(tensors, PREFIX, num_experts=E - 2)
    with pytest.raises(ValueError, match="must hold `num_experts`=12 experts, got 11"):
        experts_from_hugging_face(_layer(stacked=True), PREFIX, num_experts=12)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"gate_up_proj": torch.ones(E, D, 2 * H)},
            ValueError,
            r"`model.*gate_up_proj` must have shape \(E, 2H, D\) = \(11, 40, 24\), as .*down_proj` "
            r"has \(E, D, H\) = \(11, 24, 20\), got \(11, 24, 40\)",
        ),
        (
            {"gate_up_proj": torch.ones(E, D, 2 * H), "down_proj": torch.ones(E, H, D)},
            ValueError,
            r"\(E, 2H, D\) = \(11, 48, 20\)",
        ),
        ({"down_proj": torch.ones(0, D, H)}, ValueError, r"at least one expert, got \(0, 24, 20\)"),
        ({"down_proj": torch.ones(D, H)}, ValueError, r"\(E, D, H\) .* got \(24, 20\)"),
        ({"down_proj": torch.ones(E, D, H).half()}, TypeError, "float16, got float32; cast"),
        ({"down_proj": torch.ones(E, D, H, device="meta")}, ValueError, "meta, got cpu"),
        ({"down_proj": None}, ValueError, "1 are missing: 'down_proj'"),
        ({"down_proj_bias": torch.ones(E, D)}, ValueError, "got 1 more: 'down_proj_bias'; biases"),
    ],
)
def test_stacks_that_do_not_fit_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        experts_from_hugging_face(_changed(_layer(stacked=True), **changes), PREFIX)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("model.layers.7.mlp.experts", "got 0 other tensors there; experts lie under 'model.lay"),
        (f"{PREFIX}.", f"got 0 other tensors there; experts lie under '{PREFIX}', 'x'"),
        ("model.layers.1.mlp", "got 34 other tensors there; experts lie under"),
    ],
)
def test_a_wrong_prefix_names_the_right_ones(prefix, message):
    around = {"model.layers.1.mlp.gate.weight": torch.zeros(E, D)}
    tensors = {**_layer(), **around, **_layer("mixtral", "x")}
    with pytest.raises(ValueError, match=f"`prefix`={re.escape(repr(prefix))}, {message}"):
        experts_from_hugging_face(tensors, prefix)
    with pytest.raises(ValueError, match="none of its keys look like experts"):
        experts_from_hugging_face(around, prefix)


@pytest.mark.parametrize("family", ["gpt_oss", "OLMoE", None])
def test_unknown_families_are_refused(family):
    with pytest.raises(ValueError, match=f"one of 'olmoe', 'qwen3_moe', 'mixtral', got {family!r}"):
        _layer(family)


def test_stacks_to_be_named_must_fit():
    gate_up, down = _stacks()
    with pytest.raises(ValueError, match=r"`w_gate_up_E2HD` must have shape .* got \(11, 39, 24\)"):
        experts_to_hugging_face(gate_up[:, 1:], down, PREFIX, family="olmoe")
    with pytest.raises(TypeError, match="`w_gate_up_E2HD` must have the dtype of `w_down_EDH`"):
        experts_to_hugging_face(gate_up.half(), down, PREFIX, family="olmoe")
