from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import split_layers


def _brute_force(costs, num_stages, first_extra, last_extra):
    """The best of all cuts: least maximum, then most even, then early stages short."""
    keyed = []
    for cuts in combinations(range(1, len(costs)), num_stages - 1):
        ends = (*cuts, len(costs))
        stages = [sum(costs[a:b]) for a, b in zip((0, *cuts), ends, strict=True)]
        stages[0] += first_extra
        stages[-1] += last_extra
        keyed.append((max(stages), sum(cost**2 for cost in stages), ends))
    return min(keyed)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_equals_the_best_of_all_cuts(data):
    costs = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
    num_stages = data.draw(st.integers(1, len(costs)))
    first, last = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8))
    stages = split_layers(len(costs), num_stages, first_extra=first, last_extra=last, costs=costs)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert all(len(stage) for stage in stages)
    expected = _brute_force(costs, num_stages, first, last)
    assert tuple(stage.stop for stage in stages) == expected[2]


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 9), st.integers(2, 6), st.floats(0.5, 1.0), st.data())
def test_a_head_of_a_layer_makes_the_last_stage_one_layer_short(stages, layers, head, data):
    # Nobody asks for it: P n - 1 layers and a head that costs up to a layer, at least half of one.
    # With an embedding of the same cost as well, both ends are one short.
    scale = data.draw(st.floats(0.01, 100.0))  # measured costs come in any unit
    costs = [scale] * (stages * layers - 1)
    sizes = _sizes(len(costs), stages, last_extra=head * scale, costs=costs)
    assert sizes == [layers] * (stages - 1) + [layers - 1]
    ends = {"first_extra": head * scale, "last_extra": head * scale}
    sizes = _sizes(len(costs) - 1, stages, costs=costs[:-1], **ends)
    assert sizes == [layers - 1, *[layers] * (stages - 2), layers - 1]


def _sizes(*arguments, **options):
    return [len(stage) for stage in split_layers(*arguments, **options)]


def test_known_cuts():
    assert _sizes(8, 4) == [2, 2, 2, 2]
    assert _sizes(10, 4) == [2, 2, 3, 3]
    assert _sizes(31, 8, last_extra=1.0) == [4, 4, 4, 4, 4, 4, 4, 3]
    assert _sizes(5, 1, first_extra=3.0, last_extra=9.0) == [5]
    assert _sizes(3, 3, last_extra=100.0) == [1, 1, 1]
    # The most even cut, 6 + 3 + 2, has a slower stage than 1 + 5 + 5.
    assert _sizes(4, 3, costs=[1.0, 5.0, 3.0, 2.0]) == [1, 1, 2]
    assert split_layers(4, 2, costs=[9.0, 1.0, 1.0, 1.0]) == (range(0, 1), range(1, 4))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3, 4), {}, "each stage must get a layer: .* at least `num_stages`=4, got 3"),
        ((3, 0), {}, "`num_stages` must be at least 1, got 0"),
        ((3, 2), {"costs": [1.0]}, "`costs` must hold 3 numbers, one per layer, got 1"),
        ((2, 2), {"costs": [1.0, -1.0]}, "`costs` must be finite and not below 0, got -1.0"),
        ((2, 2), {"last_extra": float("inf")}, "`last_extra` must be finite .* got inf"),
    ],
)
def test_faulty_arguments(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        split_layers(*arguments, **options)
