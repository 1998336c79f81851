"""The runs in numbers: a Markdown report, a plot beside it, and a JSON file with every point."""

import importlib.metadata
import json
import platform
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from plot import draw
from training import Arm, Point, Recipe, Run

_EARLY, _LATE = (0.1, 0.25), (0.85, 1.0)


def window(run: Run, part: tuple[float, float], quantity: str) -> float:
    """Return the mean of a quantity over the points within that part of the steps."""
    last = run.points[-1].step
    points = [p for p in run.points if part[0] * last <= p.step <= part[1] * last]
    return statistics.fmean(getattr(point, quantity) for point in points or run.points[-1:])


def shows_the_effect(run: Run) -> bool:
    """Whether from early to late the trained loss fell while the worst load rose by 5 %."""
    loss = [window(run, part, "trained_loss") for part in (_EARLY, _LATE)]
    load = [window(run, part, "worst_load") for part in (_EARLY, _LATE)]
    return loss[1] < loss[0] and load[1] > 1.05 * load[0]


def write(
    folder: Path, runs: Sequence[Run], recipe: Recipe, text: str, command: str, dry: bool
) -> list[Path]:
    """Write `gerrymandering_<device>_<date>.md`, `.svg` and `.json`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = _facts(runs, recipe, text, command, dry)
    kind = "dry-run" if dry else recipe.device.split(":")[0]
    stem = f"gerrymandering_{kind}_{facts['date'][:10]}"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    name = next(n for n in names if not (folder / f"{n}.json").exists())
    data = folder / f"{name}.json"
    content = {"facts": facts, "recipe": asdict(recipe), "runs": [asdict(run) for run in runs]}
    data.write_text(json.dumps(content) + "\n")
    return [data, *render(data)]


def render(data: Path) -> list[Path]:
    """Write the report and the plot of a JSON file of `write` beside it; return their paths."""
    content = json.loads(data.read_text())
    runs = [_run(plain) for plain in content["runs"]]
    picture, report = data.with_suffix(".svg"), data.with_suffix(".md")
    picture.write_text(draw(runs))
    report.write_text("\n".join(_lines(runs, content["facts"], data.stem)) + "\n")
    return [picture, report]


def _run(plain: dict) -> Run:
    return Run(
        arm=Arm(**plain["arm"]),
        seed=plain["seed"],
        points=[Point(**point) for point in plain["points"]],
        first_alarm=plain["first_alarm"],
    )


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the lines of the table, an arm a row: the mean over seeds [least..most]."""
    columns = (
        "balance loss, coefficient",
        "seeds",
        "language loss",
        "own balance loss, early -> late",
        "E f.P, early -> late",
        "worst load, early -> late",
        "dead experts",
        "honesty",
        "margin",
        "own loss fell, load rose",
        "alarm on",
        "first alarm, step",
    )
    yield "| " + " | ".join(columns) + " |"
    yield "|---" * len(columns) + "|"
    for name in dict.fromkeys(run.arm.name for run in runs):
        arm = [run for run in runs if run.arm.name == name]
        alarms = [str(run.first_alarm) if run.first_alarm is not None else "none" for run in arm]
        cells = (
            name,
            str(len(arm)),
            _late(arm, "language_loss", ".3f"),
            _early_to_late(arm, "trained_loss", ".4f"),
            _early_to_late(arm, "ordinary_loss", ".4f"),
            _early_to_late(arm, "worst_load", ".2f"),
            _late(arm, "dead_experts", ".1f"),
            _late(arm, "honesty", "+.2f"),
            _late(arm, "topk_margin", ".4f"),
            f"{sum(map(shows_the_effect, arm))} of {len(arm)}",
            _late(arm, "alarm", ".0%"),
            ", ".join(alarms),
        )
        yield "| " + " | ".join(cells) + " |"


def _late(arm: Sequence[Run], quantity: str, form: str) -> str:
    return _spread([window(run, _LATE, quantity) for run in arm], form)


def _early_to_late(arm: Sequence[Run], quantity: str, form: str) -> str:
    early = statistics.fmean(window(run, _EARLY, quantity) for run in arm)
    return f"{early:{form}} -> {_late(arm, quantity, form)}"


def _spread(values: Sequence[float], form: str) -> str:
    mean, least, most = (f"{of(values):{form}}" for of in (statistics.fmean, min, max))
    return mean if least == most else f"{mean} [{least}..{most}]"


def _lines(runs: Sequence[Run], facts: dict[str, str], name: str) -> Iterator[str]:
    yield f"# Token gerrymandering in a small language model, {facts['date'][:10]}"
    yield ""
    if facts["dry run"] == "yes":
        yield "A dry run: no number here means anything."
        yield ""
    yield (
        "The same byte-level model on the same batches, its router kept in order by different "
        "balance losses; the objective is cross-entropy plus the coefficient times the sum of the "
        "balance losses of the layers. All is measured on held-out bytes. Early is the mean over "
        f"{_EARLY[0]:.0%} to {_EARLY[1]:.0%} of the steps, late over the last {1 - _LATE[0]:.0%}; "
        "a number alone is late. Worst load: the busiest expert's routes over the mean, in the "
        "worst layer. Own balance loss: the one trained, in its own scope. Alarm: the share of "
        "layers and steps at which `GerrymanderAlarm` was on, fed the balance of each training "
        "batch, over a window of a quarter of the run and at most 200 steps."
    )
    yield ""
    yield from table(runs)
    yield ""
    yield f"![Curves]({name}.svg)"
    yield ""
    yield "| fact | value |"
    yield "|---|---|"
    for fact, value in facts.items():
        yield f"| {fact} | {value} |"
    yield ""
    yield f"Every point: [{name}.json]({name}.json)."


def _facts(
    runs: Sequence[Run], recipe: Recipe, text: str, command: str, dry: bool
) -> dict[str, str]:
    cuda = recipe.device.startswith("cuda")
    sizes = recipe.sizes
    return {
        "command": f"`{command}`",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "hardware": torch.cuda.get_device_name() if cuda else f"CPU, {platform.machine()}",
        "commit": _commit(),
        "seeds": ", ".join(str(seed) for seed in dict.fromkeys(run.seed for run in runs)),
        "repeats": "one run an arm and seed",
        "model": (
            f"{sizes.layers} layers, width {sizes.width}, {sizes.experts} experts of width "
            f"{sizes.hidden}, top-{sizes.top_k}, {sizes.length} positions"
        ),
        "training": (
            f"{recipe.steps} steps of {recipe.batch} x {sizes.length} bytes, AdamW, learning rate "
            f"{recipe.learning_rate:g}, gradient norm clipped at 1, "
            f"{'BF16 autocast' if recipe.is_mixed else 'float32'}"
        ),
        "scope of the balance losses": "a sequence" if recipe.per_sequence else "the whole batch",
        "text": text,
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "dry run": "yes" if dry else "no",
    }


def _commit() -> str:
    def said(*command: str) -> str:
        here = str(Path(__file__).parent)
        done = subprocess.run(
            ["git", "-C", here, *command], capture_output=True, text=True, check=True, timeout=20
        )
        return done.stdout.strip()

    try:
        changed = said("status", "--porcelain", "--", "../..")
        commit = said("rev-parse", "--short=12", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}, {'with changes on top' if changed else 'clean'}"
