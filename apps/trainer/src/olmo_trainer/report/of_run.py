"""The report of a run's folder, whether the run is over or goes on, from what lies in it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from olmo_trainer.metrics import (
    METRICS,
    HeldoutRecord,
    Record,
    RunHeader,
    StepRecord,
    bits_per_byte,
    iterate_metrics,
)
from olmo_trainer.overrides import ConfigError, parse_config
from olmo_trainer.report.page import write_report
from olmo_trainer.run_folder import SAMPLE
from olmo_trainer.sizes import count_parameters

REPORT = "report.html"


MOST_OF_LAYERS = 1200  # steps; a heat map has 180 columns, and a curve 600 points


def read_run(folder: Path) -> tuple[RunHeader, list[Record]]:
    """Return the last header and all records of a run's folder.

    The numbers of layers are kept of every n-th step that wrote them, n as small a power of two as
    leaves `MOST_OF_LAYERS`, and of the last: the log of a long run need not fit into memory.

    Raises:
        ValueError: There is no run, or its log cannot be read.
    """
    path = folder / METRICS
    if not path.is_file():
        raise ValueError(f"{folder}: no run here: {METRICS} is missing; give a run's folder")
    records = _thinned(iterate_metrics(path))
    headers = [record for record in records if isinstance(record, RunHeader)]
    if not headers:
        raise ValueError(f"{path}: has no header; it is not a log of this program")
    return headers[-1], records


def _thinned(records: Iterable[Record]) -> list[Record]:
    kept: list[Record] = []
    places: list[int] = []  # of the steps that have numbers of layers, every `stride`-th
    stride, count, newest = 1, 0, -1
    for record in records:
        kept.append(record)
        if not isinstance(record, StepRecord) or not record.expert_counts:
            continue
        if newest not in places[-1:]:  # it was the last step so far, and only that
            _strip(kept, newest)
        newest = len(kept) - 1
        if count % stride == 0:
            places.append(newest)
        count += 1
        if len(places) > MOST_OF_LAYERS:
            for place in places[1::2]:
                if place != newest:
                    _strip(kept, place)
            places, stride = places[::2], 2 * stride
    return kept


def _strip(records: list[Record], place: int) -> None:
    record = records[place] if place >= 0 else None
    if isinstance(record, StepRecord):
        records[place] = record.without_layers()


def summarize(header: RunHeader, records: list[Record]) -> dict[str, Any]:
    """Return a run's headline numbers, as `write_report` takes them."""
    steps = [record for record in records if isinstance(record, StepRecord)]
    passes = [record for record in records if isinstance(record, HeldoutRecord)]
    tokens, seconds = sum(each.tokens for each in steps), sum(each.seconds for each in steps)
    summary: dict[str, Any] = {}
    if passes:
        summary["heldout_loss"] = passes[-1].loss
        known = header.info.get("bytes_per_token")
        if known:
            summary["bits_per_byte"] = bits_per_byte(passes[-1].loss, bytes_per_token=known)
    if steps:
        summary |= {
            "tokens_per_second": tokens / seconds,
            "steps": steps[-1].step,
            "tokens": tokens,
            "seconds": seconds,
        }
        shares = [each.model_flops_utilization for each in steps]
        known_shares = [share for share in shares if share is not None]
        if known_shares:
            summary["model_flops_utilization"] = sum(known_shares) / len(known_shares)
    return summary


def report_run(folder: Path) -> Path:
    """Write the report of a run into its folder; return its path.

    Raises:
        ValueError: There is no run in `folder`.
    """
    header, records = read_run(folder)
    summary, config = summarize(header, records), header.info.get("config", {})
    layer_names = None
    try:
        model = parse_config(config).model
    except ConfigError:  # of another version
        pass
    else:
        counts = count_parameters(model)
        summary |= {"parameters_total": counts.total, "parameters_active": counts.active}
        layer_names = [f"layer {index}" for index in model.moe_layers]
    facts = {key: value for key, value in header.info.items() if key != "config"}
    sample = folder / SAMPLE
    return write_report(
        folder / REPORT,
        title=config.get("name", folder.name),
        config=config,
        summary=summary | facts,
        records=records,
        sample=sample.read_text(encoding="utf-8") if sample.is_file() else "",
        layer_names=layer_names,
    )
