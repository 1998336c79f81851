"""The runs as one picture: for each recipe the loss, and loss and gradient norm beside BF16's."""

from collections.abc import Sequence
from pathlib import Path

from cases import BASELINE, PRECISIONS
from measures import binned
from training import Run

_COLOURS = {
    "bf16": "#444444",
    "rceil": "#1f77b4",
    "floor": "#d62728",
    "coarse": "#2ca02c",
    "rceil-all": "#17becf",
    "floor-all": "#ff7f0e",
    "coarse-all": "#bcbd22",
    "control": "#9467bd",
}
_BINS = 40
_TITLES = (
    "training loss, nats a byte",
    "loss less BF16's, same seed",
    "gradient norm over BF16's, same seed",
)

Points = list[tuple[float, float]]  # step, value


def draw(path: Path, runs: Sequence[Run]) -> Path | None:
    """Draw whole runs into the SVG file `path`: a line a run; `None` without matplotlib or runs."""
    whole = [run for run in runs if not run.failure]
    recipes = list(dict.fromkeys(run.case.recipe for run in whole))
    if not recipes:
        return None
    try:
        import matplotlib
    except ImportError:  # a GPU machine may lack it; the numbers come back all the same
        return None

    matplotlib.use("agg")
    # Text stays text, and without salt and date the same numbers would not give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "precision"})
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(recipes),
        len(_TITLES),
        figsize=(14, 1 + 3.6 * len(recipes)),
        layout="constrained",
        squeeze=False,
    )
    for recipe, panels in zip(recipes, grid, strict=True):
        lines = panel_lines([run for run in whole if run.case.recipe == recipe])
        for axes, title, level, of_panel in zip(
            panels, _TITLES, (None, 0.0, 1.0), lines, strict=True
        ):
            for precision, points in of_panel:
                axes.plot(*zip(*points, strict=True), color=_COLOURS[precision], linewidth=1.1)
            late = [value for _, points in of_panel for _, value in _late(points)]
            if late:  # the start would set the scale
                room = 0.05 * (max(late) - min(late)) or 0.01
                axes.set_ylim(min(late) - room, max(late) + room)
            if level is not None:
                axes.axhline(level, color=_COLOURS[BASELINE], linewidth=0.8)
            axes.set_title(f"{recipe}: {title}", fontsize=9)
            axes.set_xlabel("step", fontsize=8)
            axes.grid(alpha=0.3)
    for precision in dict.fromkeys(run.case.precision for run in whole):
        grid[0][0].plot([], [], color=_COLOURS[precision], label=PRECISIONS[precision][0])
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def panel_lines(runs: Sequence[Run]) -> tuple[list[tuple[str, Points]], ...]:
    """Return the lines of each panel of one recipe's runs, each with its precision."""
    losses, above, ratios = [], [], []
    beside = {run.case.seed: run for run in runs if run.case.precision == BASELINE}
    for run in runs:
        precision, other = run.case.precision, beside.get(run.case.seed)
        losses.append((precision, binned(run.losses, _BINS)))
        if other is None or other is run:
            continue
        differences = [mine - its for mine, its in zip(run.losses, other.losses, strict=True)]
        above.append((precision, binned(differences, _BINS)))
        norms = zip(binned(run.norms, _BINS), binned(other.norms, _BINS), strict=True)
        ratios.append((precision, [(step, mine / its) for (step, mine), (_, its) in norms]))
    return losses, above, ratios


def _late(points: Points) -> Points:
    return [point for point in points if point[0] >= points[-1][0] / 10]
