"""Each optimizer a configuration names, with each of its options, is what moves the weights."""

import io
import os

import pytest
import torch
from olmo_distopt import GradientReducer, ShardedAdamW, ShardedMuon, reference
from olmo_trainer import build, launch, loop
from olmo_trainer.build import Assembly, assemble
from olmo_trainer.checkpoint import load_checkpoint, save_checkpoint, state_of
from olmo_trainer.checkpoint_manifest import CheckpointError, read_manifest
from olmo_trainer.config import MuonConfig
from olmo_trainer.data import Batch
from olmo_trainer.launch import check_kernels
from olmo_trainer.mesh import create_mesh
from olmo_trainer.overrides import ConfigError, apply_overrides
from olmo_trainer.recipes import nano
from olmo_trainer.sizes import bytes_per_rank, count_parameters
from olmo_trainer.step import accumulate_gradients, update
from olmo_trainer.verify import check_config
from rich.console import Console

RATE = 0.02
MUON = ["optimizer.kind=muon", "optimizer.products=fp32"]


def _assembly(*settings: str) -> Assembly:
    config = apply_overrides(nano(), ["optimizer.max_grad_norm=1e9", *settings]).for_world(1)
    return assemble(config, create_mesh(config.layout, torch.device("cpu")))


def _step(assembly: Assembly) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Take a step; return the weights before it and its gradients, by name."""
    tokens = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 16, dtype=torch.bool)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask)
    before = {name: each.detach().clone() for name, each in assembly.parameters}
    accumulate_gradients(assembly, [batch])
    gradients = {
        name: each.main_grad.clone()  # pyright: ignore[reportAttributeAccessIssue] - the reducer's
        for name, each in assembly.parameters
    }
    update(assembly, 1, RATE)
    return before, gradients


def _is_hidden(name: str, tensor: torch.Tensor) -> bool:
    ends = ("embedding.weight", "head.weight")
    return tensor.ndim > 1 and name not in ends and "router" not in name


def _expected(config, name: str, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The weight after a first step, by the papers' formulas in float64."""
    optimizer = config.optimizer
    decays = weight.ndim > 1
    if name == "embedding.weight":
        decays = "embedding" in optimizer.decay
    elif "router" in name:
        decays = "routers" in optimizer.decay
    decay = optimizer.weight_decay if decays else 0.0
    weight, gradient = weight.double(), gradient.double()
    if isinstance(optimizer, MuonConfig) and _is_hidden(name, weight):

        def moved(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
            return reference.muon(
                weight,
                gradient,
                torch.zeros_like(weight),
                lr=RATE,
                momentum=optimizer.momentum,
                nesterov=optimizer.momentum_form == "nesterov",
                weight_decay=decay,
                scale=optimizer.scale,
                num_iterations=optimizer.iterations,
            )[0]

        if weight.ndim == 2:
            return moved(weight, gradient)
        return torch.stack([moved(*each) for each in zip(weight, gradient, strict=True)])
    return reference.adamw(
        weight,
        gradient,
        torch.zeros_like(weight),
        torch.zeros_like(weight),
        step=1,
        lr=RATE,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.epsilon,
        weight_decay=decay,
    )[0]


@pytest.mark.parametrize(
    "settings",
    [
        ["optimizer.epsilon=1e-3", "optimizer.weight_decay=3"],
        ["optimizer.weight_decay=3", "optimizer.decay=embedding"],
        ["optimizer.weight_decay=3", "optimizer.decay="],
        [*MUON, "optimizer.weight_decay=3", "optimizer.decay=embedding,routers"],
        [*MUON, "optimizer.scale=shape", "optimizer.iterations=3"],
        [*MUON, "optimizer.momentum=0.5", "optimizer.momentum_form=plain"],
    ],
    ids=lambda settings: " ".join(each.removeprefix("optimizer.") for each in settings),
)
def test_a_step_is_the_formula_of_the_optimizer(settings):
    assembly = _assembly(*settings)
    before, gradients = _step(assembly)
    for name, parameter in assembly.parameters:
        expected = _expected(assembly.config, name, before[name], gradients[name])
        assert not torch.equal(parameter, before[name]), name
        torch.testing.assert_close(
            parameter.double(), expected, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_newton_schulz_in_bf16_is_near_that_in_fp32():
    moved = {}
    for word in ("bf16", "fp32"):
        assembly = _assembly("optimizer.kind=muon", f"optimizer.products={word}")
        before, _ = _step(assembly)
        name = "layers.1.feed_forward.experts.w_down_EDH"
        moved[word] = dict(assembly.parameters)[name].detach() - before[name]
    distance = (moved["bf16"] - moved["fp32"]).norm() / moved["fp32"].norm()
    assert 0 < distance < 0.2  # five iterations of 8-bit products


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_are_of_the_dtype_asked_for(kind):
    assembly = _assembly(f"optimizer.kind={kind}", "optimizer.moments=bf16")
    _step(assembly)
    for key, shard in state_of(assembly).items():
        if key.startswith("main."):
            assert shard.local.dtype == torch.float32
        elif key.startswith(("exp_avg", "momentum")):
            assert shard.local.dtype == torch.bfloat16, key
            assert shard.local.any(), key


def test_muon_keeps_one_momentum_for_hidden_matrices_and_adamw_two_for_the_rest():
    assembly = _assembly("optimizer.kind=muon")
    state = state_of(assembly)
    for name, parameter in assembly.parameters:
        hidden = _is_hidden(name, parameter)
        assert (f"momentum.{name}" in state) == hidden, name
        assert (f"exp_avg_sq.{name}" in state) != hidden, name


def test_a_resume_may_change_the_dtype_of_moments_but_not_the_optimizer(tmp_path):
    saved = _assembly()
    _step(saved)
    manifest = read_manifest(
        save_checkpoint(saved, tmp_path, 1, data_fingerprint="", versions={"torch": "any"})
    )
    smaller = _assembly("optimizer.moments=bf16")
    load_checkpoint(smaller, manifest)
    moments = state_of(saved)
    for key, shard in state_of(smaller).items():
        if key.startswith("exp_avg"):
            assert torch.equal(shard.local, moments[key].local.bfloat16()), key
    with pytest.raises(CheckpointError, match=r"tensor exp_avg\.\S+ has \d+ elements there"):
        load_checkpoint(_assembly("optimizer.kind=muon"), manifest)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_the_bytes_of_a_dry_run_are_those_of_the_state(kind, moments):
    assembly = _assembly(f"optimizer.kind={kind}", f"optimizer.moments={moments}")
    state = sum(
        shard.local.nbytes
        for key, shard in state_of(assembly).items()
        if key != "step" and not key.startswith("selection_bias")
    )
    held = 8 * count_parameters(assembly.config.model).total  # FP32 weights and gradients
    assert bytes_per_rank(assembly.config, weights="fp32") == state + held


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("impl", ["auto", "reference", "triton"])
def test_the_implementation_reaches_all_that_takes_one(monkeypatch, kind, impl):
    given = {}

    def listening(made):
        def make(*parts, **options):
            given[made.__name__] = options.pop("impl")
            return made(*parts, **options)

        return make

    for made in (GradientReducer, ShardedAdamW, ShardedMuon):
        monkeypatch.setattr(build, made.__name__, listening(made))
    _assembly(f"optimizer.kind={kind}", f"optimizer.impl={impl}")
    moves = {"adamw": "ShardedAdamW", "muon": "ShardedMuon"}[kind]
    assert given == {"GradientReducer": impl, moves: impl}


def test_kernels_that_cannot_run_are_named_before_anything_starts(make_config, monkeypatch):
    config = make_config("optimizer.impl=triton")
    gpu = torch.device("cuda", 0)
    assert check_kernels(config, gpu) is None
    assert check_kernels(make_config("optimizer.impl=auto"), torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"impl = 'triton' runs .* but device is a CPU; use optim"):
        loop.train(config, resume=None, console=Console(file=io.StringIO()))
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"but triton is not installed; use optimizer.impl = 'aut"):
        check_kernels(config, gpu)


def test_kernels_are_loaded_before_reductions_run_beside_them(make_config, monkeypatch):
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")  # put back afterwards
    for word, loading in (("after_backward", None), ("in_backward", "EAGER")):
        monkeypatch.delenv("CUDA_MODULE_LOADING")
        launch.pick_device(make_config(f"optimizer.replicas.reduce={word}", "device=cpu"))
        assert os.environ.get("CUDA_MODULE_LOADING") == loading
        os.environ["CUDA_MODULE_LOADING"] = ""


def test_verify_takes_what_runs_on_a_cpu():
    assert check_config(apply_overrides(nano(), ["optimizer.impl=triton"])).optimizer.impl == "auto"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["optimizer.impl=cuda"],
            "optimizer.impl = 'cuda': input should be 'auto', 'reference' or 'triton'",
        ),
        (
            ["optimizer.impl=triton", "device=cpu"],
            "optimizer.impl = 'triton' runs kernels on GPUs, got device = 'cpu'; use optimizer.im",
        ),
        (["optimizer.kind=sgd"], "optimizer.kind = 'sgd': must be one of 'adamw', 'muon'"),
        (["optimizer.momentum=0.9"], "optimizer.momentum: no such key for kind = 'adamw'"),
        ([*MUON, "optimizer.momentum=1"], "optimizer.momentum = 1: input should be less than 1"),
        (
            ["optimizer.kind=muon", "optimizer.replicas.collective=reduce_scatter"],
            "replicas.collective = 'reduce_scatter' needs kind = 'adamw', got 'muon', of which",
        ),
        (
            ["optimizer.replicas.reduce=early"],
            "replicas.reduce = 'early': input should be 'after_backward' or 'in_backward'",
        ),
        (
            ["optimizer.kind=muon", "optimizer.replicas.gathers=in_forward"],
            r"optimizer.replicas.gathers: no such key; did you mean optimizer.replicas.gather\?",
        ),
        (["optimizer.decay=norms"], "optimizer.decay.0 = 'norms': input should be 'embedding' or"),
        (
            ["optimizer.moments=bf16", "optimizer.beta2=0.999"],
            r"beta2 \(0.999\) must be at most 0.99609375 with moments = 'bf16'",
        ),
        (
            ["optimizer.kind=muon", "optimizer.moments=bf16", "optimizer.momentum=0.999"],
            r"momentum \(0.999\) must be at most 0.99609375 with moments = 'bf16'",
        ),
    ],
)
def test_a_wrong_option_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(nano(), settings)
