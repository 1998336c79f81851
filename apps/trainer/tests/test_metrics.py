"""The metrics log: what is written is read back, and a resumed log tells one history."""

import dataclasses
import io
import json
import math
import subprocess
import sys
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_trainer import metrics
from olmo_trainer.metrics import (
    HeldoutRecord,
    MetricsLog,
    RunHeader,
    StepRecord,
    bits_per_byte,
    read_metrics,
    record_from_dict,
)


def step_record(step, **changes):
    values = {
        "step": step,
        "loss": 1 / 3 + step,
        "balance_loss": 1.01,
        "auxiliary_loss": 0.0101,
        "z_loss": 2.5,
        "grad_norm": 0.7,
        "learning_rate": 3e-4,
        "tokens": 4093,
        "seconds": 0.21,
        "tokens_per_second": 19490.0,
        "worst_imbalance": 1.5,
        "expert_counts": [[3, 0, 1], [1, 2, 1]],
        "imbalance": [2.25, 1.5],
        "honesty": [0.9, -0.1],
        "entropy_deficit": [0.5, 0.06],
        "dead_experts": [1, 0],
    }
    return StepRecord(**(values | changes))


def heldout_record(step):
    return HeldoutRecord(step=step, loss=2.0 + step, tokens=1000, seconds=1.5)


def write_history(path, steps, resume_step=0):
    """Log as a run does: a header, each step, and a held-out pass every third step."""
    with MetricsLog(path, resume_step=resume_step) as log:
        log.write(RunHeader(step=resume_step, info={"began": resume_step}))
        for step in range(resume_step + 1, steps + 1):
            log.write(step_record(step))
            if step % 3 == 0:
                log.write(heldout_record(step))


def test_every_kind_of_record_comes_back_as_it_was(tmp_path):
    records = [
        RunHeader(step=0, info={"text": "\ud800 é \n NaN", "limits": [1, {"deep": None}]}),
        heldout_record(0),
        step_record(1),
        step_record(2, heldout_loss=1.25),
        step_record(7, worst_imbalance=None, expert_counts=[], imbalance=[], honesty=[],
                    entropy_deficit=[], dead_experts=[]),
    ]  # fmt: skip
    path = tmp_path / "new" / "folder" / "metrics.jsonl"
    with MetricsLog(path) as log:
        for record in records:
            log.write(record)
    assert read_metrics(path) == records
    lines = path.read_text("ascii").splitlines()
    assert [json.loads(line)["kind"] for line in lines] == [
        "header", "heldout", "step", "step", "step",
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(loss=st.floats(), rate=st.floats(), counts=st.lists(st.integers(0, 2**62), max_size=3))
def test_any_float_survives_and_the_file_is_strict_json(tmp_path_factory, loss, rate, counts):
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    record = step_record(
        1, loss=loss, learning_rate=rate, expert_counts=[counts], imbalance=[loss],
        honesty=[rate], entropy_deficit=[0.0], dead_experts=[0],
    )  # fmt: skip
    with MetricsLog(path) as log:
        log.write(record)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (back,) = read_metrics(path)
    # repr tells -0.0 from 0.0 and makes a NaN equal to itself.
    assert repr(back) == repr(record)


def test_a_value_out_of_range_is_spelled_as_documented(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(step_record(1, loss=math.nan, grad_norm=math.inf, z_loss=-math.inf))
        log.write(RunHeader(step=1, info={"limit": math.inf, "word": "NaN"}))
    step, header = (json.loads(line) for line in path.read_text().splitlines())
    assert (step["loss"], step["grad_norm"], step["z_loss"]) == ("NaN", "Infinity", "-Infinity")
    assert step["heldout_loss"] is None
    assert read_metrics(path)[1] == RunHeader(step=1, info={"limit": "Infinity", "word": "NaN"})
    assert header["info"]["limit"] == "Infinity"


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(step_record(1))
    assert read_metrics(log.path) == [step_record(1)]
    log.close()
    log.close()


def test_a_torn_last_line_is_skipped_at_every_cut_and_cut_off_by_the_next_writer(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_history(path, 2)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in [*range(last, len(whole) - 1, 7), len(whole) - 2]:
        path.write_bytes(whole[:cut])
        assert read_metrics(path)[1:] == [step_record(1)]
    path.write_bytes(whole[:-1])  # only the end of the line is missing: the record is whole
    assert read_metrics(path)[1:] == [step_record(1), step_record(2)]
    for torn in (whole[: last + 9], whole[:last] + b"\x00\x00\xff", whole[:-1]):
        path.write_bytes(torn)
        with MetricsLog(path, resume_step=2) as log:
            log.write(step_record(3))
        steps = [r.step for r in read_metrics(path) if isinstance(r, StepRecord)]
        assert steps == ([1, 2, 3] if torn == whole[:-1] else [1, 3])


def test_a_fault_in_the_middle_names_file_and_line_and_leaves_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_history(path, 3)
    lines = path.read_bytes().split(b"\n")
    for fault in (b'{"kind": "step", "st', b"[1]", b'{"kind": "other"}', b'{"kind": "step"}'):
        text = b"\n".join([lines[0], fault, *lines[2:]])
        path.write_bytes(text)
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
            read_metrics(path)
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
            MetricsLog(path, resume_step=1)
        assert path.read_bytes() == text


@pytest.mark.parametrize("resume_step", [1, 3, 4, 7, 9])
def test_a_resumed_log_equals_the_log_of_a_run_without_a_stop(tmp_path, resume_step):
    """The lines of steps that will be lived again go; kept ones stay byte for byte."""
    straight, resumed = tmp_path / "straight.jsonl", tmp_path / "resumed.jsonl"
    write_history(straight, 9)
    write_history(resumed, 8)  # the process died after step 8, its checkpoint is older
    write_history(resumed, 9, resume_step=resume_step)

    def without_headers(path):
        lines = path.read_text().splitlines()
        return [line for line in lines if json.loads(line)["kind"] != "header"]

    expected = without_headers(straight)
    if resume_step == 9:  # a checkpoint beyond the log: step 9 was never logged
        expected = expected[:-2]
    assert without_headers(resumed) == expected
    headers = [r.step for r in read_metrics(resumed) if isinstance(r, RunHeader)]
    assert headers == [0, resume_step]


@settings(max_examples=60, deadline=None)
@given(text=st.binary(max_size=40), breaks=st.lists(st.integers(0, 40)), block=st.integers(1, 9))
def test_lines_are_the_same_from_both_ends(text, breaks, block):
    for place in breaks:
        text = text[:place] + b"\n" + text[place:]
    forwards, place = [], 0
    for line in io.BytesIO(text):
        forwards.append((place, line))
        place += len(line)
    with mock.patch.object(metrics, "_BLOCK", block):
        backwards = list(metrics._lines_backwards(io.BytesIO(text)))
    assert backwards == forwards[::-1]


def test_a_resume_touches_nothing_but_the_lines_after_its_step(tmp_path):
    """However long the run: what is kept is not even read, and stays in its file."""
    path = tmp_path / "metrics.jsonl"
    write_history(path, 60)
    whole = path.read_bytes()
    kept = whole[: whole.index(b'{"kind": "step", "step": 51,')]
    garbled = b"#" * 100 + whole[100:]  # nobody may look at the first line
    path.write_bytes(garbled)
    file = path.stat().st_ino
    with mock.patch.object(metrics, "_BLOCK", 512), MetricsLog(path, resume_step=50):
        pass
    assert path.read_bytes() == b"#" * 100 + kept[100:]
    assert path.stat().st_ino == file
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_record_without_layers_keeps_what_sums_them_up(tmp_path):
    whole = step_record(4, balance={"topk_margin": [0.1, 0.2]}, z_losses=[2.0, 3.0], routes=8)
    short = whole.without_layers()
    layers = {"expert_counts", "imbalance", "honesty", "entropy_deficit", "dead_experts"}
    layers |= {"balance", "z_losses"}
    before, after = dataclasses.asdict(whole), dataclasses.asdict(short)
    assert {name for name, value in before.items() if after[name] != value} == layers
    assert not any(after[name] for name in layers)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write(short)
    assert read_metrics(log.path) == [short]


def test_a_header_goes_with_its_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_history(path, 4)
    write_history(path, 8, resume_step=4)
    write_history(path, 6, resume_step=4)
    assert [r.step for r in read_metrics(path) if isinstance(r, RunHeader)] == [0, 4]
    write_history(path, 3, resume_step=2)
    assert [r.step for r in read_metrics(path) if isinstance(r, RunHeader)] == [0, 2]


def test_without_a_resume_step_the_history_is_new(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_history(path, 4)
    path.write_bytes(b"not a record\n" + path.read_bytes())
    write_history(path, 1)
    assert [record.step for record in read_metrics(path)] == [0, 1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_step_is_written_once(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl", resume_step=4) as log:
        with pytest.raises(ValueError, match=r"`step` must be greater than 4.*got 4"):
            log.write(step_record(4))
        log.write(step_record(5))
        with pytest.raises(ValueError, match=r"`step` must be greater than 5.*got 5"):
            log.write(step_record(5))
        with pytest.raises(TypeError, match="not JSON serializable"):
            log.write(RunHeader(step=5, info={"path": object()}))
    assert read_metrics(log.path) == [step_record(5)]
    with pytest.raises(ValueError, match="`resume_step` must be at least 0, got -1"):
        MetricsLog(tmp_path / "other.jsonl", resume_step=-1)


class NotANumber:
    pass


@pytest.mark.parametrize("value", [NotANumber(), None, True, "1.0"])
@pytest.mark.parametrize("nested", [False, True])
def test_only_plain_numbers_enter_a_record(value, nested):
    changes = {"honesty": [0.5, value]} if nested else {"loss": value}
    with pytest.raises(TypeError, match=r"`(loss|honesty)` must hold plain Python numbers, got a"):
        step_record(1, **changes)


def test_the_lists_of_a_record_agree_on_the_layers():
    with pytest.raises(ValueError, match=r"`expert_counts` 2.*`honesty` 1"):
        step_record(1, honesty=[0.5])


def test_a_dict_becomes_its_record():
    record = step_record(3)
    assert record_from_dict(dataclasses.asdict(record)) == record
    with pytest.raises(
        ValueError, match="`kind` must be one of step, ranks, heldout, header, got 'sp'"
    ):
        record_from_dict({"kind": "sp"})
    with pytest.raises(ValueError, match="heldout record has no `lost`"):
        record_from_dict({"kind": "heldout", "lost": 1.0})
    with pytest.raises(ValueError, match=r"missing.*'tokens'"):
        record_from_dict({"kind": "heldout", "step": 1, "loss": 1.0, "seconds": 1.0})


def test_units():
    # A uniform guess over 256 bytes costs 8 bits a byte.
    assert bits_per_byte(math.log(256)) == pytest.approx(8.0)
    assert bits_per_byte(math.log(256), bytes_per_token=4) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="`bytes_per_token` must be positive, got 0"):
        bits_per_byte(1.0, bytes_per_token=0)


@pytest.mark.parametrize(("module", "loads"), [("metrics", False), ("report", True)])
def test_metrics_load_neither_torch_nor_matplotlib(module, loads):
    """The report, which needs matplotlib, shows that the check can fail."""
    code = (
        f"import sys, olmo_trainer.{module}\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == loads
