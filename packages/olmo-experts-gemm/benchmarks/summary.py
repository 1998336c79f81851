"""Geometric means, worst cells, and the lines that a run prints last."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cells import OURS, Cell, geometric_mean
from shapes import GOALS, OLMO_CORE

OLMO_CORE_NAME = "Olmo-core 3.0.0 (recorded)"
ORDER = ("product", "layer", "fine", "memory")


@dataclass(frozen=True, slots=True)
class Summary:
    """Our ratios beside one peer, over the cells of one kind."""

    topic: str
    case: str
    what: str
    peer: str
    ratios: tuple[tuple[float, str], ...]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return geometric_mean(ratio for ratio, _ in self.ratios)

    @property
    def worst(self) -> tuple[float, str]:
        """The ratio furthest on the wrong side, and its cell; for bytes that is the largest."""
        return max(self.ratios) if self.topic == "memory" else min(self.ratios)

    @property
    def goal(self) -> str:
        """What it should reach, or empty; a goal is for all cases together."""
        return GOALS.get((self.topic, self.what, self.peer), "") if self.case == "all" else ""


def summarise(cells: Sequence[Cell], on_h200: bool) -> list[Summary]:
    """Every summary that the cells allow."""
    found: dict[tuple[str, str, str, str], list[tuple[float, str]]] = {}

    def note(cell: Cell, peer: str, ratio: float | None) -> None:
        if ratio is None or cell.topic not in ORDER:
            return
        label = f"{cell.shape} {cell.case} {cell.what}"
        # Only where the goals lie is each routing worth a line of its own.
        apart = cell.what == "forward+backward" and peer == "sonicmoe"
        cases = ("all", cell.case) if apart else ("all",)
        whats = (cell.what, "all") if cell.topic == "product" else (cell.what,)
        for case in cases:
            for what in whats:
                found.setdefault((cell.topic, case, what, peer), []).append((ratio, label))

    for cell in cells:
        for peer in cell.samples:
            if peer != OURS:
                note(cell, peer, cell.ratio(peer))
        if on_h200 and cell.topic == "layer" and cell.what == "forward+backward":
            note(cell, OLMO_CORE_NAME, _beside_olmo_core(cell))
    summaries = [Summary(*key, tuple(ratios)) for key, ratios in found.items()]
    return sorted(summaries, key=lambda s: ORDER.index(s.topic))


def _beside_olmo_core(cell: Cell) -> float | None:
    ours, theirs = cell.tflops(OURS), OLMO_CORE.get(cell.shape)
    return ours / theirs if ours and theirs and cell.case == "learned-like" else None


def failed(cells: Sequence[Cell]) -> list[tuple[tuple[str, str, str, str], str]]:
    """Each failure once: topic, shape, case and what it touched, and why."""
    whats: dict[tuple[str, str, str, str], list[str]] = {}
    for cell in cells:
        if cell.failure:
            why = " ".join(cell.failure.split())
            whats.setdefault((cell.topic, cell.shape, cell.case, why), []).append(cell.what)
    return [
        ((topic, shape, case, ", ".join(what)), why)
        for (topic, shape, case, why), what in whats.items()
    ]


def compact(cells: Sequence[Cell], summaries: Sequence[Summary]) -> str:
    """All that matters in some 60 lines, under 8000 characters."""
    failures = [f"FAILED {' '.join(where)}: {why[:90]}" for where, why in failed(cells)]
    lines = [
        "TFLOP/s or GiB of ours/peers in the order of the report, then ours over the first peer",
        *_compact_cells(cells),
        *_compact_first_calls(cells),
        *failures[:10],
        *([f"and {len(failures) - 10} failures more"] if len(failures) > 10 else []),
    ]
    for s in summaries:
        worst, where = s.worst
        goal = f" [{s.goal}]" if s.goal else ""
        lines.append(
            f"{s.topic} {s.what} ({s.case}) / {s.peer}: geomean {s.mean:.3f} of {len(s.ratios)}, "
            f"worst {worst:.3f} {where}{goal}"
        )
    return "\n".join(lines)[-7900:]


_SHORT = {"forward": "fwd", "forward+backward": "fwd+bwd", "router alone": "router"}


def _compact_cells(cells: Sequence[Cell]) -> Iterator[str]:
    rows: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if cell.samples and cell.topic != "first call":
            rows.setdefault((cell.topic, cell.shape, cell.case), []).append(_short(cell))
    for (topic, shape, case), parts in rows.items():
        yield f"{topic:8s}{shape:24s}{case:13s}{'  '.join(parts)}"


def _short(cell: Cell) -> str:
    name = _SHORT.get(cell.what, cell.what)
    if cell.unit == "ms" and not cell.flops:
        return f"{name} {cell.median(OURS) or 0.0:.3f} ms"
    contenders = (OURS, "torch") if cell.topic == "product" else (OURS, "sonicmoe", "torch")
    numbers, ratio = [], "-"
    for contender in contenders:
        median, tflops = cell.median(contender), cell.tflops(contender)
        if median is None:
            numbers.append("-")
        else:
            numbers.append(f"{median / 2**30:.2f}" if tflops is None else f"{tflops:.0f}")
        beside = cell.ratio(contender) if contender != OURS else None
        if beside is not None and ratio == "-":
            ratio = f"{beside:.3f}"
    return f"{name} {'/'.join(numbers)} {ratio}"


def _compact_first_calls(cells: Sequence[Cell]) -> Iterator[str]:
    rows: dict[tuple[int, str], list[str]] = {}
    for cell in cells:
        if cell.topic == "first call":
            seconds = [f"{name} {values[0]:.1f} s" for name, values in cell.samples.items()]
            rows.setdefault((cell.run, cell.shape), []).extend(seconds)
    for (_, shape), seconds in rows.items():
        yield f"first call {shape}: {', '.join(seconds)}"
