import dataclasses
import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import (
    Costs,
    interleaved_one_f_one_b,
    lower_bound,
    one_f_one_b,
    search,
    simulate,
    v_shape,
    validate,
    zero_bubble,
)

EQUAL = Costs(forward=1.0, backward=1.0)
SPLIT = Costs(forward=1.0, backward=2.0)  # forward, input gradient and weight gradient 1 each


def _makespan(schedule, costs):
    options = {field.name: getattr(costs, field.name) for field in dataclasses.fields(costs)}
    return simulate(schedule, **options).makespan


def _least_slots(num_ranks, num_microbatches, cap, placement, split):
    """Count the slots of the best schedule of all, by trying every choice in every slot.

    All costs are 1, microbatches in order. A state holds how often each kind of action has been
    done at each of the two chunks' stages; all states that can be reached grow slot by slot.
    """
    num_stages = 2 * num_ranks
    there = list(range(num_ranks))
    holders = there + (there[::-1] if placement == "v" else there)
    kinds = 3 if split else 2
    stages = [[s for s in range(num_stages) if holders[s] == r] for r in range(num_ranks)]

    def choices(state, rank):
        yield None
        live = sum(state[0][s] - state[-1][s] for s in stages[rank])
        for s in stages[rank]:
            done = state[0][s]
            if done < num_microbatches and live < cap and (s == 0 or state[0][s - 1] > done):
                yield 0, s
            source = state[0][s] if s == num_stages - 1 else state[1][s + 1]
            if min(source, state[0][s]) > state[1][s]:
                yield 1, s
            if split and state[1][s] > state[2][s]:
                yield 2, s

    reached = {((0,) * num_stages,) * kinds}
    end = ((num_microbatches,) * num_stages,) * kinds
    slots = 0
    while end not in reached:
        slots += 1
        following = set()
        for state in reached:
            for chosen in product(*(choices(state, rank) for rank in range(num_ranks))):
                new = [list(row) for row in state]
                for kind, s in filter(None, chosen):
                    new[kind][s] += 1
                following.add(tuple(map(tuple, new)))
        reached = following
    return slots


@pytest.mark.parametrize("placement", ["v", "loop"])
@pytest.mark.parametrize(
    ("num_microbatches", "cap", "split"),
    [(1, 2, False), (2, 2, False), (3, 3, False), (3, 4, False), (2, 3, True), (2, 4, True)],
)
def test_equals_the_best_of_all_schedules(placement, num_microbatches, cap, split):
    options = {"memory_cap": cap, "placement": placement, "split_backward": split}
    costs = SPLIT if split else EQUAL
    found = search(2, num_microbatches, costs=costs, tries=3000, **options)
    best = _least_slots(2, num_microbatches, cap, placement, split)
    assert _makespan(found, costs) == best
    assert lower_bound(2, num_microbatches, costs=costs, **options) <= best


@pytest.mark.parametrize(
    ("placement", "cap", "slots", "proved"),
    [
        ("v", 4, 50, False),
        ("v", 5, 46, False),
        ("v", 6, 42, True),
        ("v", 7, 40, True),
        ("v", 8, 38, True),
        ("loop", 7, 40, True),
        ("loop", 8, 38, True),
        ("loop", 11, 38, True),
    ],
)
def test_whole_backwards_of_4_ranks_and_8_microbatches(placement, cap, slots, proved):
    """All are the least possible; a solver says so where the bound does not."""
    tries = 1000 if cap == 4 else None
    schedule = search(4, 8, memory_cap=cap, costs=EQUAL, placement=placement, tries=tries)
    validate(schedule, max_live=cap)
    assert _makespan(schedule, EQUAL) == slots
    bound = lower_bound(4, 8, memory_cap=cap, costs=EQUAL, placement=placement)
    assert (bound == slots) == proved


@pytest.mark.parametrize(("cap", "slots"), [(4, 59), (6, 53), (7, 52), (8, 51)])
def test_split_backwards_of_4_ranks_and_8_microbatches(cap, slots):
    options = {"memory_cap": cap, "split_backward": True}
    schedule = search(4, 8, costs=SPLIT, **options)
    validate(schedule, max_live=cap)
    assert _makespan(schedule, SPLIT) == slots == lower_bound(4, 8, costs=SPLIT, **options)


@pytest.mark.parametrize("cap", [10, 12, 16])
def test_the_least_time_of_the_v(cap):
    """The formulas of the bound, attained."""
    whole = search(8, 16, memory_cap=cap, costs=EQUAL)
    assert _makespan(whole, EQUAL) == 4 * 16 + 2 * 7 + 2 * (16 - cap)
    if cap == 16:
        split = search(8, 16, memory_cap=cap, costs=SPLIT, split_backward=True)
        assert _makespan(split, SPLIT) == 6 * 16 + 7


def test_16_ranks_and_64_microbatches():
    for cap, split, slots in ((18, False, 314), (32, False, 286), (32, True, 399)):
        costs = SPLIT if split else EQUAL
        schedule = search(16, 64, memory_cap=cap, costs=costs, split_backward=split)
        validate(schedule, max_live=cap)
        assert _makespan(schedule, costs) == slots


def test_the_better_of_both_placements():
    """With as many microbatches as ranks the loop is better, under a cap like this one the V."""
    for cap, name, makespan in ((16, "loop", 69), (10, "v", None)):
        options = {"memory_cap": cap, "tries": 30}
        found = {p: search(8, 8, placement=p, **options) for p in ("v", "loop", "any")}
        times = {p: _makespan(schedule, Costs()) for p, schedule in found.items()}
        assert found["any"] == found[name]
        assert times["any"] == min(times.values()) < max(times.values())
        bounds = {p: lower_bound(8, 8, memory_cap=cap, placement=p) for p in found}
        assert bounds["any"] == min(bounds["v"], bounds["loop"]) <= times["any"]
        assert makespan is None or times["any"] == bounds["any"] == makespan


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_problem_gives_a_valid_schedule(data):
    num_ranks, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    num_chunks, split = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    caps = st.one_of(
        st.none(),
        st.integers(num_chunks, num_chunks + 6),
        st.lists(st.integers(num_chunks, 9), min_size=num_ranks, max_size=num_ranks),
    )
    stages = num_ranks * num_chunks
    cost = st.lists(st.floats(0.5, 4.0), min_size=stages, max_size=stages)
    costs = Costs(
        forward=data.draw(cost),
        backward=data.draw(cost),
        transfer=data.draw(st.floats(0.0, 2.0)),
    )
    options = {
        "memory_cap": data.draw(caps),
        "costs": costs,
        "placement": data.draw(st.sampled_from(["v", "loop", "any"])),
        "num_chunks": num_chunks,
        "split_backward": split,
    }
    schedule = search(num_ranks, count, tries=20, **options)
    validate(schedule, max_live=options["memory_cap"])
    assert schedule.splits_backward == split
    assert _makespan(schedule, costs) >= lower_bound(num_ranks, count, **options) - 1e-9
    assert search(num_ranks, count, tries=20, **options) == schedule


@pytest.mark.parametrize(
    ("known", "options"),
    [
        (interleaved_one_f_one_b(4, 8, 3), {"placement": "loop", "num_chunks": 3}),
        (one_f_one_b(4, 8), {"num_chunks": 1, "memory_cap": [4, 3, 2, 1]}),
        (v_shape(4, 8), {"memory_cap": 6}),
        (zero_bubble(4, 8, "h1"), {"num_chunks": 1, "memory_cap": 4, "split_backward": True}),
        (zero_bubble(4, 8, "v"), {"memory_cap": 8, "split_backward": True}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_never_worse_than_a_known_schedule(known, options):
    costs = Costs(forward=1.0, input_gradient=1.3, weight_gradient=0.6, backward=1.9)
    found = search(4, 8, costs=costs, tries=1, **options)
    assert _makespan(found, costs) <= _makespan(known, costs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_cap": 1}, "`memory_cap` must be at least `num_chunks`=2, .* got 1"),
        ({"memory_cap": [4]}, r"`memory_cap` must be one number or one per rank \(2\), got 1"),
        ({"placement": "w"}, '`placement` must be "v", "loop" or "any", got \'w\''),
        ({"num_chunks": 0}, "`num_chunks` must be at least 1, got 0"),
        ({"tries": 0}, "`tries` must be at least 1, got 0"),
        ({"costs": Costs(forward=[1.0])}, r"`forward` .* one per stage \(4\), got 1"),
        (
            {"costs": Costs(forward=1.0, backward=1e-9)},
            r"at most 1e\+06 times .* got 1.0 and",
        ),
        ({"costs": Costs(forward=1e-12, transfer=1.0)}, r"at most 1e\+06 times the least cost"),
        ({"costs": Costs(forward=1e308)}, r"`forward` must be at most 1e\+100, got 1e\+308"),
    ],
)
def test_faulty_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        search(2, 2, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 2.0}, "`num_ranks` must be a whole number, got 2.0"),
        ({"num_microbatches": None}, "`num_microbatches` must be a whole number, got None"),
        ({"memory_cap": 2.5}, "`memory_cap` must be a whole number or a list of them, got 2.5"),
        ({"memory_cap": [4, 4.0]}, "`memory_cap` must be a whole number or a list of them"),
        ({"tries": math.nan}, "`tries` must be a whole number, got nan"),
        ({"tries": True}, "`tries` must be a whole number, got True"),
        ({"costs": {}}, r"`costs` must be `Costs` or None, got \{\}"),
        ({"costs": Costs(forward="1")}, "`forward` must be a number or a list of numbers, got '1'"),
    ],
)
def test_arguments_of_a_wrong_kind(options, message):
    with pytest.raises(TypeError, match=message):
        search(**{"num_ranks": 2, "num_microbatches": 2, **options})


@pytest.mark.parametrize("backward", [1e-5, 1e5])
def test_costs_that_are_far_apart_make_an_order_that_is_legal(backward):
    validate(search(4, 8, costs=Costs(forward=1.0, backward=backward), tries=30, memory_cap=6))
