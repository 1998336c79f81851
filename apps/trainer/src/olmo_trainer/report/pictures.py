"""The pictures of a run: loss, expert load, honesty, imbalance, rate, norm, throughput.

SVG drawn by matplotlib's object API (no pyplot, no global state). Each colour is drawn as a fixed
hex code and then replaced by a CSS variable, so that one picture reads well on light and dark
paper.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from olmo_trainer.report.history import RunHistory, smooth

_MAX_POINTS = 600  # of one drawn curve
_MAX_COLUMNS = 180  # of one heat map
WIDE, _HALF, _THIRD = 10.4, 5.1, 3.35  # inches; one inch is about 100 CSS pixels on the page

# Okabe and Ito's colour-blind safe hues; first the code that is drawn, which is the light theme's.
COLOURS = {  # drawn and light, dark
    "ink": ("#1b2430", "#e6e9ee"),
    "muted": ("#5b6675", "#9aa5b4"),
    "grid": ("#e3e7ec", "#2b323c"),
    "blue": ("#0072b2", "#4fa9de"),
    "vermillion": ("#d55e00", "#f0843a"),
    "green": ("#00875f", "#2fbf94"),
    "purple": ("#a3528a", "#d68fbf"),
    "amber": ("#b97f00", "#e6b23c"),
    "sky": ("#3f8fb5", "#7cc4ea"),
}
LINE_COLOURS = ("blue", "vermillion", "green", "purple", "amber", "sky")
_LOAD_COLOURS = LinearSegmentedColormap.from_list(
    "load", [(0.0, 0.447, 0.698, 1.0), (0.5, 0.5, 0.5, 0.0), (0.835, 0.369, 0.0, 1.0)]
)
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "olmo",
    "font.size": 9.0,
    "text.color": COLOURS["ink"][0],
    "axes.edgecolor": COLOURS["muted"][0],
    "axes.labelcolor": COLOURS["muted"][0],
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": COLOURS["grid"][0],
    "grid.linewidth": 0.7,
    "xtick.color": COLOURS["muted"][0],
    "ytick.color": COLOURS["muted"][0],
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "legend.frameon": False,
    "legend.borderaxespad": 0.0,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
}


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep the greatest and the least value of each stretch, and every gap's place."""
    if len(x) <= _MAX_POINTS:
        return x, y
    keep: list[int] = []
    for stretch in np.array_split(np.arange(len(x)), _MAX_POINTS // 2):
        part = y[stretch]
        if np.isfinite(part).any():
            keep += sorted({int(stretch[np.nanargmin(part)]), int(stretch[np.nanargmax(part)])})
        else:
            keep.append(int(stretch[0]))
    return x[keep], y[keep]


def smoothing_window(steps: np.ndarray) -> int:
    """Return over how many of these steps curves are smoothed."""
    return max(1, len(steps) // 60)


def smoothing_note(steps: np.ndarray, word: str = "smoothed") -> str:
    """Return what a caption says of the smoothing, if any; steps may lie apart."""
    window = smoothing_window(steps)
    if window == 1:
        return ""
    apart = round((steps[-1] - steps[0]) / (len(steps) - 1))
    return f", {word} over {window * apart} steps"


def _axes(history: RunHistory, width: float, height: float, label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylabel(label)
    axes.grid(axis="y")
    _step_axis(axes, np.concatenate([history.steps, history.heldout[:, 0]]))
    return figure, axes


def _step_axis(axes: Axes, places: np.ndarray) -> None:
    first, last = float(places.min()), float(places.max())
    axes.set_xlim(first - (first == last), last + (first == last))
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("optimizer step")


def curve(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str, **options: Any) -> None:
    """Draw a curve, thinned to what a picture can show."""
    x, y = _thin(x, y)
    if np.isfinite(y).sum() == 1:  # a line through one point shows nothing
        options |= {"marker": "o", "markersize": 4, "clip_on": False}
    axes.plot(x, y, color=COLOURS[colour][0], **options)


def _raw_and_smooth(
    axes: Axes, history: RunHistory, values: np.ndarray, colour: str, label: str | None = None
) -> None:
    window = smoothing_window(history.steps)
    if window > 1:
        curve(axes, history.steps, values, colour, alpha=0.3, linewidth=0.8)
    curve(axes, history.steps, smooth(values, window), colour, label=label)


def legend(axes: Axes, columns: int) -> None:
    """Name the curves above the picture."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.02),
        ncols=columns,
        handlelength=1.4,
        columnspacing=1.4,
    )


def draw_loss(history: RunHistory) -> Figure:
    """Draw training and held-out loss over steps."""
    figure, axes = _axes(history, WIDE, 3.5, f"cross-entropy ({history.loss_unit})")
    if len(history.steps):
        _raw_and_smooth(axes, history, history.values["loss"], "blue", "training")
    if len(history.heldout):
        x, y = history.heldout.T
        axes.plot(
            x,
            y,
            color=COLOURS["vermillion"][0],
            marker="o",
            markersize=4 if len(x) <= 40 else 2,
            clip_on=False,
            label="held-out",
        )
        if np.isfinite(y[-1]):
            axes.annotate(
                f"{y[-1]:.3f}",
                (x[-1], y[-1]),
                (0, 7),
                textcoords="offset points",
                ha="right",
                color=COLOURS["vermillion"][0],
                weight="bold",
            )
    if history.bytes_per_token is not None:
        scale = np.log(2) * history.bytes_per_token
        bits = axes.secondary_yaxis(
            "right", functions=(lambda nats: nats / scale, lambda bits: bits * scale)
        )
        bits.set_ylabel("bits per byte")
        bits.spines["right"].set_visible(False)
    legend(axes, 2)
    return figure


def draw_sources(history: RunHistory) -> Figure:
    """Draw the held-out loss of each source, the first six by name."""
    figure, axes = _axes(history, WIDE, 2.8, f"held-out ({history.loss_unit})")
    for colour, (name, rows) in zip(LINE_COLOURS, history.sources.items(), strict=False):
        axes.plot(*rows.T, color=COLOURS[colour][0], marker="o", markersize=3, label=name)
    legend(axes, 6)
    return figure


def draw_phases(history: RunHistory) -> Figure:
    """Draw the seconds of each phase of a step, one on the other."""
    figure, axes = _axes(history, _HALF, 3.1, "seconds a step, main rank")
    window = smoothing_window(history.steps)
    names = list(history.phases)
    curves = [smooth(history.phases[name], window) for name in names]
    places = np.unique(np.linspace(0, len(history.steps) - 1, _MAX_POINTS).round().astype(int))
    axes.stackplot(
        history.steps[places],
        *(np.nan_to_num(curve[places]) for curve in curves),
        labels=names,
        colors=[COLOURS[colour][0] for colour, _ in zip(LINE_COLOURS, names, strict=False)],
        alpha=0.8,
        linewidth=0,
    )
    axes.set_ylim(bottom=0)
    legend(axes, 3)
    return figure


def draw_flops(history: RunHistory) -> Figure:
    """Draw useful operations a second of all devices, and what part of their peak that is."""
    figure, axes = _axes(history, _HALF, 3.1, "useful FLOP/s, all devices")
    _raw_and_smooth(axes, history, history.values["flops_per_second"], "green")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


def draw_dropped(history: RunHistory) -> Figure:
    """Draw the part of the routes that found no room."""
    figure, axes = _axes(history, _HALF, 2.6, "dropped / requested routes")
    _raw_and_smooth(axes, history, history.values["dropped_part"], "vermillion")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    return figure


def draw_capacity(history: RunHistory) -> Figure:
    """Draw the capacity factor that each step was taken with."""
    figure, axes = _axes(history, _HALF, 2.6, "capacity factor")
    curve(axes, history.steps, history.values["capacity_factor"], "amber", drawstyle="steps-post")
    axes.set_ylim(bottom=0)
    return figure


def draw_load(history: RunHistory, layer: int, last: bool) -> Figure:
    """Heat map of each expert's load over the steps, and its share of routes at the end."""
    counts = history.counts[:, layer]  # (n, E)
    experts = counts.shape[1]
    height = float(np.clip(0.6 + 0.16 * experts, 1.5, 4.0)) + 0.2 * last
    figure = Figure(figsize=(WIDE, height), layout="constrained")
    grid = figure.add_gridspec(1, 2, width_ratios=(6, 1), wspace=0.03)
    axes, side = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])

    columns = np.array_split(np.arange(len(counts)), min(len(counts), _MAX_COLUMNS))
    summed = np.stack([counts[column].sum(0) for column in columns], axis=1)  # (E, columns)
    ratio = summed * experts / np.maximum(summed.sum(0), 1)
    colour = (np.log(np.clip(ratio, 1 / 3, 3.0)) / np.log(3) + 1) / 2
    colour[:, summed.sum(0) == 0] = 0.5
    steps = history.layer_steps
    _step_axis(axes, steps)
    limits = axes.get_xlim()
    axes.imshow(
        _LOAD_COLOURS(colour, bytes=True),
        aspect="auto",
        interpolation="none",
        extent=(steps[0] - 0.5, steps[-1] + 0.5, experts - 0.5, -0.5),
    )
    axes.set_xlim(limits)
    axes.set_title(history.names[layer], loc="left", weight="bold")
    axes.set_ylabel("expert")
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))

    total = counts[history.layer_end].sum(0)
    share = total / max(total.sum(), 1)
    side.barh(np.arange(experts), share, height=0.72, color=COLOURS["muted"][0], alpha=0.65)
    side.axvline(1 / experts, color=COLOURS["ink"][0], linewidth=1, linestyle=(0, (3, 2)))
    side.set_ylim(experts - 0.5, -0.5)
    side.set_xlim(0, max(1.6 / experts, 1.05 * float(share.max(initial=0))))
    side.xaxis.set_major_locator(MaxNLocator(3))
    side.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    side.set_yticks([])
    if last:
        side.set_xlabel("share at the end")
    else:
        axes.set_xlabel("")
    return figure


def draw_honesty(history: RunHistory) -> Figure:
    """Draw balance honesty per layer, the gerrymandered region shaded."""
    figure, axes = _axes(history, _HALF, 3.1, "honesty  cov(f, P) / var(f)")
    curves = history.pooled_honesty(smoothing_window(history.layer_steps))
    for index, layer in enumerate(history.drawn):
        colour = LINE_COLOURS[index]
        curve(axes, history.layer_steps, curves[:, layer], colour, label=history.names[layer])
    numbers = curves[np.isfinite(curves)]
    low, high = np.percentile(numbers, [2, 98]) if len(numbers) else (0.0, 1.0)
    low, high = float(np.clip(low - 0.1, -2, -0.35)), float(np.clip(high + 0.1, 1.2, 3))
    axes.set_ylim(low, high)
    axes.axhspan(low, 0, color=COLOURS["vermillion"][0], alpha=0.09, linewidth=0)
    for height, word in ((1.0, "honest"), (0.0, "blind")):
        axes.axhline(height, color=COLOURS["muted"][0], linewidth=0.9, linestyle=(0, (3, 2)))
        axes.annotate(
            word,
            (1, height),
            (4, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=COLOURS["muted"][0],
        )
    axes.annotate(
        "gerrymandered",
        (0, 0),
        (5, 5),
        xycoords="axes fraction",
        textcoords="offset points",
        color=COLOURS["vermillion"][0],
    )
    legend(axes, 3)
    return figure


def draw_imbalance(history: RunHistory) -> Figure:
    """Draw max over mean load per layer."""
    figure, axes = _axes(history, _HALF, 3.1, "busiest expert's load / mean load")
    for index, layer in enumerate(history.drawn):
        values = smooth(history.imbalance[:, layer], smoothing_window(history.layer_steps))
        curve(axes, history.layer_steps, values, LINE_COLOURS[index], label=history.names[layer])
    axes.axhline(1, color=COLOURS["muted"][0], linewidth=0.9, linestyle=(0, (3, 2)))
    legend(axes, 3)
    return figure


def draw_learning_rate(history: RunHistory) -> Figure:
    """Draw the learning rate of each update."""
    figure, axes = _axes(history, _THIRD, 2.3, "learning rate")
    curve(axes, history.steps, history.values["learning_rate"], "green")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return figure


def draw_grad_norm(history: RunHistory) -> Figure:
    """Draw the gradient norm before clipping."""
    figure, axes = _axes(history, _THIRD, 2.3, "gradient norm")
    _raw_and_smooth(axes, history, history.values["grad_norm"], "purple")
    axes.set_ylim(bottom=0)
    return figure


def draw_throughput(history: RunHistory) -> Figure:
    """Draw tokens a second."""
    figure, axes = _axes(history, _THIRD, 2.3, "tokens per second")
    _raw_and_smooth(axes, history, history.values["tokens_per_second"], "blue")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


def to_svg(figure: Figure, name: str) -> str:
    """Turn a figure into an inline SVG element that takes its font and colours from the page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>|\s*<defs>\s*<style.*?</defs>", "", svg, flags=re.S)
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)
    # An id must be unique in the page, and every picture has its own `figure_1`.
    svg = re.sub(r'(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
    for colour, (drawn, _) in COLOURS.items():
        svg = svg.replace(drawn, f"var(--{colour})")
    width = 100 * figure.get_figwidth()
    size = f'style="min-width:{0.6 * width:.0f}px;max-width:{1.25 * width:.0f}px"'
    return re.sub(r'width="[^"]*" height="[^"]*"', size, svg.strip(), count=1)


def picture(draw: Callable[..., Figure], name: str, caption: str, *arguments: Any) -> str:
    """Draw, and return the HTML figure with its caption."""
    with mpl.rc_context(_STYLE):
        svg = to_svg(draw(*arguments), name)
    under = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f"<figure>{svg}{under}</figure>"
