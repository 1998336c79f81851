"""The report of a run: one HTML file that needs nothing else, pictures and all.

    headline numbers | loss, each source's | expert load per layer | balance honesty, imbalance
    dropped routes | rate, norm | time by phase, FLOPs | every balance number
    ranks and their memory | sampled text | config | what it ran on

The page is well-formed XML, links to nothing, and is a function of its arguments alone: the same
run gives the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from olmo_trainer.metrics import Record
from olmo_trainer.progress import si
from olmo_trainer.report import pictures
from olmo_trainer.report.costs import costs_section
from olmo_trainer.report.drops import drops_section
from olmo_trainer.report.elements import table, text
from olmo_trainer.report.history import MAX_LAYERS, RunHistory, finite_mean, gather_history


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
        summary: Headline numbers, each left out when missing: `heldout_loss` (nats per token; per
            byte where the last header says that a token is one), `bits_per_byte`,
            `tokens_per_second`, `parameters_total`, `parameters_active`, `steps`, `tokens`,
            `seconds`, `model_flops_utilization`. Everything else (versions, hardware, ...) is
            listed below as facts.
        records: What `read_metrics` returns, or the same lines as dicts, in order of steps.
        sample: Text sampled from the trained model.
        layer_names: One name per MoE layer; "MoE layer 1", ... when None.

    Returns:
        The path that was written.

    Raises:
        ValueError: A dict is not a record, records differ in layers or experts, or the number of
            `layer_names` is not that of the MoE layers.
    """
    history = gather_history(records, layer_names)
    return write_page(path, _page(title, config, summary, history, sample))


def write_page(path: str | os.PathLike[str], page: str) -> Path:
    """Write a page whole; an older one stands until then."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(page, encoding="utf-8", newline="\n")
    os.replace(partial, path)
    return path


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_HEADLINES = {  # key of the summary: heading, unit, how it is written
    "heldout_loss": ("Held-out loss", "", "{:.3f}".format),  # in the unit of the run
    "bits_per_byte": ("Bits per byte", "held-out text", "{:.3f}".format),
    "tokens_per_second": ("Throughput", "tokens per second", si),
    "parameters_total": ("Parameters", "in total", si),
    "parameters_active": ("Active parameters", "per token", si),
    "steps": ("Steps", "of the optimizer", "{:,}".format),
    "tokens": ("Tokens", "trained on", si),
    "seconds": ("Time", "of training", _duration),
    "model_flops_utilization": ("Utilization", "of the dense BF16 peak", "{:.1%}".format),
}


def _page(
    title: str,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    history: RunHistory,
    sample: str,
) -> str:
    facts = {key: value for key, value in summary.items() if key not in _HEADLINES}
    sampled = f"<pre>{text(sample)}</pre>" if sample else "<p>No text was sampled.</p>"
    body = [
        f"<header><h1>{text(title)}</h1></header>",
        _cards(summary, history.loss_unit),
        _notice(history),
        *_loss_section(history),
        *_expert_sections(history),
        *drops_section(history),
        *_optimizer_section(history),
        *costs_section(history),
        f"<section><h2>Sampled text</h2>{sampled}</section>",
        f"<section><h2>Configuration</h2>{_settings(config)}</section>",
        f"<section><h2>What it ran on</h2>{_settings(facts)}</section>",
    ]
    return html_page(title, body)


def html_page(title: str, body: Sequence[str]) -> str:
    """Return a whole page of these elements, those that are empty left out."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8" />',
            '<meta name="viewport" content="width=device-width, initial-scale=1" />',
            f"<title>{text(title)}</title><style>{_css()}</style></head><body><main>",
            *filter(None, body),
            "</main></body></html>\n",
        ]
    )


def _cards(summary: Mapping[str, Any], loss_unit: str) -> str:
    cards = [
        f"<div><dt>{heading}</dt><dd>{text(write(summary[key]))}</dd>"
        f"<dd>{unit or loss_unit}</dd></div>"
        for key, (heading, unit, write) in _HEADLINES.items()
        if key in summary
    ]
    return f'<dl class="cards">{"".join(cards)}</dl>' if cards else ""


def _notice(history: RunHistory) -> str:
    """What a reader must not miss: dead experts, gerrymandered layers, values out of range."""
    notes = []
    if history.not_finite:
        notes.append(f"{history.not_finite} recorded values are not finite; curves leave gaps.")
    if len(history.layer_steps):
        honesty, load = _honesty_at_end(history), finite_mean(history.imbalance[history.layer_end])
        experts = history.counts.shape[-1]
        for layer, name in enumerate(history.names):
            if dead := history.dead_at_end[layer]:
                notes.append(f"{text(name)}: {dead} of {experts} experts got no route at the end.")
            # With a load this even there is nothing to pay for, and honesty is mostly noise.
            if honesty[layer] < 0 and load[layer] > 1.1:
                notes.append(
                    f"{text(name)} is gerrymandered at the end: honesty {honesty[layer]:.2f}."
                )
    items = "".join(f"<li>{note}</li>" for note in notes)
    return f'<ul class="notice">{items}</ul>' if notes else ""


def _honesty_at_end(history: RunHistory) -> np.ndarray:
    tail = len(history.layer_steps[history.layer_end])
    return history.pooled_honesty(2 * tail - 1)[-1]


def _loss_section(history: RunHistory) -> list[str]:
    if not len(history.steps) and not len(history.heldout):
        return ["<section><h2>Loss</h2><p>No steps were recorded.</p></section>"]
    smoothed = pictures.smoothing_note(history.steps)
    caption = f"Cross-entropy of the held-out documents and of training batches{smoothed}."
    picture = pictures.picture(pictures.draw_loss, "loss", caption, history)
    return [f"<section><h2>Loss</h2>{picture}{_sources(history)}</section>"]


def _sources(history: RunHistory) -> str:
    if not history.sources:
        return ""
    rows = [(name, found[-1, 1]) for name, found in history.sources.items()]
    return pictures.picture(
        pictures.draw_sources, "sources", "Held-out loss of each source.", history
    ) + table(
        ["Source", f"Held-out loss at the end, {history.loss_unit}"],
        [[name, f"{loss:.4f}"] for name, loss in rows],
    )


def _expert_sections(history: RunHistory) -> list[str]:
    if not len(history.steps):
        return []
    if not history.names:
        return [
            "<section><h2>Experts</h2><p>This model has no mixture-of-experts layer.</p></section>"
        ]
    if not len(history.layer_steps):
        return [
            "<section><h2>Experts</h2><p>No step has written numbers of layers yet.</p></section>"
        ]
    which = ""
    if len(history.names) > MAX_LAYERS:
        which = (
            f" Of {len(history.names)} layers, pictures show {MAX_LAYERS}: those with dead "
            "experts, then those with the worst load at the end. The table has them all."
        )
    drawn = history.drawn
    maps = "".join(
        pictures.picture(pictures.draw_load, f"load{layer}", "", history, layer, layer == drawn[-1])
        for layer in drawn
    )
    honesty = pictures.picture(
        pictures.draw_honesty,
        "honesty",
        f"Balance honesty{pictures.smoothing_note(history.layer_steps, 'pooled')}. At 1 gate "
        "probability follows the load and the balance loss sees imbalance in full; at 0 it is "
        "blind to it; below 0 (shaded) it pays for imbalance: the experts are gerrymandered.",
        history,
    )
    imbalance = pictures.picture(
        pictures.draw_imbalance,
        "imbalance",
        f"Load imbalance{pictures.smoothing_note(history.layer_steps)}. 1 is perfect balance; the "
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


def _layer_table(history: RunHistory) -> str:
    columns = np.stack(
        [
            history.imbalance[0],
            finite_mean(history.imbalance[history.layer_end]),
            finite_mean(history.entropy_deficit[history.layer_end]),
            history.dead_at_end,
            _honesty_at_end(history),
        ],
        axis=1,
    )
    forms = ("{:.2f}", "{:.2f}", "{:.4f}", "{:.0f}", "{:.2f}")
    rows = "".join(
        f"<tr><th>{text(name)}</th>"
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


def _optimizer_section(history: RunHistory) -> list[str]:
    if not len(history.steps):
        return []
    drawn = (
        pictures.picture(
            pictures.draw_learning_rate, "rate", "Learning rate of each update.", history
        ),
        pictures.picture(
            pictures.draw_grad_norm, "norm", "Global gradient norm before clipping.", history
        ),
        pictures.picture(
            pictures.draw_throughput, "speed", "Valid tokens per second of wall time.", history
        ),
    )
    return [f'<section><h2>Optimizer</h2><div class="row">{"".join(drawn)}</div></section>']


def _settings(values: Mapping[str, Any]) -> str:
    """List nested values as `a.b.c = value`, one block per top-level key that has several."""
    if not values:
        return "<p>Nothing was given.</p>"
    alone = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    nested = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    blocks = [flatten(alone)] * bool(alone)
    blocks += [flatten({key: value}) for key, value in nested.items()]
    return (
        '<div class="settings">'
        + "".join(
            "<table>"
            + "".join(f"<tr><th>{text(k)}</th><td>{text(v)}</td></tr>" for k, v in block)
            + "</table>"
            for block in blocks
        )
        + "</div>"
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested values as pairs `a.b.c`, text."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            rows += flatten(value, f"{name}.")
        else:
            rows.append((name, str(value)))
    return rows


def _css() -> str:
    light = "".join(f"--{name}:{colours[0]};" for name, colours in pictures.COLOURS.items())
    dark = "".join(f"--{name}:{colours[1]};" for name, colours in pictures.COLOURS.items())
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
