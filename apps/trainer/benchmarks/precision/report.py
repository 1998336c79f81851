"""The runs in numbers: a JSON file with every step, and a Markdown report and a plot made of it."""

import importlib.metadata
import json
import math
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cases import PRECISIONS, Case
from measures import Row, rows_of
from plot import draw
from training import Run


def new_file(folder: Path, device: str, *, dry: bool) -> Path:
    """Return the path of a JSON file that is not there yet, `precision_<device>_<date>.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"precision_{'dry-run' if dry else device}_{datetime.now(UTC):%Y-%m-%d}"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(path for name in names if not (path := folder / f"{name}.json").exists())


def facts_of(command: str, workers: int, *, dry: bool) -> dict[str, str]:
    """Return what is worth knowing about the runs before any has ended."""
    return {
        "command": f"`{command}`",
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "runs side by side": str(workers),
        "commit": _commit(),
        "triton": _version("triton"),
        "host": f"{platform.machine()}, {platform.system()}",
        "dry run": "yes" if dry else "no",
    }


def write(
    data: Path, runs: Sequence[Run], facts: Mapping[str, str], shared: Mapping[str, Sequence[str]]
) -> list[Path]:
    """Write all runs so far into `data`, and the report and plot of it beside it; return paths."""
    versions = next((run.versions for run in runs if run.versions), {})
    content = {
        "facts": [{**facts, **versions}],
        "shared": {recipe: list(settings) for recipe, settings in shared.items()},
        "runs": [_plain(run) for run in runs],
    }
    return _write(data, content)


def render(files: Sequence[Path], folder: Path | None = None) -> list[Path]:
    """Write the report and plot of JSON files of `write`; several are joined into the first's name.

    Args:
        files: What to draw.
        folder: Where to; beside the first file when None.

    Raises:
        ValueError: A run is in two files, or the files differ in what the runs of a recipe share.
    """
    contents = [json.loads(path.read_text()) for path in files]
    target = files[0] if folder is None else folder / files[0].name
    if len(contents) == 1:
        return _write(target, contents[0])
    shared: dict[str, list[str]] = {}
    runs: dict[str, dict[str, Any]] = {}
    for path, content in zip(files, contents, strict=True):
        for recipe, settings in content["shared"].items():
            if shared.setdefault(recipe, settings) != settings:
                raise ValueError(
                    f"runs of one recipe must share their settings, and {path} has others for "
                    f"{recipe} than the files before it; render it alone"
                )
        for run in content["runs"]:
            name = Case(**run["case"]).name
            if name in runs:
                raise ValueError(f"each run must be in one file, and {path} has {name} again")
            runs[name] = run
    joined = {
        "facts": [facts for content in contents for facts in content["facts"]],
        "shared": shared,
        "runs": [_plain(_run(run)) for run in runs.values()],
    }
    return _write(target.with_name(f"{target.stem}_joined.json"), joined)


def _write(data: Path, content: Mapping[str, Any]) -> list[Path]:
    data.parent.mkdir(parents=True, exist_ok=True)
    partial = data.with_suffix(".partial")
    partial.write_text(json.dumps(content) + "\n")
    partial.replace(data)  # who is stopped in the middle of the runs has those that ended
    runs = [_run(plain) for plain in content["runs"]]
    picture = draw(data.with_suffix(".svg"), runs)
    report = data.with_suffix(".md")
    report.write_text("\n".join(_lines(runs, content, data.name, picture)) + "\n")
    return [data, report, *([picture] if picture else [])]


def _plain(run: Run) -> dict[str, Any]:
    plain = asdict(run)
    for name in ("losses", "norms"):  # nine digits hold a float32
        plain[name] = [float(f"{value:.9g}") for value in plain[name]]
    plain["heldout"] = None if math.isnan(run.heldout) else run.heldout
    return plain


def _run(plain: Mapping[str, Any]) -> Run:
    heldout = math.nan if plain["heldout"] is None else plain["heldout"]
    return Run(**{**plain, "case": Case(**plain["case"]), "heldout": heldout})


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a recipe's table: mean ± standard deviation over seeds [least..most]."""
    columns = (
        *("precision", "seeds", "loss", "less BF16's", "held-out loss", "less BF16's"),
        *("gradient norm", "over BF16's", "failed seeds"),
    )
    yield "| " + " | ".join(columns) + " |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        cells = (
            PRECISIONS[row.precision][0],
            str(len(row.loss.values)),
            row.loss.words(".4f"),
            row.loss_above.words("+.4f"),
            row.heldout.words(".4f"),
            row.heldout_above.words("+.4f"),
            row.norm.words(".3f"),
            row.norm_above.words("+.1%"),
            ", ".join(map(str, row.failed)) or "none",
        )
        yield "| " + " | ".join(cells) + " |"


def _lines(
    runs: Sequence[Run], content: Mapping[str, Any], name: str, picture: Path | None
) -> Iterator[str]:
    facts = content["facts"]
    yield f"# Training in MXFP8 beside BF16, {facts[0]['date'][:10]}"
    yield ""
    if any(each["dry run"] == "yes" for each in facts):
        yield "A dry run: no number here means anything."
        yield ""
    yield (
        "The same model on the same batches; runs of one seed begin with the same weights. In "
        "MXFP8 are the products of the routed experts, of the shared expert and of the attention "
        "projections, forward and input gradient; the weight gradient is BF16 unless a row says "
        "otherwise. Loss and gradient norm (before clipping) are means over the last tenth of the "
        "steps; a difference is to the BF16 run of the same seed. Over seeds: mean ± standard "
        "deviation [least..most]. Losses are in nats a byte."
    )
    for recipe in dict.fromkeys(run.case.recipe for run in runs):
        yield from ("", f"## {recipe}", "")
        yield from table(rows_of(runs, recipe))
        yield ""
        yield f"`toy` with `--set` {' '.join(f'`{each}`' for each in content['shared'][recipe])}."
    yield ""
    if picture is None:
        yield f"No plot: matplotlib is not installed here. `--render {name}` draws it where it is."
    else:
        yield f"![Curves]({picture.name})"
    failures = [run for run in runs if run.failure]
    if failures:
        yield from ("", "## Failed", "")
        yield from (f"- {run.case.name}: {run.failure}" for run in failures)
    for each in facts:
        yield from ("", "| fact | value |", "|---|---|")
        yield from (f"| {fact} | {value} |" for fact, value in each.items())
    yield from ("", f"Every step: [{name}]({name}).")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    def said(*command: str) -> str:
        here = str(Path(__file__).parent)
        done = subprocess.run(
            ["git", "-C", here, *command], capture_output=True, text=True, check=True, timeout=20
        )
        return done.stdout.strip()

    try:
        changed = said("status", "--porcelain", "--", ":/packages", ":/apps")
        commit = said("rev-parse", "--short=12", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}, {'with changes on top' if changed else 'clean'}"
