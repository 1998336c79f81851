"""The report of a run: one HTML file that needs nothing else, pictures and all.

    headline numbers | loss | expert load per layer | balance honesty, imbalance | rate, norm
    sampled text | config | what it ran on

Pictures are SVG drawn by matplotlib's object API (no pyplot, no global state) and put inline. Each
colour is drawn as a fixed hex code and then replaced by a CSS variable, so that one picture reads
well on light and dark paper. The page is well-formed XML, links to nothing, and is a function of
its arguments alone: the same run gives the same bytes.

Balance honesty of an MoE layer, from its shares of routes `f` and mean gate probability `P` over E
experts, is the slope of `P` on `f`:

    honesty = cov(f, P) / var(f)        1 honest, 0 blind, below 0 gerrymandered

The balance loss `E * sum f P` equals `1 + E^2 cov(f, P)`, so it sees imbalance only as far as the
layer is honest; below 0 it pays for imbalance. Near perfect balance `var(f)` vanishes and the
slope of one step is noise: a curve here pools a window of steps, `sum cov / sum var`.
"""

from __future__ import annotations

import html
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from olmo_trainer.metrics import HeldoutRecord, Record, StepRecord, record_from_dict
from olmo_trainer.progress import si

_MAX_POINTS = 600  # of one drawn curve
_MAX_COLUMNS = 180  # of one heat map
_MAX_LAYERS = 6  # drawn; a table lists them all
_WIDE, _HALF, _THIRD = 10.4, 5.1, 3.35  # inches; one inch is about 100 CSS pixels on the page

# Okabe and Ito's colour-blind safe hues; first the code that is drawn, which is the light theme's.
_COLOURS = {  # drawn and light, dark
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
_LINE_COLOURS = ("blue", "vermillion", "green", "purple", "amber", "sky")
_LOAD_COLOURS = LinearSegmentedColormap.from_list(
    "load", [(0.0, 0.447, 0.698, 1.0), (0.5, 0.5, 0.5, 0.0), (0.835, 0.369, 0.0, 1.0)]
)
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "olmo",
    "font.size": 9.0,
    "text.color": _COLOURS["ink"][0],
    "axes.edgecolor": _COLOURS["muted"][0],
    "axes.labelcolor": _COLOURS["muted"][0],
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": _COLOURS["grid"][0],
    "grid.linewidth": 0.7,
    "xtick.color": _COLOURS["muted"][0],
    "ytick.color": _COLOURS["muted"][0],
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "legend.frameon": False,
    "legend.borderaxespad": 0.0,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True, slots=True)
class _History:
    """The records as arrays: n steps, L MoE layers, E experts a layer; NaN where not finite."""

    steps: np.ndarray  # (n,)
    values: dict[str, np.ndarray]  # each (n,)
    counts: np.ndarray  # (n, L, E)
    imbalance: np.ndarray  # (n, L)
    honesty: np.ndarray  # (n, L)
    entropy_deficit: np.ndarray  # (n, L)
    heldout: np.ndarray  # (m, 2): step, loss
    not_finite: int
    names: list[str]  # of the L layers

    @property
    def end(self) -> slice:
        """The last tenth of the steps, at least one: what "at the end" means in the report."""
        return slice(len(self.steps) - max(1, len(self.steps) // 10), None)

    @property
    def drawn(self) -> list[int]:
        """The layers in pictures, in depth order: dead experts first, then the worst load."""
        dead = self.dead_at_end
        load = np.nan_to_num(_mean(self.imbalance[self.end]))
        return sorted(np.lexsort((-load, -dead))[:_MAX_LAYERS].tolist())

    @property
    def dead_at_end(self) -> np.ndarray:
        """Experts a layer that got no route over the last tenth of the steps, (L,)."""
        return (self.counts[self.end].sum(0) == 0).sum(-1)

    def pooled_honesty(self, window: int) -> np.ndarray:
        """Honesty over a window of steps, sum cov / sum var; NaN where the load never varied."""
        share = self.counts / np.maximum(self.counts.sum(-1, keepdims=True), 1)
        variance = np.where(np.isfinite(self.honesty), share.var(-1), 0.0)
        covariance = np.nan_to_num(self.honesty) * variance
        total = _windowed(variance, np.ones(window))
        flat = total <= 1e-18  # one route too many of ten million gives more
        pooled = _windowed(covariance, np.ones(window)) / np.where(flat, 1.0, total)
        return np.where(flat, np.nan, pooled)


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    records: Sequence[Record | Mapping[str, Any]],
    sample: str,
    layer_names: Sequence[str] | None = None,
) -> Path:
    """Write the report of a run as one self-contained HTML file.

    Any number of records may be given; curves are thinned to what a picture can show, keeping the
    greatest and the least value of each stretch. Values that are not finite leave a gap, and the
    page says how many there were.

    Args:
        path: The file; its folder is made when missing, and an older report is replaced whole.
        title: Heading of the page.
        config: The resolved configuration, nested; shown as `a.b.c = value`, the form of `--set`.
        summary: Headline numbers, each left out when missing: `heldout_loss` (nats per byte),
            `bits_per_byte`, `tokens_per_second`, `parameters_total`, `parameters_active`, `steps`,
            `tokens`, `seconds`. Everything else (versions, hardware, ...) is listed below as facts.
        records: What `read_metrics` returns, or the same lines as dicts, in order of steps.
        sample: Text sampled from the trained model.
        layer_names: One name per MoE layer; "MoE layer 1", ... when None.

    Returns:
        The path that was written.

    Raises:
        ValueError: A dict is not a record, records differ in layers or experts, or the number of
            `layer_names` is not that of the MoE layers.
    """
    history = _gather(records, layer_names)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(
        _page(title, config, summary, history, sample), encoding="utf-8", newline="\n"
    )
    os.replace(partial, path)
    return path


def _gather(
    records: Sequence[Record | Mapping[str, Any]], layer_names: Sequence[str] | None
) -> _History:
    made = [record_from_dict(r) if isinstance(r, Mapping) else r for r in records]
    steps = [record for record in made if isinstance(record, StepRecord)]
    shapes = {tuple(len(counts) for counts in record.expert_counts) for record in steps}
    if len(shapes) > 1 or any(len(set(shape)) > 1 for shape in shapes):
        raise ValueError(
            "All records must have the same MoE layers with the same number of experts, "
            f"got expert counts of shapes {sorted(shapes)}."
        )
    shape = shapes.pop() if shapes else ()
    if layer_names is None:
        layer_names = [f"MoE layer {layer + 1}" for layer in range(len(shape))]
    names = list(layer_names)
    if steps and len(names) != len(shape):
        raise ValueError(
            f"`layer_names` must have one name per MoE layer ({len(shape)}), got {len(names)}."
        )
    heldout = {r.step: r.heldout_loss for r in steps if r.heldout_loss is not None}
    heldout |= {r.step: r.loss for r in made if isinstance(r, HeldoutRecord)}
    curves = ("loss", "learning_rate", "grad_norm", "tokens_per_second")
    values = {name: np.array([getattr(r, name) for r in steps], float) for name in curves}
    layers = {
        name: np.array([getattr(r, name) for r in steps], float).reshape(len(steps), len(shape))
        for name in ("imbalance", "honesty", "entropy_deficit")
    }
    heldout_rows = np.array(sorted(heldout.items()), float).reshape(-1, 2)
    # Honesty has no value in a perfectly balanced step: that is no fault to count.
    arrays = [*values.values(), layers["imbalance"], layers["entropy_deficit"], heldout_rows]
    return _History(
        steps=np.array([r.step for r in steps], float),
        values={name: _finite(array) for name, array in values.items()},
        counts=np.array([r.expert_counts for r in steps], float).reshape(
            len(steps), len(shape), shape[0] if shape else 0
        ),
        imbalance=_finite(layers["imbalance"]),
        honesty=_finite(layers["honesty"]),
        entropy_deficit=_finite(layers["entropy_deficit"]),
        heldout=_finite(heldout_rows),
        not_finite=int(sum(np.sum(~np.isfinite(array)) for array in arrays)),
        names=names,
    )


def _finite(array: np.ndarray) -> np.ndarray:
    """Put NaN for what no axis can show, infinities and magnitudes above 1e30."""
    return np.where(np.abs(array) < 1e30, array, np.nan)


def _windowed(array: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Weighted sum over a window centred on each entry of axis 0, cut off at both ends."""
    return np.apply_along_axis(np.convolve, 0, array, kernel, "same")


def _smooth(array: np.ndarray, window: int) -> np.ndarray:
    """Triangular mean along axis 0, `window` wide at half its height; NaN where the entry is."""
    number = np.isfinite(array)
    kernel = np.bartlett(2 * window + 1)[1:-1]
    weight = _windowed(number.astype(float), kernel)
    mean = _windowed(np.where(number, array, 0.0), kernel) / np.where(number, weight, 1.0)
    return np.where(number, mean, np.nan)


def _mean(array: np.ndarray) -> np.ndarray:
    """Mean over axis 0 of what is a number; NaN where nothing is."""
    number = np.isfinite(array)
    count = number.sum(0)
    return np.where(count > 0, np.where(number, array, 0.0).sum(0) / np.maximum(count, 1), np.nan)


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


def _window(history: _History) -> int:
    return max(1, len(history.steps) // 60)


def _smoothing(history: _History, word: str = "smoothed") -> str:
    window = _window(history)
    return f", {word} over {window} steps" if window > 1 else ""


def _axes(history: _History, width: float, height: float, label: str) -> tuple[Figure, Axes]:
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


def _curve(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str, **options: Any) -> None:
    x, y = _thin(x, y)
    if np.isfinite(y).sum() == 1:  # a line through one point shows nothing
        options |= {"marker": "o", "markersize": 4, "clip_on": False}
    axes.plot(x, y, color=_COLOURS[colour][0], **options)


def _raw_and_smooth(
    axes: Axes, history: _History, values: np.ndarray, colour: str, label: str | None = None
) -> None:
    window = _window(history)
    if window > 1:
        _curve(axes, history.steps, values, colour, alpha=0.3, linewidth=0.8)
    _curve(axes, history.steps, _smooth(values, window), colour, label=label)


def _legend(axes: Axes, columns: int) -> None:
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.02),
        ncols=columns,
        handlelength=1.4,
        columnspacing=1.4,
    )


def _draw_loss(history: _History) -> Figure:
    figure, axes = _axes(history, _WIDE, 3.5, "cross-entropy (nats per byte)")
    if len(history.steps):
        _raw_and_smooth(axes, history, history.values["loss"], "blue", "training")
    if len(history.heldout):
        x, y = history.heldout.T
        axes.plot(
            x,
            y,
            color=_COLOURS["vermillion"][0],
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
                color=_COLOURS["vermillion"][0],
                weight="bold",
            )
    bits = axes.secondary_yaxis(
        "right", functions=(lambda nats: nats / np.log(2), lambda bits: bits * np.log(2))
    )
    bits.set_ylabel("bits per byte")
    bits.spines["right"].set_visible(False)
    _legend(axes, 2)
    return figure


def _draw_load(history: _History, layer: int, last: bool) -> Figure:
    """Heat map of each expert's load over the steps, and its share of routes at the end."""
    counts = history.counts[:, layer]  # (n, E)
    experts = counts.shape[1]
    height = float(np.clip(0.6 + 0.16 * experts, 1.5, 4.0)) + 0.2 * last
    figure = Figure(figsize=(_WIDE, height), layout="constrained")
    grid = figure.add_gridspec(1, 2, width_ratios=(6, 1), wspace=0.03)
    axes, side = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])

    columns = np.array_split(np.arange(len(counts)), min(len(counts), _MAX_COLUMNS))
    summed = np.stack([counts[column].sum(0) for column in columns], axis=1)  # (E, columns)
    ratio = summed * experts / np.maximum(summed.sum(0), 1)
    colour = (np.log(np.clip(ratio, 1 / 3, 3.0)) / np.log(3) + 1) / 2
    colour[:, summed.sum(0) == 0] = 0.5
    _step_axis(axes, history.steps)
    limits = axes.get_xlim()
    axes.imshow(
        _LOAD_COLOURS(colour, bytes=True),
        aspect="auto",
        interpolation="none",
        extent=(history.steps[0] - 0.5, history.steps[-1] + 0.5, experts - 0.5, -0.5),
    )
    axes.set_xlim(limits)
    axes.set_title(history.names[layer], loc="left", weight="bold")
    axes.set_ylabel("expert")
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))

    total = counts[history.end].sum(0)
    share = total / max(total.sum(), 1)
    side.barh(np.arange(experts), share, height=0.72, color=_COLOURS["muted"][0], alpha=0.65)
    side.axvline(1 / experts, color=_COLOURS["ink"][0], linewidth=1, linestyle=(0, (3, 2)))
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


def _draw_honesty(history: _History) -> Figure:
    figure, axes = _axes(history, _HALF, 3.1, "honesty  cov(f, P) / var(f)")
    curves = history.pooled_honesty(_window(history))
    for index, layer in enumerate(history.drawn):
        colour = _LINE_COLOURS[index]
        _curve(axes, history.steps, curves[:, layer], colour, label=history.names[layer])
    numbers = curves[np.isfinite(curves)]
    low, high = np.percentile(numbers, [2, 98]) if len(numbers) else (0.0, 1.0)
    low, high = float(np.clip(low - 0.1, -2, -0.35)), float(np.clip(high + 0.1, 1.2, 3))
    axes.set_ylim(low, high)
    axes.axhspan(low, 0, color=_COLOURS["vermillion"][0], alpha=0.09, linewidth=0)
    for height, word in ((1.0, "honest"), (0.0, "blind")):
        axes.axhline(height, color=_COLOURS["muted"][0], linewidth=0.9, linestyle=(0, (3, 2)))
        axes.annotate(
            word,
            (1, height),
            (4, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=_COLOURS["muted"][0],
        )
    axes.annotate(
        "gerrymandered",
        (0, 0),
        (5, 5),
        xycoords="axes fraction",
        textcoords="offset points",
        color=_COLOURS["vermillion"][0],
    )
    _legend(axes, 3)
    return figure


def _draw_imbalance(history: _History) -> Figure:
    figure, axes = _axes(history, _HALF, 3.1, "busiest expert's load / mean load")
    for index, layer in enumerate(history.drawn):
        values = _smooth(history.imbalance[:, layer], _window(history))
        _curve(axes, history.steps, values, _LINE_COLOURS[index], label=history.names[layer])
    axes.axhline(1, color=_COLOURS["muted"][0], linewidth=0.9, linestyle=(0, (3, 2)))
    _legend(axes, 3)
    return figure


def _draw_learning_rate(history: _History) -> Figure:
    figure, axes = _axes(history, _THIRD, 2.3, "learning rate")
    _curve(axes, history.steps, history.values["learning_rate"], "green")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return figure


def _draw_grad_norm(history: _History) -> Figure:
    figure, axes = _axes(history, _THIRD, 2.3, "gradient norm")
    _raw_and_smooth(axes, history, history.values["grad_norm"], "purple")
    axes.set_ylim(bottom=0)
    return figure


def _draw_throughput(history: _History) -> Figure:
    figure, axes = _axes(history, _THIRD, 2.3, "tokens per second")
    _raw_and_smooth(axes, history, history.values["tokens_per_second"], "blue")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


def _svg(figure: Figure, name: str) -> str:
    """Turn a figure into an inline SVG element that takes its font and colours from the page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>|\s*<defs>\s*<style.*?</defs>", "", svg, flags=re.S)
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)
    # An id must be unique in the page, and every picture has its own `figure_1`.
    svg = re.sub(r'(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
    for colour, (drawn, _) in _COLOURS.items():
        svg = svg.replace(drawn, f"var(--{colour})")
    width = 100 * figure.get_figwidth()
    size = f'style="min-width:{0.6 * width:.0f}px;max-width:{1.25 * width:.0f}px"'
    return re.sub(r'width="[^"]*" height="[^"]*"', size, svg.strip(), count=1)


def _picture(draw: Callable[..., Figure], name: str, caption: str, *arguments: Any) -> str:
    with mpl.rc_context(_STYLE):
        svg = _svg(draw(*arguments), name)
    under = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f"<figure>{svg}{under}</figure>"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_HEADLINES = {  # key of the summary: heading, unit, how it is written
    "heldout_loss": ("Held-out loss", "nats per byte", "{:.3f}".format),
    "bits_per_byte": ("Bits per byte", "held-out text", "{:.3f}".format),
    "tokens_per_second": ("Throughput", "tokens per second", si),
    "parameters_total": ("Parameters", "in total", si),
    "parameters_active": ("Active parameters", "per token", si),
    "steps": ("Steps", "of the optimizer", "{:,}".format),
    "tokens": ("Tokens", "trained on", si),
    "seconds": ("Time", "of training", _duration),
}


def _page(
    title: str,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    history: _History,
    sample: str,
) -> str:
    facts = {key: value for key, value in summary.items() if key not in _HEADLINES}
    text = f"<pre>{_text(sample)}</pre>" if sample else "<p>No text was sampled.</p>"
    body = [
        f"<header><h1>{_text(title)}</h1></header>",
        _cards(summary),
        _notice(history),
        *_loss_section(history),
        *_expert_sections(history),
        *_optimizer_section(history),
        f"<section><h2>Sampled text</h2>{text}</section>",
        f"<section><h2>Configuration</h2>{_settings(config)}</section>",
        f"<section><h2>What it ran on</h2>{_settings(facts)}</section>",
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8" />',
            '<meta name="viewport" content="width=device-width, initial-scale=1" />',
            f"<title>{_text(title)}</title><style>{_css()}</style></head><body><main>",
            *filter(None, body),
            "</main></body></html>\n",
        ]
    )


def _cards(summary: Mapping[str, Any]) -> str:
    cards = [
        f"<div><dt>{heading}</dt><dd>{_text(write(summary[key]))}</dd><dd>{unit}</dd></div>"
        for key, (heading, unit, write) in _HEADLINES.items()
        if key in summary
    ]
    return f'<dl class="cards">{"".join(cards)}</dl>' if cards else ""


def _notice(history: _History) -> str:
    """What a reader must not miss: dead experts, gerrymandered layers, values out of range."""
    notes = []
    if history.not_finite:
        notes.append(f"{history.not_finite} recorded values are not finite; curves leave gaps.")
    if len(history.steps) and history.names:
        honesty, load = _honesty_at_end(history), _mean(history.imbalance[history.end])
        experts = history.counts.shape[-1]
        for layer, name in enumerate(history.names):
            if dead := history.dead_at_end[layer]:
                notes.append(f"{_text(name)}: {dead} of {experts} experts got no route at the end.")
            # With a load this even there is nothing to pay for, and honesty is mostly noise.
            if honesty[layer] < 0 and load[layer] > 1.1:
                notes.append(
                    f"{_text(name)} is gerrymandered at the end: honesty {honesty[layer]:.2f}."
                )
    items = "".join(f"<li>{note}</li>" for note in notes)
    return f'<ul class="notice">{items}</ul>' if notes else ""


def _honesty_at_end(history: _History) -> np.ndarray:
    tail = len(history.steps[history.end])
    return history.pooled_honesty(2 * tail - 1)[-1]


def _loss_section(history: _History) -> list[str]:
    if not len(history.steps) and not len(history.heldout):
        return ["<section><h2>Loss</h2><p>No steps were recorded.</p></section>"]
    caption = (
        f"Cross-entropy of the held-out documents and of training batches{_smoothing(history)}."
    )
    return [f"<section><h2>Loss</h2>{_picture(_draw_loss, 'loss', caption, history)}</section>"]


def _expert_sections(history: _History) -> list[str]:
    if not len(history.steps):
        return []
    if not history.names:
        return [
            "<section><h2>Experts</h2><p>This model has no mixture-of-experts layer.</p></section>"
        ]
    which = ""
    if len(history.names) > _MAX_LAYERS:
        which = (
            f" Of {len(history.names)} layers, pictures show {_MAX_LAYERS}: those with dead "
            "experts, then those with the worst load at the end. The table has them all."
        )
    drawn = history.drawn
    maps = "".join(
        _picture(_draw_load, f"load{layer}", "", history, layer, layer == drawn[-1])
        for layer in drawn
    )
    honesty = _picture(
        _draw_honesty,
        "honesty",
        f"Balance honesty{_smoothing(history, 'pooled')}. At 1 gate probability follows "
        "the load and the balance loss sees imbalance in full; at 0 it is blind to it; below 0 "
        "(shaded) it pays for imbalance: the experts are gerrymandered.",
        history,
    )
    imbalance = _picture(
        _draw_imbalance,
        "imbalance",
        f"Load imbalance{_smoothing(history)}. 1 is perfect balance; the "
        "number of experts is collapse onto one.",
        history,
    )
    return [
        "<section><h2>Expert load</h2><p>Routes requested per expert over the run, against the "
        "uniform share; on the right, the share of routes over the last tenth of the steps, with "
        f"the uniform share dashed.{which}</p>"
        '<p class="scale">1/3 of the uniform share or less <span></span> 3 times or more'
        f"</p>{maps}</section>",
        f'<section><h2>Balance</h2><div class="row wide">{honesty}{imbalance}</div>'
        f"{_layer_table(history)}</section>",
    ]


def _layer_table(history: _History) -> str:
    columns = np.stack(
        [
            history.imbalance[0],
            _mean(history.imbalance[history.end]),
            _mean(history.entropy_deficit[history.end]),
            history.dead_at_end,
            _honesty_at_end(history),
        ],
        axis=1,
    )
    forms = ("{:.2f}", "{:.2f}", "{:.4f}", "{:.0f}", "{:.2f}")
    rows = "".join(
        f"<tr><th>{_text(name)}</th>"
        + "".join(
            f"<td>{form.format(value) if np.isfinite(value) else '&#8211;'}</td>"
            for form, value in zip(forms, row, strict=True)
        )
        + "</tr>"
        for name, row in zip(history.names, columns, strict=True)
    )
    return (
        "<table><thead><tr><th>Layer</th><th>Imbalance, first step</th><th>Imbalance, end</th>"
        "<th>Entropy deficit, end</th><th>Dead experts, end</th><th>Honesty, end</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _optimizer_section(history: _History) -> list[str]:
    if not len(history.steps):
        return []
    pictures = (
        _picture(_draw_learning_rate, "rate", "Learning rate of each update.", history),
        _picture(_draw_grad_norm, "norm", "Global gradient norm before clipping.", history),
        _picture(_draw_throughput, "speed", "Valid tokens per second of wall time.", history),
    )
    return [f'<section><h2>Optimizer</h2><div class="row">{"".join(pictures)}</div></section>']


def _settings(values: Mapping[str, Any]) -> str:
    """List nested values as `a.b.c = value`, one block per top-level key that has several."""
    if not values:
        return "<p>Nothing was given.</p>"
    alone = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    nested = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    blocks = [_flatten(alone)] * bool(alone)
    blocks += [_flatten({key: value}) for key, value in nested.items()]
    return (
        '<div class="settings">'
        + "".join(
            "<table>"
            + "".join(f"<tr><th>{_text(k)}</th><td>{_text(v)}</td></tr>" for k, v in block)
            + "</table>"
            for block in blocks
        )
        + "</div>"
    )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            rows += _flatten(value, f"{name}.")
        else:
            rows.append((name, str(value)))
    return rows


def _text(value: object) -> str:
    """Escape text; write control characters as Python does, as HTML can hold none."""
    shown = str(value).encode("utf-8", "replace").decode("utf-8")
    shown = re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]",
        lambda found: found[0].encode("unicode_escape").decode("ascii"),
        shown,
    )
    return html.escape(shown)


def _css() -> str:
    light = "".join(f"--{name}:{colours[0]};" for name, colours in _COLOURS.items())
    dark = "".join(f"--{name}:{colours[1]};" for name, colours in _COLOURS.items())
    return (
        f":root{{color-scheme:light dark;--paper:#fbfbfa;--card:#fff;{light}}}\n"
        "@media (prefers-color-scheme:dark) and screen"
        f"{{:root{{--paper:#12161c;--card:#191f27;{dark}}}}}\n" + _CSS
    )


_CSS = """
body{margin:0;background:var(--paper);color:var(--ink);
  font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:28px;line-height:1.2;letter-spacing:-.02em;margin:0 0 24px;font-weight:650}
h2{font-size:17px;margin:44px 0 10px;font-weight:650;letter-spacing:-.01em}
p,figcaption{max-width:76ch;margin:0 0 12px;color:var(--muted)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:1px;margin:0;
  background:var(--card);border:1px solid var(--grid);border-radius:10px;overflow:hidden}
.cards div{box-shadow:0 0 0 1px var(--grid);padding:16px 20px}
.cards dt,.cards dd{margin:0;color:var(--muted);font-size:13px}
.cards dt+dd{color:var(--ink);font-size:27px;line-height:1.3;font-weight:600;
  font-variant-numeric:tabular-nums;letter-spacing:-.02em}
.notice{margin:20px 0 0;padding:12px 20px 12px 36px;border-left:4px solid var(--vermillion);
  background:var(--card);border-radius:0 8px 8px 0}
figure{margin:0 0 12px;min-width:0;overflow-x:auto}
figcaption{font-size:13px;margin:2px 0 14px}
svg{display:block;width:100%;height:auto}
svg *{stroke-linejoin:round}
.row{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:0 24px}
.wide{grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr))}
.scale{font-size:13px;display:flex;align-items:center;gap:10px}
.scale span{width:180px;height:10px;border-radius:5px;border:1px solid var(--grid);
  background:linear-gradient(90deg,rgb(0 114 178),rgb(128 128 128/0),rgb(213 94 0))}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}
section>table{width:100%}
th,td{padding:6px 12px 6px 0;text-align:left;font-weight:400;vertical-align:top}
section>table :is(th,td):not(:first-child){text-align:right}
thead th{color:var(--muted);font-size:13px}
section>table tr{border-bottom:1px solid var(--grid)}
pre{background:var(--card);border:1px solid var(--grid);border-radius:10px;padding:16px 20px;
  margin:0;overflow-x:auto;white-space:pre-wrap;overflow-wrap:anywhere}
pre,.settings{font:13px/1.55 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}
.settings{columns:2 380px;column-gap:28px}
.settings table{break-inside:avoid;width:100%;font-size:13px;margin:0 0 14px;
  border-top:1px solid var(--grid)}
.settings th{color:var(--muted);padding:3px 12px 3px 0;width:52%}
.settings td{padding:3px 0;overflow-wrap:anywhere}
"""
