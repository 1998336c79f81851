import pytest
import torch
from olmo_ep_comm import create_dispatcher
from olmo_trainer.build import build_part
from olmo_trainer.config import TrainerConfig
from olmo_trainer.model.attention import rotary_tables, rotate
from olmo_trainer.model.initialize import initialize
from olmo_trainer.model.transformer import Transformer
from olmo_trainer.model.visibility import Visibility
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import nano


def _part(config: TrainerConfig, layers: range | None = None, *, shards: int = 1, shard: int = 0):
    experts = config.model.moe.num_experts
    part = build_part(
        config,
        layers or range(config.model.num_layers),
        create_dispatcher("local", num_experts=experts),
        num_expert_ranks=shards,
    )
    initialize(part, config.seed, first_expert=shard * experts // shards)
    return part


@pytest.fixture
def model() -> Transformer:
    return _part(nano())


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 257, shape, generator=torch.Generator().manual_seed(1))


def test_a_position_sees_nothing_after_it(model):
    tokens, mask = _tokens(2, 16), torch.ones(2, 16, dtype=torch.bool)
    whole, _ = model(tokens, mask)
    changed = tokens.clone()
    changed[:, 9:] = 7
    other, _ = model(changed, mask)
    torch.testing.assert_close(whole[:, :9], other[:, :9], rtol=0, atol=1e-5)
    assert (whole[:, 9:] - other[:, 9:]).abs().max() > 1e-2


@pytest.mark.parametrize("settings", [(), ("model.attention.window=4",)])
def test_documents_of_a_sequence_are_as_if_alone(settings):
    model = _part(apply_overrides(nano(), settings))
    tokens, mask = _tokens(2, 16), torch.ones(2, 16, dtype=torch.bool)
    documents = torch.zeros(2, 16, dtype=torch.int32)
    documents[0, 5:], documents[0, 11:], documents[1, 8:] = 1, 2, 1
    packed, routings = model(tokens, mask, documents)
    pieces = [(0, 0, 5), (0, 5, 11), (0, 11, 16), (1, 0, 8), (1, 8, 16)]
    counts = {layer: torch.zeros_like(each.counts_E) for layer, each in routings.items()}
    for row, start, end in pieces:
        alone, routed = model(tokens[row : row + 1, start:end], mask[:1, start:end])
        # Positions count on through a sequence: rotations see their differences alone.
        torch.testing.assert_close(packed[row, start:end], alone[0], rtol=0, atol=2e-5)
        for layer, each in routed.items():
            counts[layer] += each.counts_E
    assert all(torch.equal(counts[layer], each.counts_E) for layer, each in routings.items())
    joined, _ = model(tokens, mask)
    assert (joined - packed)[0, 5:].abs().max() > 1e-2


def test_sliding_layers_forget_and_full_ones_do_not():
    tokens, mask = _tokens(1, 16), torch.ones(1, 16, dtype=torch.bool)
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 257

    def reach(*settings: str) -> list[int]:
        model = _part(apply_overrides(nano(), settings))
        moved = (model(tokens, mask)[0] - model(changed, mask)[0]).abs().amax(-1)[0]
        return (moved > 1e-5).nonzero().flatten().tolist()

    # Four layers of a window of 3 see 4 * 2 positions back; one full layer sees them all.
    assert max(reach("model.attention.window=3")) == 8
    mixed = ("model.attention.window=3", "model.attention.full_every=4")
    assert max(reach(*mixed)) == 15
    assert reach() == list(range(16))


@pytest.mark.parametrize(
    ("weights", "total"), [("mean_one", 2.0), ("sum_one", 1.0), ("scores", None)]
)
def test_route_weights_are_those_of_the_merge_rule(weights, total):
    model = _part(apply_overrides(nano(), [f"model.moe.route_weights={weights}"]))
    _, routings = model(_tokens(2, 12), torch.ones(2, 12, dtype=torch.bool))
    for routing in routings.values():
        if total is None:
            chosen = routing.scores_TE.gather(1, routing.expert_ids_TK)
            assert torch.equal(routing.weights_TK, chosen)
        else:
            sums = routing.weights_TK.sum(-1)
            torch.testing.assert_close(sums, torch.full_like(sums, total))


def test_pre_norm_blocks_add_what_their_sublayers_give():
    plain = _part(apply_overrides(nano(), ["model.norms=pre"]))
    block, visibility = plain.layers["0"], Visibility(8, torch.device("cpu"))
    x = torch.randn(2, 8, 32)
    out, _ = block(x, torch.ones(2, 8, dtype=torch.bool), visibility)
    h = x + block.attention(block.attention_in_norm(x), visibility)
    assert torch.equal(out, h + block.feed_forward(block.feed_forward_in_norm(h)))
    outer = {name for name, _ in _part(nano()).named_parameters() if "out_norm" in name}
    assert len(outer) == 2 * nano().model.num_layers
    assert not any("out_norm" in name for name, _ in plain.named_parameters())


def test_padding_changes_nothing_for_real_tokens(model):
    tokens, mask = _tokens(2, 12), torch.ones(2, 12, dtype=torch.bool)
    short, routed_short = model(tokens, mask)
    pad = torch.zeros(2, 5, dtype=torch.int64)
    padded, routed_long = model(torch.cat((tokens, pad), 1), torch.nn.functional.pad(mask, (0, 5)))
    torch.testing.assert_close(short, padded[:, :12], rtol=0, atol=1e-5)
    assert routed_short.keys() == set(nano().model.moe_layers)
    for layer, routing in routed_short.items():
        assert torch.equal(routing.counts_E, routed_long[layer].counts_E)
        assert routing.counts_E.sum() == 2 * 12 * nano().model.moe.top_k


def test_rotation_depends_on_distance_alone():
    cos, sin = rotary_tables(32, 16, 10_000.0, torch.device("cpu"))
    query, key = torch.randn(16).double(), torch.randn(16).double()
    cos, sin = cos.double(), sin.double()

    def score(at: int, other: int) -> float:
        a = rotate(query[None], cos[at, None], sin[at, None])
        b = rotate(key[None], cos[other, None], sin[other, None])
        return float((a * b).sum())

    assert score(3, 1) == pytest.approx(score(20, 18), rel=1e-4)
    assert score(3, 1) != pytest.approx(score(3, 2), rel=1e-3)
    assert torch.equal(rotate(query[None], cos[:1], sin[:1])[0], query.float().double())


def test_grouped_queries_equal_repeated_keys():
    config = apply_overrides(nano(), ["model.attention.num_heads=4"])
    attention = _part(config).layers["0"].attention
    full = apply_overrides(
        config, ["model.attention.num_kv_heads=4", "model.attention.num_heads=4"]
    )
    repeated = _part(full).layers["0"].attention
    for name, parameter in repeated.named_parameters():
        own = attention.get_parameter(name)
        with torch.no_grad():
            parameter.copy_(own if own.shape == parameter.shape else own.repeat(4, 1))
    x, visibility = torch.randn(2, 8, 32), Visibility(8, torch.device("cpu"))
    torch.testing.assert_close(
        attention(x, visibility), repeated(x, visibility), rtol=1e-5, atol=1e-6
    )


def test_initial_values_do_not_depend_on_the_layout(model):
    whole = dict(model.named_parameters())
    pieces: dict[str, list[torch.Tensor]] = {}
    for shard in range(2):
        for layers in (range(0, 1), range(1, 4)):
            part = _part(nano(), layers, shards=2, shard=shard)
            for name, parameter in part.named_parameters():
                pieces.setdefault(name, []).append(parameter)
    assert pieces.keys() == whole.keys()
    for name, parameter in whole.items():
        expected = torch.cat(pieces[name]) if ".experts." in name else pieces[name][0]
        assert torch.equal(parameter, expected), name
        if ".experts." not in name:
            assert torch.equal(pieces[name][0], pieces[name][1]), name


def test_no_two_layers_or_experts_start_equal(model):
    seen: dict[bytes, str] = {}
    for name, parameter in model.named_parameters():
        slices = parameter if ".experts." in name else parameter[None]
        for index, each in enumerate(slices):
            if each.ndim > 1:
                key = each.detach().numpy().tobytes()
                assert key not in seen, f"{name}[{index}] equals {seen.get(key)}"
                seen[key] = f"{name}[{index}]"
    assert len(seen) > 4 * nano().model.moe.num_experts


def test_another_seed_is_another_model(model):
    other = build_part(
        nano(), range(4), create_dispatcher("local", num_experts=4), num_expert_ranks=1
    )
    initialize(other, 1)
    assert not torch.equal(model.embedding.weight, other.embedding.weight)


def test_mxfp8_touches_experts_and_shared_alone():
    config = apply_overrides(nano(), ["precision.mxfp8=experts,shared"])
    plain, quantised = _part(nano()), _part(config)
    assert plain.state_dict().keys() == quantised.state_dict().keys()
    tokens, mask = _tokens(2, 16), torch.ones(2, 16, dtype=torch.bool)
    hidden, visibility = plain.embedding(tokens), Visibility(16, torch.device("cpu"))
    dense = [part.layers["0"](hidden, mask, visibility)[0] for part in (plain, quantised)]
    assert torch.equal(*dense)
    first, _ = plain.layers["1"](dense[0], mask, visibility)
    second, _ = quantised.layers["1"](dense[0], mask, visibility)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, second, rtol=0.2, atol=0.2)
