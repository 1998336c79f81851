"""The benchmark of schedules: its numbers are the simulator's, its reports those of the code."""

import csv
import importlib
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from olmo_pipeline import simulate, zero_bubble

FOLDER = Path(__file__).parent.parent / "benchmarks"
REPORTS = FOLDER / "reports"
NAMES = ("measure", "report", "searches")


@pytest.fixture(scope="module")
def benchmark():
    """The benchmark's modules, whose names belong to other programs too."""
    before = {name: sys.modules.pop(name, None) for name in NAMES}
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(FOLDER))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def _stored() -> dict[tuple[str, int, int], dict[str, str]]:
    with (REPORTS / "table.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["schedule"], int(row["num_ranks"]), int(row["num_microbatches"])): row for row in rows
    }


def test_small_sizes_make_every_page(benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark["measure"], "RANKS", (2, 4))
    monkeypatch.setattr(benchmark["measure"], "MICROBATCHES", (4, 8))
    rows = benchmark["measure"].measure_all()
    benchmark["report"].write_report(rows, tmp_path)
    (row,) = [r for r in rows if r[:3] == ("zero_bubble h1", 4, 8)]
    timeline = simulate(zero_bubble(4, 8, "h1"), forward=2.0, backward=4.0)
    assert (row.makespan, row.idle, row.bubble) == (
        timeline.makespan,
        timeline.makespan - 48,
        timeline.bubble,
    )
    assert row.peak == 2 * max(timeline.peak_live_per_rank)
    summary = (tmp_path / "summary.md").read_text()
    assert "with these 23.8 % and 6/6/6/6." in summary
    assert "differ: dual_pipe_v." in summary
    for name, published in (("bubble", "published_idle"), ("peak", "published_peak")):
        rings = [
            r
            for r in rows
            if getattr(r, published) is not None and (name, r.schedule) != ("peak", "gpipe")
        ]
        assert (tmp_path / f"{name}.svg").read_text().count("<circle") == len(rings) > 0
    with (tmp_path / "table.csv").open(newline="", encoding="utf-8") as file:
        for made in csv.DictReader(file):
            key = (made["schedule"], int(made["num_ranks"]), int(made["num_microbatches"]))
            if key[2] == 8:  # the summary has 4 ranks and 8 microbatches, as the stored one does
                assert made == _stored()[key]


def test_every_stored_row_without_a_search_is_the_codes(benchmark):
    measure = benchmark["measure"]
    stored = _stored()
    for contender in measure.CONTENDERS:
        for num_ranks in measure.RANKS:
            for count in (4, 16):
                row = measure._measure(contender, num_ranks, count)
                want = stored[contender.name, num_ranks, count]
                assert f"{row.makespan:.6g}" == want["makespan"]
                assert str(row.peak) == want["peak"]


def test_what_the_search_finds_is_what_its_page_says(benchmark):
    searches = benchmark["searches"]
    stored = (REPORTS / "search.md").read_text()
    rows = [line for line in stored.splitlines() if line.startswith(("| 4", "| 8", "| 16"))]
    assert len(rows) == len(searches.PROBLEMS)
    for problem, row in zip(searches.PROBLEMS, rows, strict=True):
        assert row.startswith(f"| {' | '.join(map(str, problem))} | ")
    proved = [
        problem
        for problem, row in zip(searches.PROBLEMS, rows, strict=True)
        if row.endswith(" proved |") and problem.num_microbatches == 8
    ]
    assert len(proved) > 5
    for row in searches.page(searches.measure(proved)).splitlines()[-len(proved) :]:
        assert row in rows


def test_the_state_of_a_makespan(benchmark):
    searches = benchmark["searches"]
    problem = searches.Problem(4, 8, "v", searches.SPLIT, searches.UNITS, 5)

    def state(makespan: float, bound: float = 55.0) -> str:
        return searches.Found(problem, makespan, 0.1, bound).state

    assert state(57) == "a solver finds 56"
    assert state(56) == "proved by a solver"
    assert state(56, bound=56.0) == "proved"
    other = problem._replace(costs=searches.TRANSFER)
    assert searches.Found(other, 57, 0.1, 55.0).state == "best found"
    assert asdict(searches.costs_of(other))["transfer"] == 0.25
    heavy = searches.costs_of(problem._replace(costs=searches.HEAVY_LAST))
    assert asdict(heavy)["forward"] == [1.0] * 7 + [1.5]
