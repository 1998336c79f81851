"""Compiled stretches give the numbers of torch's own operations, in any combination."""

import io
from dataclasses import fields

import pytest
import torch
from olmo_trainer import loop
from olmo_trainer.build import Assembly, assemble
from olmo_trainer.checkpoint_manifest import read_manifest
from olmo_trainer.compiler import build_regions, require_compiler
from olmo_trainer.data import Batch
from olmo_trainer.mesh import create_mesh
from olmo_trainer.metrics import StepRecord, read_metrics
from olmo_trainer.model.regions import EAGER, Regions
from olmo_trainer.overrides import ConfigError, apply_overrides
from olmo_trainer.recipes import nano
from olmo_trainer.sample import load_model
from olmo_trainer.step import accumulate_gradients, heldout_loss, update
from rich.console import Console
from torch._dynamo.utils import counters

CPU = torch.device("cpu")
DENSE = ("compile.kind=dense",)
GRAPHS = (*DENSE, "compile.backend=aot_eager")
WIDE = "model.attention.num_kv_heads=2"  # keys of two heads fill a block of MXFP8
WARNINGS = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # what inductor calls of torch
    # torch looks at the gradients of what it traces, and hides the warning where none is an error.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning"),
]
pytestmark = [*WARNINGS, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
# Gradients of weights in graphs do not wait.
UNSPLIT = pytest.mark.filterwarnings("ignore:the backward of stage")


@pytest.fixture(autouse=True)
def _no_graphs():
    """Forget the graphs of other tests: what a process may compile of a function is limited."""
    torch._dynamo.reset()
    counters.clear()


def _assembly(*settings: str) -> Assembly:
    config = apply_overrides(nano(), settings).for_world(1)
    return assemble(config, create_mesh(config.layout, CPU))


def _batch() -> Batch:
    tokens = torch.randint(0, 257, (2, 25), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[1, 20:] = False
    documents = torch.arange(24).expand(2, 24).int() // 10
    targets = tokens[:, 1:].masked_fill(~mask, -100)
    return Batch(tokens[:, :-1].contiguous(), targets, mask, documents)


def _run(*settings: str, evaluates: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], float]:
    """Return what a step counts, its gradients, and the held-out loss after its update, or 0."""
    assembly = _assembly(*settings)
    accumulate_gradients(assembly, [_batch()] * assembly.config.batch.accumulation)
    gradients = {
        name: each.main_grad.clone()  # pyright: ignore[reportAttributeAccessIssue] - the reducer's
        for name, each in assembly.parameters
    }
    counted = assembly.statistics.vector.clone()
    if not evaluates:
        return counted, gradients, 0.0
    update(assembly, 1, 1e-3)
    return counted, gradients, heldout_loss(assembly, [_batch()])[0]


def _require_near(
    settings: tuple[str, ...], compiled: tuple[str, ...], *, evaluates: bool = True
) -> None:
    counted, gradients, heldout = _run(*settings, evaluates=evaluates)
    assert not counters["stats"]["unique_graphs"]
    counted_too, gradients_too, heldout_too = _run(*settings, *compiled, evaluates=evaluates)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    torch.testing.assert_close(counted_too, counted, rtol=1e-5, atol=1e-6)
    assert heldout_too == pytest.approx(heldout, rel=1e-5)
    for name, gradient in gradients.items():
        distance = (gradients_too[name] - gradient).norm() / gradient.norm()
        assert distance < 1e-4, name


@pytest.mark.parametrize(
    "settings",
    [
        ("loss.z_loss=1e-3", "data.attend=document", "model.attention.window=8"),
        ("recompute.kind=blocks", "model.norms=pre", "model.attention.qk_norm=projection"),
        ("recompute.kind=experts", "layout.schedule.kind=zero_bubble_h1", "batch.accumulation=2"),
        (WIDE, "precision.mxfp8=experts,shared,attention", "recompute.kind=blocks"),
        ("precision.saved=mxfp8", "optimizer.kind=muon", "guard.kind=skip"),
    ],
    ids=" ".join,
)
@UNSPLIT
def test_graphs_give_what_the_operations_give(settings):
    _require_near(settings, GRAPHS)


def test_generated_code_gives_what_the_operations_give():
    config = apply_overrides(nano(), DENSE)
    try:
        require_compiler(config, CPU)
    except ValueError as error:
        pytest.skip(str(error))
    # Without an evaluation, which has graphs of its own: a C++ compiler takes seconds for each.
    _require_near(("loss.z_loss=1e-3",), DENSE, evaluates=False)


def test_one_graph_serves_every_layer():
    found = []
    for layers in (2, 5):
        torch._dynamo.reset()
        counters.clear()
        assembly = _assembly(*GRAPHS, f"model.num_layers={layers}")
        accumulate_gradients(assembly, [_batch()])
        found.append(counters["stats"]["unique_graphs"])
    # All but the rotation by itself, which context ranks do between their exchanges.
    assert found == [len(fields(Regions)) - 1] * 2


def test_another_size_of_microbatch_is_no_end_of_graphs():
    assembly = _assembly(*GRAPHS)
    for size in range(1, 12):
        tokens = torch.randint(0, 257, (size, 16 + size))
        mask = torch.ones_like(tokens, dtype=torch.bool)
        accumulate_gradients(assembly, [Batch(tokens, tokens, mask)])
        heldout_loss(assembly, [Batch(tokens, tokens, mask)])
    assert counters["stats"]["unique_graphs"] <= 6 * len(fields(Regions))


@pytest.mark.parametrize(
    ("layers", "kept"),
    [
        ("experts", set()),
        ("shared", {"add_shared"}),
        ("experts,attention", {"enter_attention", "leave_attention"}),
    ],
)
def test_stretches_with_an_mxfp8_layer_stay_as_they_are(layers, kept):
    config = apply_overrides(nano(), [*GRAPHS, WIDE, f"precision.mxfp8={layers}"])
    regions = build_regions(config)
    names = {each.name for each in fields(Regions)}
    assert {name for name in names if getattr(regions, name) is getattr(EAGER, name)} == kept
    assert build_regions(nano()) is EAGER


def _losses(config) -> list[float]:
    outcome = loop.train(config, resume=None, console=Console(file=io.StringIO()))
    assert outcome is not None
    records = read_metrics(outcome.checkpoint.parents[1] / "metrics.jsonl")
    # The model of a sample has another length at every token.
    assert load_model(read_manifest(outcome.checkpoint)).regions is EAGER
    return [each.loss for each in records if isinstance(each, StepRecord)]


def test_a_run_trains_as_without(make_config, monkeypatch):
    monkeypatch.setattr(loop._Run, "_conclude", lambda self, heldout, saved: saved)
    plain = _losses(make_config("steps=4", "run.heldout_every=2", run="plain"))
    compiled = _losses(make_config("steps=4", "run.heldout_every=2", *GRAPHS, run="compiled"))
    assert compiled == pytest.approx(plain, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("precision.parameters=fp32",),
        ("data.attend=document", "recompute.kind=blocks", "loss.z_loss=1e-3"),
        ("precision.mxfp8=experts,shared", "batch.accumulation=2"),
        ("layout.schedule.kind=zero_bubble_h1", "batch.accumulation=2"),
    ],
    ids=" ".join,
)
@UNSPLIT
def test_a_gpu_trains_as_without(make_config, monkeypatch, settings):
    monkeypatch.setattr(loop._Run, "_conclude", lambda self, heldout, saved: saved)
    words = ("steps=6", "device=cuda", *settings)
    plain = _losses(make_config(*words, run="plain"))
    compiled = _losses(make_config(*words, *DENSE, run="compiled"))
    near = 1e-4 if "precision.parameters=fp32" in settings else 1e-2
    assert compiled == pytest.approx(plain, rel=near)


def test_a_missing_compiler_is_said_before_anything_is_written(make_config, tmp_path, monkeypatch):
    def none() -> str:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    with pytest.raises(ValueError, match=r"'inductor' needs a C\+\+ compiler on a CPU.*kind=none"):
        loop.train(make_config(*DENSE), resume=None, console=Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()
    require_compiler(make_config(*GRAPHS), CPU)
    require_compiler(make_config(), CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["compile.kind=all"], "compile.kind = 'all': must be one of 'none', 'dense'"),
        (["compile.backend=inductor"], "compile.backend: no such key for kind = 'none'"),
        ([*DENSE, "compile.backend=onnx"], "compile.backend = 'onnx'"),
    ],
)
def test_a_wrong_choice_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(nano(), settings)
