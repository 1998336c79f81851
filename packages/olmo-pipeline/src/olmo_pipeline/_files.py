"""Schedules as files: JSON for other programs, plain text for people."""

import json
from pathlib import Path
from typing import Any

from ._schedule import Action, Schedule

_KEYS = ("name", "num_microbatches", "rank_of_stage", "actions")


def save_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule to a file.

    Args:
        schedule: Any schedule.
        path: A name that ends in `.json` (one object with `name`, `num_microbatches`,
            `rank_of_stage` and `actions`, a list of short names per rank) or `.txt` (what
            `Schedule.to_text` gives).

    Raises:
        ValueError: If the name ends otherwise.
    """
    path = Path(path)
    text = _to_json(schedule) if _is_json(path) else schedule.to_text()
    path.write_text(text, encoding="utf-8")


def load_schedule(path: str | Path) -> Schedule:
    """Read what `save_schedule` wrote. Its form is checked; `validate` proves that it can run.

    Raises:
        ValueError: If the name ends otherwise than in `.json` or `.txt`, or the file is no
            schedule.
    """
    path = Path(path)
    is_json = _is_json(path)
    text = path.read_text(encoding="utf-8")
    return _from_json(text) if is_json else Schedule.from_text(text)


def _is_json(path: Path) -> bool:
    if path.suffix not in (".json", ".txt"):
        raise ValueError(f"`path` must end in `.json` or `.txt`, got {str(path)!r}.")
    return path.suffix == ".json"


def _to_json(schedule: Schedule) -> str:
    """One line per rank, so that a change is easy to see in a diff."""
    rows = ",\n    ".join(json.dumps(list(map(str, row))) for row in schedule.actions)
    head = {
        "name": schedule.name,
        "num_microbatches": schedule.num_microbatches,
        "rank_of_stage": list(schedule.rank_of_stage),
    }
    fields = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    fields.append(f'  "actions": [\n    {rows}\n  ]')
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _from_json(text: str) -> Schedule:
    try:
        data: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"a schedule in JSON must be one object, got: {error}.") from error
    if not isinstance(data, dict) or set(data) != set(_KEYS):
        keys = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"a schedule in JSON must have the keys {list(_KEYS)}, got {keys}.")
    name, num_microbatches, holders, rows = (data[key] for key in _KEYS)
    if not isinstance(name, str) or not _is_whole(num_microbatches):
        raise ValueError(
            f"`name` must be text and `num_microbatches` a whole number, got {name!r} and "
            f"{num_microbatches!r}."
        )
    if not isinstance(holders, list) or not all(map(_is_whole, holders)):
        raise ValueError(f"`rank_of_stage` must be a list of whole numbers, got {holders!r}.")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and all(isinstance(word, str) for word in row) for row in rows
    ):
        raise ValueError("`actions` must be one list of short names, such as `F2.5`, per rank.")
    return Schedule(
        num_ranks=len(rows),
        num_stages=len(holders),
        num_microbatches=num_microbatches,
        actions=tuple(tuple(map(Action.parse, row)) for row in rows),
        rank_of_stage=tuple(holders),
        name=name,
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
