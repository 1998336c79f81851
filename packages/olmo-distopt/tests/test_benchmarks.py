"""The benchmarks run: every step but the timing, at tiny sizes on the CPU."""

import runpy
import sys
from pathlib import Path

import pytest

# What importing torch's sharded optimizer says.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch):
    """The benchmarks' modules have everyday names: leave none of them behind."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def _main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(BENCHMARKS), run_name="__main__")
    return exit_.value.code


def test_a_dry_run_compares_the_contenders_and_writes_a_report(tmp_path, monkeypatch):
    arguments = ("--dry-run", "--only", "update,muon,memory", "--out", tmp_path)
    assert _main(monkeypatch, *arguments) == 0
    (report,) = tmp_path.glob("*.md")
    text = report.read_text()
    for contender in (
        *("ours, reference", "torch fused, then a copy", "torch.optim.Muon"),
        *("torch copies of as many bytes", "torch copy of FP32"),
    ):
        assert f"| {contender} |" in text, contender
    assert "optimizer   12." in text
    assert "AdamW step of 20 tensors of 256 parameters" in text
    assert "norm of 20 gradients of 256 elements" in text
    assert "FAILED" not in text
    assert list(tmp_path.glob("*.json"))


def test_an_unknown_topic_is_refused(tmp_path, monkeypatch, capsys):
    assert _main(monkeypatch, "--dry-run", "--only", "speed", "--out", tmp_path) == 2
    assert "--only takes update, muon, memory, ranks, got speed" in capsys.readouterr().err


def _ranks(rank, world, folder):
    """What a process of the topic `ranks` does, in workers that are there already."""
    sys.path.insert(0, folder)
    try:
        import ranks
        from cells import Settings

        settings = Settings(device="cpu", rounds=2, dry=True, ranks=world)
        return [
            sorted(cell.samples) for cell in (ranks._steps(settings), ranks._bandwidth(settings))
        ]
    finally:
        sys.path.remove(folder)


@pytest.mark.dist
def test_the_contenders_across_ranks_agree(processes):
    for steps, bandwidth in processes.run(_ranks, str(BENCHMARKS), world=2):
        assert steps == [
            "DDP, ZeroRedundancyOptimizer",
            "FSDP2, resharded after backward",
            "ours, all_reduce",
            "ours, reduce_scatter",
        ]
        assert len(bandwidth) == 4
