"""Progress: a bar for a person at a terminal, plain lines for everything else."""

import io
import re

import pytest
from olmo_trainer.metrics import StepRecord
from olmo_trainer.progress import Progress, log_line, si
from rich.console import Console

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def record(step, **changes):
    values = {
        "step": step,
        "loss": 2.34567,
        "balance_loss": 1.0,
        "auxiliary_loss": 0.01,
        "z_loss": 1.0,
        "grad_norm": 0.84321,
        "learning_rate": 3e-4,
        "tokens": 4096,
        "seconds": 0.2,
        "tokens_per_second": 18234.0,
        "worst_imbalance": 1.42,
        "expert_counts": [[1, 1], [2, 0]],
        "imbalance": [1.0, 1.42],
        "honesty": [-5.0, 0.5],
        "entropy_deficit": [0.0, 0.1],
        "dead_experts": [0, 0],
    }
    return StepRecord(**(values | changes))


def run(steps, *, terminal, width=100, say=(), **options):
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=width, color_system="truecolor")
    with Progress(console=console, **options) as progress:
        for step in steps:
            progress.update(record(step))
        for text in say:
            progress.say(text)
    return output.getvalue()


def test_without_a_terminal_there_are_only_lines():
    output = run(range(1, 26), terminal=False, total_steps=25, log_every=10, say=["[b]done: 1[/b]"])
    lines = output.splitlines()
    assert [line[:10] for line in lines[:-1]] == [
        "step  1/25", "step 10/25", "step 20/25", "step 25/25",
    ]  # fmt: skip
    assert lines[-1] == "[b]done: 1[/b]"
    assert output.endswith("\n")
    assert not CONTROL.search(output)
    assert output.isascii()


def test_a_long_line_is_never_folded():
    text = "checkpoint " + "x" * 300
    for terminal in (False, True):
        assert text in run([], terminal=terminal, width=40, total_steps=5, say=[text])


def test_on_a_terminal_the_bar_is_live_and_the_lines_stay_above():
    output = run(range(1, 6), terminal=True, total_steps=5, log_every=5, say=["[b]x[/b]"])
    assert "\x1b[?25l" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "the cursor was not given back"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert "5/5" in plain
    assert "loss 2.346  18.2k tok/s  load 1.42x" in plain
    assert "[b]x[/b]" in plain
    assert len(re.findall(r"step \d+/5  loss 2\.3457", plain)) == 2  # the first and the last


@pytest.mark.parametrize("width", [80, 60])
def test_the_bar_fits_its_terminal(width):
    output = run(range(1, 3), terminal=True, width=width, total_steps=120_000, log_every=1000)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    bars = [line for line in re.split(r"[\r\n]", plain) if "2/120000" in line]
    assert bars
    assert all(len(line) <= width for line in bars)
    assert any("tok/s  load 1.42x" in line for line in bars)


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    output = io.StringIO()
    with Progress(1, console=Console(file=output, force_terminal=True)) as progress:
        progress.update(record(1))
    assert output.getvalue() == log_line(record(1), 1) + "\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_silent_rank_prints_nothing(terminal):
    steps = range(1, 6)
    assert run(steps, terminal=terminal, total_steps=5, say=["x"], enabled=False) == ""


def test_the_terminal_is_given_back_after_an_error():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True)

    def interrupted():
        with Progress(5, console=console) as progress:
            progress.update(record(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert output.getvalue().rindex("\x1b[?25h") > output.getvalue().rindex("\x1b[?25l")


def test_a_resumed_run_starts_where_it_was_and_says_its_first_step():
    output = run([8, 9, 10], terminal=False, total_steps=30, start_step=7, log_every=10)
    assert [line[:10] for line in output.splitlines()] == ["step  8/30", "step 10/30"]


def test_a_heldout_loss_is_always_shown():
    output = io.StringIO()
    with Progress(100, start_step=1, console=Console(file=output)) as progress:
        progress.update(record(3, heldout_loss=1.23456))
        progress.update(record(4))
    assert output.getvalue().splitlines() == [log_line(record(3, heldout_loss=1.23456), 100)]


def test_log_line():
    assert log_line(record(7), 600) == (
        "step   7/600  loss 2.3457  grad 0.843  lr 3.00e-04  18.2k tok/s  load 1.42x"
    )
    line = log_line(
        record(7, honesty=[0.9, -0.25], dead_experts=[1, 2], heldout_loss=1.5, loss=float("nan")), 7
    )
    assert "loss nan" in line
    assert line.endswith("load 1.42x  honesty -0.25  dead 3  held-out 1.5000")
    dense = record(7, worst_imbalance=None, expert_counts=[], imbalance=[], honesty=[],
                   entropy_deficit=[], dead_experts=[])  # fmt: skip
    assert log_line(dense, 7).endswith("tok/s")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950.4, "950"), (999.4, "999"), (999.6, "1.00k"), (18234, "18.2k"), (99949, "99.9k"),
     (99951, "100k"), (2113280, "2.11M"), (9.996e6, "10.0M"), (7e9, "7.00B"), (1.2e13, "12T"),
     (float("inf"), "inf"), (float("nan"), "nan")],
)  # fmt: skip
def test_si(value, text):
    assert si(value) == text


def test_bad_arguments():
    with pytest.raises(ValueError, match="`log_every` must be at least 1, got 0"):
        Progress(5, log_every=0)
    with pytest.raises(ValueError, match=r"`start_step` must be in \[0, `total_steps`=5\], got 6"):
        Progress(5, start_step=6)
