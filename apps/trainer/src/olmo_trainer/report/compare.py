"""Several runs on one page: their curves over each other, their ends, and what differs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from olmo_trainer.metrics import StepRecord
from olmo_trainer.progress import si
from olmo_trainer.report import pictures
from olmo_trainer.report.elements import number, table, text
from olmo_trainer.report.history import RunHistory, gather_history, smooth
from olmo_trainer.report.of_run import read_run, summarize
from olmo_trainer.report.page import flatten, html_page, write_page

MAX_RUNS = 6  # as many as there are colours that all can tell apart
Draw = Callable[[Axes, str, RunHistory, np.ndarray], None]


def write_comparison(path: Path, folders: Sequence[Path]) -> Path:
    """Write a page that compares runs, one self-contained HTML file; return its path.

    Args:
        path: The file.
        folders: Of 2 to 6 runs, over or not.

    Raises:
        ValueError: A folder holds no run, or there are too few or too many.
    """
    if not 2 <= len(folders) <= MAX_RUNS:
        raise ValueError(f"a comparison needs 2 to {MAX_RUNS} runs, got {len(folders)}")
    names = _names(folders)
    headers, summaries, histories, tokens = [], [], [], []
    for folder in folders:
        header, records = read_run(folder)
        headers.append(header)
        summaries.append(summarize(header, records))
        histories.append(gather_history(records, None))
        counts = [each.tokens for each in records if isinstance(each, StepRecord)]
        tokens.append(np.cumsum(counts))
    runs = list(zip(names, histories, tokens, strict=True))
    units = {history.loss_unit for history in histories}
    unit = units.pop() if len(units) == 1 else "nats per token, tokens differ"
    configs = [dict(flatten(header.info.get("config", {}))) for header in headers]
    body = [
        f"<header><h1>{len(folders)} runs</h1></header>",
        f"<section><h2>Ends</h2>{_ends(names, summaries, unit)}</section>",
        f"<section><h2>Curves</h2>{_pictures(runs, unit)}</section>",
        f"<section><h2>What differs</h2>{_differences(names, configs)}</section>",
    ]
    return write_page(path, html_page("comparison", body))


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell them apart."""
    parts = [folder.absolute().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"each run must be given once, got {', '.join(map(str, folders))}")


def _ends(names: Sequence[str], summaries: Sequence[Mapping[str, Any]], unit: str) -> str:
    columns: dict[str, Callable[[Any], str]] = {
        "heldout_loss": number,
        "bits_per_byte": number,
        "steps": "{:,}".format,
        "tokens": si,
        "tokens_per_second": si,
        "model_flops_utilization": "{:.1%}".format,
    }
    rows = [
        [name, *(write(of[key]) if key in of else "\u2013" for key, write in columns.items())]
        for name, of in zip(names, summaries, strict=True)
    ]
    heading = [f"Held-out loss, {unit}", "Bits per byte", "Steps", "Tokens", "Tokens/s", "MFU"]
    return table(["Run", *heading], rows)


def _pictures(runs: Sequence[tuple[str, RunHistory, np.ndarray]], unit: str) -> str:
    def training(axes: Axes, colour: str, history: RunHistory, tokens: np.ndarray) -> None:
        values = smooth(history.values["loss"], pictures.smoothing_window(history.steps))
        pictures.curve(axes, tokens, values, colour)

    def heldout(axes: Axes, colour: str, history: RunHistory, tokens: np.ndarray) -> None:
        before = np.searchsorted(history.steps, history.heldout[:, 0], side="right")
        places = np.concatenate([[0], tokens])[before]
        axes.plot(
            *(places, history.heldout[:, 1]),
            color=pictures.COLOURS[colour][0],
            marker="o",
            markersize=3,
        )

    def norm(axes: Axes, colour: str, history: RunHistory, tokens: np.ndarray) -> None:
        values = smooth(history.values["grad_norm"], pictures.smoothing_window(history.steps))
        pictures.curve(axes, tokens, values, colour)

    def speed(axes: Axes, colour: str, history: RunHistory, tokens: np.ndarray) -> None:
        values = smooth(
            history.values["tokens_per_second"], pictures.smoothing_window(history.steps)
        )
        pictures.curve(axes, tokens, values, colour)

    def imbalance(axes: Axes, colour: str, history: RunHistory, tokens: np.ndarray) -> None:
        if history.names:
            values = smooth(
                history.values["worst_imbalance"], pictures.smoothing_window(history.steps)
            )
            pictures.curve(axes, tokens, values, colour)

    drawn: tuple[tuple[str, str, Draw], ...] = (
        ("training", f"training loss ({unit})", training),
        ("heldout", f"held-out loss ({unit})", heldout),
        ("norm", "gradient norm", norm),
        ("imbalance", "worst layer's load / mean", imbalance),
        ("speed", "tokens per second", speed),
    )
    return "".join(
        pictures.picture(_draw, name, "", label, draw, runs) for name, label, draw in drawn
    )


def _draw(label: str, draw: Draw, runs: Sequence[tuple[str, RunHistory, np.ndarray]]) -> Figure:
    """Draw one curve a run over the tokens it has trained on."""
    figure = Figure(figsize=(pictures.WIDE, 3.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylabel(label)
    axes.set_xlabel("tokens")
    axes.grid(axis="y")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for colour, (name, history, tokens) in zip(pictures.LINE_COLOURS, runs, strict=False):
        draw(axes, colour, history, tokens)
        axes.plot([], [], color=pictures.COLOURS[colour][0], label=name)
    pictures.legend(axes, 3)
    return figure


def _differences(names: Sequence[str], configs: Sequence[Mapping[str, str]]) -> str:
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows = [
        [key, *(config.get(key, "\u2013") for config in configs)]
        for key in keys
        if len({config.get(key) for config in configs}) > 1 and key != "run.folder"
    ]
    if not rows:
        return f"<p>{text('Nothing in their configurations.')}</p>"
    return table(["Key", *names], rows)
