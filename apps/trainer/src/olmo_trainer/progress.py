"""What a person sees while a run trains: a live bar, and a line of text per interval above it.

On a terminal the bar shows the step, loss, tokens a second, worst expert load and time left. When
the output is a file or a pipe (CI, `torchrun` with redirects) there is no bar and no control code,
only the lines, each flushed as it is written and in ASCII but for text given to `say`.

One rank of a run shows progress: the others build theirs with `enabled=False`, which makes every
call do nothing, so that the loop needs no question about ranks.
"""

from __future__ import annotations

import math
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from olmo_trainer.metrics import StepRecord


class Progress:
    """Shows the steps of a run; a context manager, so that the terminal is always given back.

    Args:
        total_steps: Steps of the whole run.
        start_step: Steps done before this process began; 0 unless it resumed.
        log_every: Steps between two log lines. The first step of the process, the last step of
            the run, a skipped step and one with a held-out loss always get one.
        console: Where to print; standard output when None. Its `is_terminal` decides on the bar.
        enabled: False prints nothing at all.

    Raises:
        ValueError: `log_every` is below 1, or `start_step` is not in [0, `total_steps`].
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        log_every: int = 10,
        console: Console | None = None,
        enabled: bool = True,
    ) -> None:
        if log_every < 1:
            raise ValueError(f"`log_every` must be at least 1, got {log_every}.")
        if not 0 <= start_step <= total_steps:
            raise ValueError(
                f"`start_step` must be in [0, `total_steps`={total_steps}], got {start_step}."
            )
        self._total_steps = total_steps
        self._first_step = start_step + 1
        self._log_every = log_every
        self._console = console or Console(markup=False, emoji=False, highlight=False)
        self._enabled = enabled
        self._bar: RichProgress | None = None
        if enabled and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = _bar(self._console)
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, status="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, record: StepRecord) -> None:
        """Move the bar to `record` and print its log line when one is due."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, status=_status(record))
        due = record.step in (self._first_step, self._total_steps) or record.skipped
        if due or record.step % self._log_every == 0 or record.heldout_loss is not None:
            self.say(log_line(record, self._total_steps))

    def say(self, text: str) -> None:
        """Print a line of text as it is, above the bar when there is one."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self._console.quiet:
            try:
                self._console.file.write(text + "\n")
                self._console.file.flush()
            except BrokenPipeError:
                self._console.on_broken_pipe()


def log_line(record: StepRecord, total_steps: int) -> str:
    """Write one step as a line of ASCII text of fixed columns.

    The honesty of the worst loaded layer is shown when it is below 0: there the balance loss
    rewards the imbalance that it should remove. Steps that the guard left out are counted, in
    capitals where this one is among them.
    """
    width = len(str(total_steps))
    parts = [
        f"step {record.step:>{width}}/{total_steps}",
        f"loss {record.loss:.4f}",
        f"grad {record.grad_norm:.3f}",
        f"lr {record.learning_rate:.2e}",
        f"{si(record.tokens_per_second):>5} tok/s",
    ]
    if record.worst_imbalance is not None:
        parts.append(f"load {record.worst_imbalance:.2f}x")
    if record.imbalance:
        worst = max(range(len(record.imbalance)), key=lambda layer: record.imbalance[layer])
        if record.honesty[worst] < 0:
            parts.append(f"honesty {record.honesty[worst]:.2f}")
    if dead := sum(record.dead_experts):
        parts.append(f"dead {dead}")
    if record.dropped:
        parts.append(f"dropped {si(record.dropped)}")
    if record.num_skipped:
        parts.append(f"{'SKIPPED' if record.skipped else 'skipped'} {record.num_skipped}")
    if record.heldout_loss is not None:
        parts.append(f"held-out {record.heldout_loss:.4f}")
    return "  ".join(parts)


def si(value: float) -> str:
    """Write a positive number in three figures and a letter: 950, 18.2k, 2.10M, 7.00B."""
    if not math.isfinite(value):
        return str(value)
    for letter in ("", "k", "M", "B"):
        if abs(value) < 999.5:
            digits = 0 if not letter or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
            return f"{value:.{digits}f}{letter}"
        value /= 1000
    return f"{value:.3g}T"


def _bar(console: Console) -> RichProgress:
    return RichProgress(
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )


def _status(record: StepRecord) -> str:
    load = "" if record.worst_imbalance is None else f"  load {record.worst_imbalance:.2f}x"
    return f"loss {record.loss:.3f}  {si(record.tokens_per_second)} tok/s{load}"
