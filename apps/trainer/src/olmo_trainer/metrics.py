"""What a run writes down: one JSON line per optimizer step, kept as a true history.

The file is JSON Lines in ASCII. Every line is one object whose `kind` names its form:

    {"kind": "header", "step": 0, "info": {...}}            a process began after `step` steps
    {"kind": "step", "step": 1, "loss": 5.61, ...}          one optimizer step, a `StepRecord`
    {"kind": "ranks", "step": 20, "own_seconds": [...]}     each rank's own time a step
    {"kind": "heldout", "step": 100, "loss": 2.9, ...}      one pass over the held-out documents

Steps count from 1: record `s` is what step `s` did, and a checkpoint of step `s` holds the weights
after it. Numbers are Python's shortest exact form, so that reading gives back the same floats.
JSON has no word for the values of a run that went wrong: they are written as the strings
`"NaN"`, `"Infinity"` and `"-Infinity"` and read back as floats (in a header's `info`, which may
hold text of its own, they stay strings). `null` is a value that was not measured.

A line is flushed as soon as it is written, so a killed process loses at most the line it was in;
on a GPU also that of the step before, which is written when the next one is under way.
Such a torn last line is skipped by a reader and cut off by the next writer.

Units: a loss is in nats per token. One byte-level token is one byte, so bits per byte are
`loss / ln 2`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

METRICS = "metrics.jsonl"  # in a run's folder
_PER_LAYER = ("expert_counts", "imbalance", "honesty", "entropy_deficit", "dead_experts")
_BLOCK = 2**20  # bytes that are read at once from the end
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step of the whole run (all ranks, all microbatches), as plain numbers.

    Lists of layers hold one entry per MoE layer, in depth order. All of them are empty in a dense
    model, and in a step that wrote none (`without_layers`).

    Attributes:
        step: Number of the step, from 1.
        loss: Cross-entropy in nats per token, the mean over the step's valid tokens.
        balance_loss: Balance loss, the mean over the MoE layers; 1 when balanced.
        auxiliary_loss: The weighted sum that was optimised beside the cross-entropy.
        z_loss: Router z-loss, the mean over the MoE layers, before its weight.
        grad_norm: Global gradient norm before clipping.
        learning_rate: The rate this step's update used.
        tokens: Valid tokens of the step.
        seconds: Wall time of the step, the sum of its phases; on a GPU that of its stream.
        tokens_per_second: Valid tokens per second of that time.
        worst_imbalance: Greatest of `imbalance`; None without an MoE layer.
        expert_counts: Routes requested per expert, E integers a layer.
        imbalance: Busiest expert's load over the mean load, in [1, E].
        honesty: cov(f, P) / var(f) of load and probability: 1 honest, 0 blind, below 0
            gerrymandered.
        entropy_deficit: How far the load's entropy is below that of a uniform load.
        dead_experts: Experts that got no route.
        heldout_loss: Held-out loss in nats per token, when this step measured it.
        head_z_loss: z-loss of the head's logits, before its weight; None when it has none.
        dropped: Routes of all layers that found no room at their experts' rank.
        skipped: 1 when the guard left this step out, else 0.
        num_skipped: Steps left out so far.
        reruns: Times that the step was run again because it dropped too many routes; every other
            number but `seconds` and `phase_seconds` is of its last run.
        capacity_factor: Of the dispatcher in the last run; None where no step may run again.
        over_capacity: 1 when the step was taken although it dropped too many routes, else 0.
        balance: The numbers of olmo_routing's `measure_balance` but `tokens_with_drops`, by name: a
            list of one entry per MoE layer. `gerrymandered` is 0 or 1.
        z_losses: Router z-loss of each MoE layer.
        phase_seconds: Seconds of the main rank in each phase of the step (`phases.py`).
        flops_per_second: Useful operations a second of all devices together: no recompute, no
            padding. None in a log of before it was measured.
        routes: Routes requested in all layers; None in a log of before it was written.
        model_flops_utilization: Of one device, over its dense BF16 peak; None where that is not
            known, or parameters are FP32.

    Raises:
        TypeError: A value is not a plain Python number (a tensor, say).
        ValueError: The lists do not all have one entry per MoE layer.
    """

    step: int
    loss: float
    balance_loss: float
    auxiliary_loss: float
    z_loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    tokens_per_second: float
    worst_imbalance: float | None = None
    expert_counts: list[list[int]] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    honesty: list[float] = field(default_factory=list)
    entropy_deficit: list[float] = field(default_factory=list)
    dead_experts: list[int] = field(default_factory=list)
    heldout_loss: float | None = None
    head_z_loss: float | None = None
    dropped: int = 0
    skipped: int = 0
    num_skipped: int = 0
    reruns: int = 0
    capacity_factor: float | None = None
    over_capacity: int = 0
    balance: dict[str, list[float]] = field(default_factory=dict)
    z_losses: list[float] = field(default_factory=list)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    flops_per_second: float | None = None
    routes: int | None = None
    model_flops_utilization: float | None = None

    def __post_init__(self) -> None:
        _require_plain_numbers(self)
        lengths = {name: len(getattr(self, name)) for name in _PER_LAYER}
        lengths |= {f"balance.{name}": len(values) for name, values in self.balance.items()}
        if self.z_losses:
            lengths["z_losses"] = len(self.z_losses)
        if len(set(lengths.values())) > 1:
            raise ValueError(
                "The per-layer lists must have one entry per MoE layer each, got lengths "
                + ", ".join(f"`{name}` {length}" for name, length in lengths.items())
                + "."
            )

    def without_layers(self) -> StepRecord:
        """Return the record without what it says of each layer; what sums them up stays."""
        nothing: dict[str, Any] = {name: [] for name in (*_PER_LAYER, "z_losses")}
        return replace(self, **nothing, balance={})


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutRecord:
    """One pass over the held-out documents.

    Attributes:
        step: Optimizer steps done before the pass (0: the untrained model).
        loss: Held-out cross-entropy in nats per token, the mean over valid tokens.
        tokens: Valid tokens of the pass.
        seconds: Wall time of the pass.
        source_losses: The same of each source of a mixture, by its name.
        source_tokens: Valid tokens of each source.

    Raises:
        TypeError: A value is not a plain Python number.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    source_losses: dict[str, float] = field(default_factory=dict)
    source_tokens: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_plain_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """The start of a process: a fresh run at step 0, or a resumed one later.

    Attributes:
        step: Optimizer steps done when the process began.
        info: What is worth keeping about it (config, versions, hardware), as JSON values.
    """

    step: int
    info: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRecord:
    """What each rank did over the steps since the last such record, or since the start.

    Attributes:
        step: The last of these steps.
        own_seconds: Of each rank, in order: its mean time a step in data, forward and backward.
        memory_bytes: Of each rank, by kind (`memory.py`).

    Raises:
        TypeError: A value is not a plain Python number.
    """

    step: int
    own_seconds: list[float]
    memory_bytes: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_plain_numbers(self)


Record = StepRecord | HeldoutRecord | RanksRecord | RunHeader
_KINDS: dict[str, type[Record]] = {
    "step": StepRecord,
    "ranks": RanksRecord,
    "heldout": HeldoutRecord,
    "header": RunHeader,
}
_NAMES = {form: kind for kind, form in _KINDS.items()}


class MetricsLog:
    """Appends records to a JSON Lines file; only one process of a run opens one.

    Opening settles what the past was. The lines of steps after `resume_step` are cut off, with the
    headers of the processes that made only such lines, because a resumed run will live these steps
    again; so the file always tells one history. They are at its end: it is read backwards as far as
    they go, and what is before them is neither read nor written, however long the run is.

    Args:
        path: The file; its folder is made when missing.
        resume_step: Step of the checkpoint that the run goes on from. 0, the default, starts a
            new history: as with `open(path, "w")`, nothing of an older file is kept.

    Raises:
        ValueError: `resume_step` is negative, or a line that was read, other than a torn last one,
            is not a record; the file is left as it was.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int = 0) -> None:
        if resume_step < 0:
            raise ValueError(f"`resume_step` must be at least 0, got {resume_step}.")
        self.path = Path(path)
        self._last_step = resume_step
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            end, is_whole = _end_of_history(file, resume_step) if resume_step else (0, True)
            file.truncate(end)
            if not is_whole:
                file.write(b"\n")
        self._file = self.path.open("a", encoding="utf-8", newline="\n")

    def write(self, record: Record) -> None:
        """Append one record and flush it.

        Raises:
            ValueError: A `StepRecord` that does not come after every step already in the log.
            TypeError: A header's `info` holds something that JSON cannot.
        """
        if isinstance(record, StepRecord) and record.step <= self._last_step:
            raise ValueError(
                f"`step` must be greater than {self._last_step}, the last step of the log, "
                f"got {record.step}; open the log with `resume_step` to live steps again."
            )
        line = {"kind": _NAMES[type(record)], **asdict(record)}
        self._file.write(json.dumps(_spell(line), allow_nan=False) + "\n")
        self._file.flush()
        if isinstance(record, StepRecord):
            self._last_step = record.step

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[Record]:
    """Read every record of a log, in the order in which they were written.

    A last line that was cut off by a crash is skipped.

    Raises:
        ValueError: A line before the last, or a whole last line, is not a record; the message
            names the file and the line.
    """
    return list(iterate_metrics(path))


def record_from_dict(values: Mapping[str, Any]) -> Record:
    """Make a record of one decoded line; a missing `kind` means a step.

    Raises:
        ValueError: An unknown `kind`, an unknown key or a missing one.
    """
    kind = values.get("kind", "step")
    if kind not in _KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(_KINDS)}, got {kind!r}.")
    form = _KINDS[kind]
    body = {key: value for key, value in values.items() if key != "kind"}
    unknown = body.keys() - {entry.name for entry in fields(form)}
    if unknown:
        raise ValueError(f"A {kind} record has no {', '.join(f'`{k}`' for k in sorted(unknown))}.")
    try:
        return form(**(body if form is RunHeader else _unspell(body)))
    except TypeError as error:
        raise ValueError(f"A {kind} record needs its fields as plain numbers: {error}") from error


def bits_per_byte(loss: float, *, bytes_per_token: float = 1.0) -> float:
    """Turn a loss in nats per token into bits per byte of text, `loss / (ln 2 * bytes_per_token)`.

    Args:
        loss: Cross-entropy in nats per token.
        bytes_per_token: Mean length of a token; 1 for byte-level tokens.

    Raises:
        ValueError: `bytes_per_token` is not positive.
    """
    if not bytes_per_token > 0:
        raise ValueError(f"`bytes_per_token` must be positive, got {bytes_per_token}.")
    return loss / (math.log(2.0) * bytes_per_token)


def iterate_metrics(path: str | os.PathLike[str]) -> Iterator[Record]:
    """Yield what `read_metrics` returns, a record at a time: the file need not fit into memory."""
    path = Path(path)
    with path.open("rb") as file:
        for index, line in enumerate(file):
            try:
                record = _record_of(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {index + 1} {error}") from error
            if record is not None:
                yield record


def _record_of(line: bytes) -> Record | None:
    """Return the record of a line, `None` for what was cut off in it: a last line, without an end.

    Raises:
        ValueError: It is no record.
    """
    try:
        values = json.loads(line.decode("utf-8"))
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        if not line.endswith(b"\n"):
            return None
        raise ValueError(f"is not a record: {error}") from error
    try:
        return record_from_dict(values)
    except ValueError as error:
        raise ValueError(f"is not a record: {error}") from error


def _end_of_history(file: BinaryIO, resume_step: int) -> tuple[int, bool]:
    """Return where the lines of the first `resume_step` steps end, and whether with a line's end.

    Raises:
        ValueError: A line after them, or the last of them, is no record.
    """
    for start, line in _lines_backwards(file):
        try:
            record = _record_of(line)
        except ValueError as error:
            file.seek(0)
            number = 1 + sum(1 for _ in iter(file.readline, b"") if file.tell() <= start)
            raise ValueError(f"{file.name}, line {number} {error}") from error
        if record is not None and _happened(record, resume_step):
            return start + len(line), line.endswith(b"\n")
    return 0, True


def _lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield each line, the last first, with the place where it begins."""
    start, rest = file.seek(0, os.SEEK_END), b""  # `rest` begins at `start`, in a line or before it
    while start:
        size = min(_BLOCK, start)
        start = file.seek(start - size)
        *whole, torn = (file.read(size) + rest).split(b"\n")
        lines = [each + b"\n" for each in whole] + [torn] * bool(torn)
        rest, place = lines[0], start + sum(map(len, lines))
        for line in reversed(lines[1:]):
            place -= len(line)
            yield place, line
    if rest:
        yield 0, rest


def _happened(record: Record, resume_step: int) -> bool:
    """Whether a line belongs to the first `resume_step` steps; a header goes with its steps."""
    if isinstance(record, RunHeader):
        return record.step < resume_step
    return record.step <= resume_step


def _require_plain_numbers(record: StepRecord | HeldoutRecord | RanksRecord) -> None:
    for entry in fields(record):
        values = [getattr(record, entry.name)]
        while values:
            value = values.pop()
            if isinstance(value, (list, tuple)):
                values.extend(value)
            elif isinstance(value, dict):
                values.extend(value.values())
            elif type(value) not in (int, float) and not (value is None and entry.default is None):
                raise TypeError(
                    f"`{entry.name}` must hold plain Python numbers, got a "
                    f"{type(value).__name__}; convert it first, as with `.item()`."
                )


def _spell(value: Any) -> Any:
    """Replace the floats that JSON cannot write by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _spell(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spell(entry) for entry in value]
    return value


def _unspell(value: Any) -> Any:
    """Undo `_spell`."""
    if isinstance(value, str):
        return _WORDS.get(value, value)
    if isinstance(value, dict):
        return {key: _unspell(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_unspell(entry) for entry in value]
    return value
