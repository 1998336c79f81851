"""MXFP8 where a configuration asks for it, and quantised weights that are never out of date."""

import pytest
import torch
from olmo_mxfp8 import MXExperts, MXLinear, WeightCache
from olmo_trainer.build import Assembly, assemble
from olmo_trainer.checkpoint import load_checkpoint, save_checkpoint
from olmo_trainer.checkpoint_manifest import read_manifest
from olmo_trainer.data import Batch
from olmo_trainer.mesh import create_mesh
from olmo_trainer.overrides import ConfigError, apply_overrides
from olmo_trainer.recipes import nano
from olmo_trainer.sizes import bytes_per_rank
from olmo_trainer.step import accumulate_gradients, update
from olmo_trainer.weight_caches import WeightCaches

ALL = "precision.mxfp8=experts,shared,attention"


def _assembly(*settings: str) -> Assembly:
    # Heads of 32 channels in all, so that keys divide into blocks.
    widths = ("model.attention.num_kv_heads=2", "optimizer.learning_rate=0.01")
    config = apply_overrides(nano(), [*widths, *settings]).for_world(1)
    return assemble(config, create_mesh(config.layout, torch.device("cpu")))


def _batch() -> Batch:
    tokens = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 16, dtype=torch.bool)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask)


def _loss(assembly: Assembly) -> float:
    accumulate_gradients(assembly, [_batch()])
    return assembly.statistics.totals().loss


def _gradients(assembly: Assembly) -> torch.Tensor:
    return torch.cat([each.main_grad.flatten() for _, each in assembly.parameters])


@pytest.mark.parametrize(
    ("words", "linear"),
    [
        ("experts", set()),
        ("shared", {"gate_up", "down"}),
        ("attention", {"query", "key", "value", "out"}),
        ("experts,shared,attention", {"gate_up", "down", "query", "key", "value", "out"}),
    ],
)
def test_each_word_quantises_its_layers_and_no_others(words, linear):
    part = _assembly(f"precision.mxfp8={words}").stages[0].part
    quantised = {name for name, each in part.named_modules() if isinstance(each, MXLinear)}
    dense = {f"layers.0.feed_forward.{name}" for name in ("gate_up", "down")}
    everywhere = {name for name, each in part.named_modules() if isinstance(each, torch.nn.Linear)}
    expected = {name for name in everywhere if name.rpartition(".")[2] in linear} - dense
    assert quantised == expected
    experts = {name for name, each in part.named_modules() if isinstance(each, MXExperts)}
    routed = {f"layers.{layer}.feed_forward.experts" for layer in (1, 2, 3)}
    assert experts == (routed if "experts" in words else set())


def test_names_and_initial_values_are_those_without():
    plain, quantised = dict(_assembly().parameters), dict(_assembly(ALL).parameters)
    assert plain.keys() == quantised.keys()
    assert all(torch.equal(each, quantised[name]) for name, each in plain.items())


@pytest.mark.parametrize(
    "option",
    [
        "element=e5m2",
        "grad_element=e5m2",
        "scale_rule=floor",
        "granularity=128",
        "input_grad=high",
        "weight_grad=mxfp8",
    ],
)
def test_every_option_of_the_recipe_reaches_the_layers(option):
    wide = ["model.num_layers=2", ALL]
    if option == "granularity=128":
        wide += ["model.d_model=128", "model.moe.expert_hidden=128", "model.moe.shared_hidden=128"]
        wide += ["model.attention.head_dim=64"]
    plain, other = _assembly(*wide), _assembly(*wide, f"precision.recipe.{option}")
    _loss(plain), _loss(other)
    first, second = _gradients(plain), _gradients(other)
    assert not torch.equal(first, second)
    assert (first - second).norm() < 0.6 * first.norm()


def test_a_quantised_model_is_near_the_plain_one():
    plain, quantised = _assembly(), _assembly(ALL)
    assert _loss(quantised) == pytest.approx(_loss(plain), rel=2e-2)
    first, second = _gradients(plain), _gradients(quantised)
    assert 0 < (first - second).norm() < 0.4 * first.norm()  # some tokens go to other experts


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_cached_weights_follow_start_step_and_load(tmp_path, monkeypatch, optimizer):
    settings = (ALL, f"optimizer.kind={optimizer}")

    def losses(assembly: Assembly, steps: int) -> list[float]:
        found = []
        for step in range(1, steps + 1):
            found.append(_loss(assembly))
            update(assembly, step, 0.01)
        return found

    cached = _assembly(*settings)
    layer = cached.stages[0].part.get_submodule("layers.1.feed_forward.experts")
    assert isinstance(layer, MXExperts)
    assert layer.caches is not None
    ahead = losses(cached, 2)
    path = save_checkpoint(cached, tmp_path, 2, data_fingerprint="", versions={})
    ahead += losses(cached, 2)
    assert len(set(ahead)) == 4
    loaded = _assembly(*settings)
    load_checkpoint(loaded, read_manifest(path))
    assert losses(loaded, 2) == ahead[2:]
    with monkeypatch.context() as patch:  # each forward quantises: nothing can be stale
        patch.setattr(WeightCaches, "make", lambda self, part: None)
        assert losses(_assembly(*settings), 4) == ahead
    # What is forgotten is not silent.
    monkeypatch.setattr(WeightCaches, "refresh", lambda self, parameters: None)
    forgetful = _assembly(*settings)
    _loss(forgetful)
    update(forgetful, 1, 0.01)
    with pytest.raises(RuntimeError, match="stale"):
        _loss(forgetful)


@pytest.mark.parametrize("words", ["experts", "shared", "attention", "experts,attention"])
def test_the_bytes_of_a_dry_run_count_the_cached_weights(words):
    assembly = _assembly(f"precision.mxfp8={words}")
    layers = [each for each in assembly.stages[0].part.modules() if hasattr(each, "caches")]
    held = 0
    for layer in layers:
        for cache in layer.caches.values():
            assert isinstance(cache, WeightCache)
            held += sum(t.data.nbytes + t.scales.nbytes for t in (cache.forward, cache.input_grad))
    more = bytes_per_rank(assembly.config, weights="fp32")
    more -= bytes_per_rank(_assembly().config, weights="fp32")
    assert more == held > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["precision.recipe.element=e5m2"], "multiply in MXFP8, and mxfp8 names none"),
        (
            ["precision.mxfp8=attention"],
            r"heads \* head_dim \(16\) must be a multiple of 32",
        ),
        (
            ["precision.mxfp8=shared", "precision.recipe.granularity=128"],
            r"model.d_model \(32\) must be a multiple of 128, precision.recipe.granularity",
        ),
        (["precision.mxfp8=shared", "model.moe.shared_hidden=0"], "shared_hidden is 0 or no layer"),
        (
            ["precision.mxfp8=experts", "model.num_dense_layers=4"],
            "expert_hidden is 0 or no layer",
        ),
        (["precision.mxfp8=experts", "precision.recipe.granularity=64"], "granularity = 64: input"),
    ],
)
def test_a_wrong_precision_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(nano(), settings)
