"""Routes that found no room at their experts' rank, and the steps that were run again for them."""

import numpy as np

from olmo_trainer.report import pictures
from olmo_trainer.report.elements import table
from olmo_trainer.report.history import RunHistory


def drops_section(history: RunHistory) -> list[str]:
    """Return the section; nothing for a run that dropped nothing and could run no step again."""
    parts, factors = history.values["dropped_part"], history.values["capacity_factor"]
    may_rerun = np.isfinite(factors).any()
    if not may_rerun and not (parts > 0).any():
        return []
    dropping = np.flatnonzero(parts > 0)
    rows: list[tuple[str, str]] = [("Steps that dropped routes", f"{len(dropping):,}")]
    if len(dropping):
        worst = dropping[np.argmax(parts[dropping])]
        most = f"{parts[worst]:.2%} in step {history.steps[worst]:,.0f}"
        rows.append(("Most of a step's routes dropped", most))
    drawn = pictures.picture(
        pictures.draw_dropped, "dropped", "Part of all requested routes that were dropped.", history
    )
    if may_rerun:
        reruns = history.values["reruns"]
        known = factors[np.isfinite(factors)]
        rows += [
            ("Steps run again", f"{np.count_nonzero(reruns):,}, {reruns.sum():,.0f} times in all"),
            ("Steps taken over the limit", f"{history.values['over_capacity'].sum():,.0f}"),
            ("Capacity factor", f"{known[0]:.4g} in the first step, {known[-1]:.4g} in the last"),
        ]
        drawn += pictures.picture(
            pictures.draw_capacity,
            "capacity",
            "Rows that a rank's receive buffers hold, over those of an even load.",
            history,
        )
    return [
        f'<section><h2>Dropped routes</h2><div class="row wide">{drawn}</div>'
        f"{table(['', ''], rows)}</section>"
    ]
