"""What the run cost: time by phase, useful operations, memory and work of the ranks."""

import numpy as np

from olmo_trainer.progress import si
from olmo_trainer.report import pictures
from olmo_trainer.report.elements import number, table
from olmo_trainer.report.history import RunHistory, finite_mean

_MAX_RANKS = 16


def costs_section(history: RunHistory) -> list[str]:
    """Return the section; nothing for a log that does not say what steps cost."""
    parts = [_time(history), _balance(history), _ranks(history)]
    return [part for part in parts if part]


def _time(history: RunHistory) -> str:
    if not history.phases:
        return ""
    smoothed = pictures.smoothing_note(history.steps)
    drawn = pictures.picture(
        pictures.draw_phases, "phases", f"Where the time of a step goes{smoothed}.", history
    )
    utilization = history.values["model_flops_utilization"]
    share = "the peak of this device and precision is unknown"
    if np.isfinite(utilization).any():
        share = f"{finite_mean(utilization[history.end]):.1%} of the dense BF16 peak at the end"
    if np.isfinite(history.values["flops_per_second"]).any():
        drawn += pictures.picture(
            pictures.draw_flops,
            "flops",
            f"Operations of the model alone, without recompute and padding{smoothed}; {share}.",
            history,
        )
    return f'<section><h2>Time</h2><div class="row wide">{drawn}</div></section>'


def _balance(history: RunHistory) -> str:
    if not history.balance:
        return ""
    rows = [
        [name.replace("_", " "), *map(number, finite_mean(values[history.layer_end]))]
        for name, values in history.balance.items()
    ]
    return (
        "<section><h2>Balance in numbers</h2><p>Of each layer, the mean over the last tenth of the "
        f"steps.</p>{table(['', *history.names], rows)}</section>"
    )


def _ranks(history: RunHistory) -> str:
    ranks = history.ranks
    if ranks is None:
        return ""
    slowest = np.argsort(-np.array(ranks.own_seconds), kind="stable")[:_MAX_RANKS]
    kinds = list(ranks.memory_bytes)
    rows = [
        [
            f"rank {rank}",
            f"{ranks.own_seconds[rank]:.3f} s",
            *(f"{si(ranks.memory_bytes[kind][rank])}" for kind in kinds),
        ]
        for rank in slowest
    ]
    some = f" Of {len(ranks.own_seconds)} ranks the slowest {_MAX_RANKS}." * (
        len(ranks.own_seconds) > _MAX_RANKS
    )
    return (
        "<section><h2>Ranks</h2><p>Work of its own a step, and memory by kind in bytes, when last "
        f"asked.{some}</p>{table(['', 'Own time', *kinds], rows)}</section>"
    )
