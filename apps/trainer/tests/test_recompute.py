"""Recompute changes what is kept, and nothing else; packing changes gradients within a bound."""

import pytest
import torch
from olmo_mxfp8 import MXExperts, MXPacker, WeightCache
from olmo_routing import Router
from olmo_trainer.build import Assembly, assemble
from olmo_trainer.checkpoint import state_of
from olmo_trainer.data import Batch
from olmo_trainer.dispatcher import live_dispatches
from olmo_trainer.mesh import create_mesh
from olmo_trainer.overrides import ConfigError, apply_overrides
from olmo_trainer.pipeline_schedule import build_schedule
from olmo_trainer.recipes import nano
from olmo_trainer.stage import Microbatch
from olmo_trainer.step import accumulate_gradients, heldout_loss, update
from torch.autograd.graph import saved_tensors_hooks

BLOCKS = ("recompute.kind=blocks",)
CHOSEN = ("recompute.kind=blocks", "recompute.layers=1,3")
EXPERTS = ("recompute.kind=experts",)
PACKED = ("precision.saved=mxfp8",)


def _assembly(*settings: str) -> Assembly:
    config = apply_overrides(nano(), settings).for_world(1)
    return assemble(config, create_mesh(config.layout, torch.device("cpu")))


def _batch() -> Batch:
    tokens = torch.randint(0, 257, (2, 25), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[1, 20:] = False
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask)


def _run(*settings: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return what a step counts, and the gradients."""
    assembly = _assembly(*settings)
    accumulate_gradients(assembly, [_batch()])
    gradients = {
        name: each.main_grad.clone()  # pyright: ignore[reportAttributeAccessIssue] - the reducer's
        for name, each in assembly.parameters
    }
    return assembly.statistics.vector.clone(), gradients


@pytest.fixture(scope="module")
def plain() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return _run()


@pytest.mark.parametrize(
    "settings",
    [
        BLOCKS,
        CHOSEN,
        EXPERTS,
        (*BLOCKS, "layout.schedule.kind=zero_bubble_h1"),
        (*EXPERTS, "layout.schedule.kind=zero_bubble_h1"),
    ],
    ids=" ".join,
)
def test_losses_counts_and_gradients_are_bitwise_those_without(plain, settings):
    statistics, gradients = _run(*settings)
    # Auxiliary losses and expert counts too: the second forward counts nothing.
    assert torch.equal(statistics, plain[0])
    for name, gradient in plain[1].items():
        assert torch.equal(gradients[name], gradient), name


@pytest.mark.parametrize("kind", [BLOCKS, EXPERTS], ids=" ".join)
def test_quantised_layers_are_recomputed_bitwise_too(kind):
    words = ("model.attention.num_kv_heads=2", "precision.mxfp8=experts,shared,attention")
    statistics, gradients = _run(*words)
    again, recomputed = _run(*words, *kind)
    assert torch.equal(statistics, again)
    assert all(torch.equal(each, recomputed[name]) for name, each in gradients.items())


def _kept_bytes(*settings: str) -> int:
    """Bytes that one forward keeps for its backward, what is recomputed or packed not counted."""
    assembly, batch, seen = _assembly(*settings), _batch(), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {parameter.untyped_storage().data_ptr() for _, parameter in assembly.parameters}
    count = torch.tensor(44.0)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = assembly.stages[0](None, Microbatch(batch, count, count))
    assert loss.requires_grad
    return sum(size for place, size in seen.items() if place not in own)


def test_each_kind_keeps_less_than_the_one_before():
    none, experts, chosen, blocks = (_kept_bytes(*each) for each in ((), EXPERTS, CHOSEN, BLOCKS))
    assert none > experts > chosen > blocks
    rows, width, hidden, layers = 2 * 44, 32, 32, 3
    # A product keeps its input, SwiGLU what goes in and comes out of it; all in FP32.
    assert none - experts > 4 * rows * 3 * hidden * layers
    assert blocks < none / 3
    assert blocks > 4 * 48 * width * 4  # the inputs of four blocks


def test_the_second_forward_takes_the_routes_of_the_first(monkeypatch):
    given = []
    forward = Router.forward

    def spy(self, x_TD, *, mask_T=None, expert_ids_TK=None, **others):
        given.append(expert_ids_TK)
        return forward(self, x_TD, mask_T=mask_T, expert_ids_TK=expert_ids_TK, **others)

    monkeypatch.setattr(Router, "forward", spy)
    assembly = _assembly(*BLOCKS)
    accumulate_gradients(assembly, [_batch()])
    assert [each is None for each in given] == [True] * 3 + [False] * 3


def test_a_tie_that_flips_between_the_forwards_does_no_harm(plain, monkeypatch):
    run = torch.autograd.backward
    assembly = _assembly(*BLOCKS)

    def flip(*arguments, **options):
        for bias in assembly.selection_biases.values():
            bias.bias_E.copy_(torch.tensor([9.0, -9.0, 9.0, -9.0]))
        run(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "backward", flip)
    accumulate_gradients(assembly, [_batch()])
    for name, parameter in assembly.parameters:
        assert torch.equal(parameter.main_grad, plain[1][name]), name


def test_packed_activations_take_33_bytes_of_128_and_move_gradients_little(plain, monkeypatch):
    packed = []
    pack = MXPacker.pack

    def count(self, tensor):
        result = pack(self, tensor)
        packed.append((tensor.nbytes, result.nbytes))
        return result

    monkeypatch.setattr(MXPacker, "pack", count)
    statistics, gradients = _run(*PACKED)
    assert torch.equal(statistics, plain[0])  # the forward computes with what it has
    assert len(packed) >= 2 * 3
    assert all(after * 128 == before * 33 for before, after in packed)
    for name, gradient in plain[1].items():
        distance = (gradients[name] - gradient).norm() / gradient.norm()
        assert distance < 0.1, name
        assert distance > 0 or "w_gate_up" not in name, name  # it multiplies what was packed
    packed.clear()
    _run(*PACKED, "recompute.kind=blocks", "recompute.layers=1")
    fewer = len(packed)
    packed.clear()
    _run(*PACKED)
    assert fewer == len(packed) * 2 // 3  # a recomputed layer packs nothing


def test_packed_activations_survive_a_split_backward():
    _, whole = _run(*PACKED)
    _, split = _run(*PACKED, "layout.schedule.kind=zero_bubble_h1")
    for name, gradient in whole.items():
        assert torch.equal(split[name], gradient), name


def test_mxfp8_experts_pack_by_their_recipe():
    part = _assembly(*PACKED, "precision.mxfp8=experts").stages[0].part
    experts = [each for each in part.modules() if isinstance(each, MXExperts)]
    assert [each.recipe.saved for each in experts] == ["mxfp8"] * 3


def test_recomputed_mxfp8_experts_pack_nothing():
    words = ("precision.mxfp8=experts", "recompute.kind=blocks", "recompute.layers=1,3")
    part = _assembly(*PACKED, *words).stages[0].part
    saved = {
        name.split(".")[1]: each.recipe.saved
        for name, each in part.named_modules()
        if isinstance(each, MXExperts)
    }
    assert saved == {"1": "high", "2": "mxfp8", "3": "high"}
    # The last layer's gradients come before any packing, so they are bitwise those without.
    plain = _run("precision.mxfp8=experts", *words[1:])[1]
    packed = _run(*PACKED, *words)[1]
    for name, gradient in plain.items():
        if name.startswith("layers.3."):
            assert torch.equal(packed[name], gradient), name
    assert not all(torch.equal(packed[name], each) for name, each in plain.items())


def test_recomputed_layers_hold_no_buffers_between_their_forwards():
    def live(*settings: str) -> int:
        config = apply_overrides(nano(), ["batch.accumulation=2", *settings]).for_world(1)
        return live_dispatches(config, build_schedule(config.layout, 2), 0)

    assert live() == 3
    assert live(*EXPERTS) == 3
    assert live(*BLOCKS) == 2
    assert live("recompute.kind=blocks", "recompute.layers=0") == 3
    assert live("recompute.kind=blocks", "recompute.layers=1") == 4


@pytest.mark.parametrize(
    "settings",
    [(), BLOCKS, (*EXPERTS, "guard.kind=skip"), ("precision.mxfp8=experts,shared",)],
    ids=" ".join,
)
def test_an_evaluation_leaves_no_trace(settings):
    """Not in weights, gradients, moments, biases, counters, random numbers or cached weights."""
    assembly = _assembly(*settings, "optimizer.learning_rate=0.01")
    accumulate_gradients(assembly, [_batch()])
    update(assembly, 1, 0.01)

    def everything() -> dict[str, torch.Tensor]:
        state = {name: getattr(each, "local", each) for name, each in state_of(assembly).items()}
        state |= dict(assembly.parameters)
        state |= {f"{name} gradient": each.main_grad for name, each in assembly.parameters}
        state |= {"statistics": assembly.statistics.vector, "random": torch.get_rng_state()}
        for name, each in assembly.stages[0].named_modules():
            for weight, cache in (getattr(each, "caches", None) or {}).items():
                assert isinstance(cache, WeightCache)
                state[f"{name}.{weight} cache"] = cache.forward.data.view(torch.uint8)
        return {name: each.detach().clone() for name, each in state.items()}

    before = everything()
    first = heldout_loss(assembly, [_batch()])
    assert heldout_loss(assembly, [_batch()]) == first
    after = everything()
    assert before.keys() == after.keys()
    for name, each in before.items():  # the guard's empty places are NaN
        torch.testing.assert_close(after[name], each, rtol=0, atol=0, equal_nan=True)
    assert not any(each.grad is not None for _, each in assembly.parameters)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["recompute.kind=all"], "recompute.kind = 'all': must be one of 'none', 'blocks', 'exper"),
        (["recompute.layers=1"], "recompute.layers: no such key for kind = 'none'"),
        ([*BLOCKS, "recompute.layers=2,9"], r"names \[9\]; the model has layers 0 to 3"),
        ([*BLOCKS, "recompute.layers=-1"], "greater than or equal to 0"),
        ([*EXPERTS, "model.num_dense_layers=4"], "'experts' needs a routed layer, and the model"),
        ([*PACKED, *BLOCKS], "packs what routed experts keep, and with recompute.kind = 'blocks'"),
        ([*PACKED, *EXPERTS], "with recompute.kind = 'experts' this model's keep nothing"),
        ([*PACKED, "model.d_model=40"], r"d_model \(40\) must be a multiple of 32 for precision.s"),
    ],
)
def test_a_wrong_choice_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(nano(), settings)
