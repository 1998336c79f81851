"""Time by phase, memory by kind, useful operations: what a step costs."""

import io
import time

import pytest
import torch
from olmo_trainer import loop
from olmo_trainer.build import assemble
from olmo_trainer.device_peaks import peak_flops
from olmo_trainer.memory import KINDS, measure_memory
from olmo_trainer.mesh import create_mesh
from olmo_trainer.metrics import HeldoutRecord, RanksRecord, RunHeader, StepRecord, read_metrics
from olmo_trainer.open_data import open_data
from olmo_trainer.phases import PHASES, PhaseClock
from olmo_trainer.sizes import count_flops, count_parameters, count_weight_flops
from rich.console import Console
from torch import nn

CPU = torch.device("cpu")


def test_the_clock_gives_each_phase_its_time_and_beats():
    beats, stage = [], nn.Identity()
    clock = PhaseClock(CPU, lambda step, phase: beats.append((step, phase)), [stage])
    clock.begin(4)
    time.sleep(0.02)
    clock.enter("wait")
    for _ in range(2):
        stage(torch.zeros(1))
        time.sleep(0.03)
    clock.enter("reduce")
    time.sleep(0.01)
    clock.enter("step")
    seconds = clock.end().seconds()
    assert list(seconds) == list(PHASES)
    assert seconds["data"] >= 0.02
    assert seconds["backward"] >= 0.06
    assert seconds["reduce"] >= 0.01
    assert seconds["forward"] < seconds["backward"]
    stage(torch.zeros(1))  # an evaluation between steps beats and counts nowhere
    expected = ["data", "wait", *2 * ["forward", "backward"], "reduce", "step"]
    assert beats == [*((4, each) for each in expected), (4, "evaluate"), (4, "evaluate")]
    clock.begin(5)
    assert clock.end().seconds()["backward"] == 0


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA GB300", 2500.0),
        ("NVIDIA A40", 149.7),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
    ],
)
def test_known_devices_have_their_dense_peak(name, teraflops):
    assert peak_flops(name) == teraflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA H800 PCIe",
        "AMD Instinct MI300X",
        "x86_64 CPU, 2 threads",
        "",
    ],
)
def test_unknown_devices_have_none(name):
    assert peak_flops(name) is None


def test_memory_by_kind_is_that_of_the_tensors(make_config):
    config = make_config("precision.parameters=bf16")
    assembly = assemble(config, create_mesh(config.layout, CPU))
    held, total = measure_memory(assembly), count_parameters(config.model).total
    assert tuple(held) == KINDS
    assert held["weights"] == 2 * total
    assert held["gradients"] == 4 * total
    assert held["optimizer"] == 12 * total + 8  # and the number of steps
    assert held["peak"] > held["weights"] + held["gradients"] + held["optimizer"]
    assert held["other"] == held["peak"] - 18 * total - 8


def _train(config):
    outcome = loop.train(config, resume=None, console=Console(file=io.StringIO(), width=200))
    assert outcome is not None
    return read_metrics(outcome.checkpoint.parents[1] / "metrics.jsonl")


def test_a_run_writes_it_all_down(make_config, monkeypatch):
    monkeypatch.setattr(loop, "peak_flops", lambda name: 1e12)
    config = make_config("steps=3", "run.log_every=2", "precision.parameters=bf16")
    records = _train(config)
    steps = [each for each in records if isinstance(each, StepRecord)]
    layers = len(config.model.moe_layers)
    flops = count_flops(config.model, config.data.sequence_length)
    for step in steps:
        assert step.flops_per_second == pytest.approx(flops * step.tokens_per_second)
        assert step.model_flops_utilization == pytest.approx(step.flops_per_second / 1e12)
        assert sum(step.phase_seconds.values()) == pytest.approx(step.seconds, abs=0.05)
        assert step.phase_seconds["forward"] > 0
        assert step.phase_seconds["backward"] > 0
        assert step.balance["imbalance"] == pytest.approx(step.imbalance)
        assert step.balance["honesty"] == pytest.approx(step.honesty)
        assert all(len(values) == layers for values in step.balance.values())
        assert sum(step.z_losses) / layers == pytest.approx(step.z_loss)
    ranks = [each for each in records if isinstance(each, RanksRecord)]
    assert [each.step for each in ranks] == [2, 3]
    assert ranks[0].memory_bytes["weights"] == [2 * count_parameters(config.model).total]
    header = next(each for each in records if isinstance(each, RunHeader))
    assert header.info["bytes_per_token"] == 1.0
    assert header.info["peak_flops"] == 1e12


def test_documents_apart_count_the_positions_that_a_token_sees(make_config, monkeypatch):
    """By hand, from the tokens: each document of a sequence, of all microbatches, once."""
    monkeypatch.setattr(loop, "peak_flops", lambda name: 1e12)
    settings = ("steps=2", "batch.accumulation=2", "precision.parameters=bf16")
    window = ("model.attention.window=7", "model.attention.full_every=2")
    config = make_config(*settings, *window, "data.attend=document", "data.sequence_length=512")
    steps = [each for each in _train(config) if isinstance(each, StepRecord)]
    data, model = open_data(config), config.model
    query = model.attention.num_heads * model.attention.head_dim
    for step in steps:
        pairs = 0.0
        batch = data.global_batch(step.step - 1)
        for tokens, mask in zip(batch.tokens_BS.tolist(), batch.mask_BS.tolist(), strict=True):
            lengths = [0]
            for token, is_real in zip(tokens, mask, strict=True):
                lengths += [0] * (token == 256)  # an end begins the next document
                lengths[-1] += is_real
            for length in lengths:
                wide = min(7, length)
                # Two layers see all, two a window; halves of squares, as the report counts.
                pairs += 2 * length**2 / 2 + 2 * (wide * length - wide**2 / 2)
        expected = count_weight_flops(model) * step.tokens + 12 * query * pairs
        assert step.flops_per_second * step.seconds == pytest.approx(expected, rel=1e-9)
        most = count_flops(model, 512) * step.tokens
        assert step.flops_per_second * step.seconds < most
        assert step.model_flops_utilization == pytest.approx(step.flops_per_second / 1e12)


def test_what_is_unknown_says_so(make_config):
    # FP32 on a CPU.
    records = _train(make_config("steps=1"))
    (step,) = (each for each in records if isinstance(each, StepRecord))
    assert step.model_flops_utilization is None
    assert step.flops_per_second is not None
    assert next(each for each in records if isinstance(each, RunHeader)).info["peak_flops"] == (
        "unknown"
    )


def test_the_heldout_loss_is_there_for_each_source(make_config, tmp_path):
    folders = {}
    for name, text in (("letters", "abcd efgh " * 60), ("digits", "0123 4567 " * 30)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        for index in range(8):
            (folders[name] / f"{index}.txt").write_text(text + str(index))
    sources = ", ".join(
        f'"{name}": {{"source": {{"kind": "text_folder", "path": "{path}"}}}}'
        for name, path in folders.items()
    )
    config = make_config("steps=2")
    from olmo_trainer.overrides import apply_overrides

    mixed = apply_overrides(
        config, ["data.source.kind=mixture", f"data.source.sources={{{sources}}}"]
    )
    passes = [each for each in _train(mixed) if isinstance(each, HeldoutRecord)]
    assert [each.step for each in passes] == [0, 2]
    for each in passes:
        assert set(each.source_losses) == set(each.source_tokens) == {"letters", "digits"}
        assert sum(each.source_tokens.values()) == each.tokens
        mean = sum(each.source_losses[s] * each.source_tokens[s] for s in folders) / each.tokens
        assert each.loss == pytest.approx(mean)
        assert each.source_losses["letters"] != each.source_losses["digits"]
