"""Tile plans against a loop over the experts."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_routing import plan_tiles


def _loop(counts, height):
    tiles, start = [], 0
    for expert, count in enumerate(counts):
        tiles += [(expert, start + first) for first in range(0, count, height)]
        start += count
    return tiles


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    spare=st.integers(0, 50),
    height=st.integers(1, 17),
)
def test_every_row_lies_in_one_tile_of_its_own_expert(counts, spare, height):
    offsets = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
    plan = plan_tiles(offsets, sum(counts) + spare, height)
    want = _loop(counts, height)
    used = int(plan.num_tiles)
    assert used == len(want)
    assert (
        list(zip(plan.experts_C[:used].tolist(), plan.starts_C[:used].tolist(), strict=True))
        == want
    )
    assert len(plan.experts_C) == len(plan.starts_C) >= used
    assert (plan.experts_C[used:] == -1).all()
    assert (plan.starts_C[used:] == -1).all()
    assert {plan.experts_C.dtype, plan.starts_C.dtype, plan.num_tiles.dtype} == {torch.int32}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"offsets_E": torch.tensor([1, 2])}, TypeError, "must be int32, got torch.int64"),
        ({"offsets_E": torch.zeros(0, dtype=torch.int32)}, ValueError, "one end an expert"),
        ({"offsets_E": torch.tensor([3, 2], dtype=torch.int32)}, ValueError, "must not decrease"),
        ({"num_rows": 1}, ValueError, "at most `num_rows`=1"),
        ({"height": 0}, ValueError, "`height` must be at least 1"),
        ({"height": 2**31 - 4}, ValueError, r"must be at most 2\^31 - 1, got 4 \+ 2147483644"),
        ({"num_rows": 2**31}, ValueError, r"must be at most 2\^31 - 1, got 2147483648 \+ 2"),
        ({"impl": "torch"}, ValueError, "`impl` must be one of"),
        ({"impl": "triton"}, ValueError, "`impl='triton'` cannot run"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    good = {"offsets_E": torch.tensor([1, 2], dtype=torch.int32), "num_rows": 4, "height": 2}
    with pytest.raises(error, match=message):
        plan_tiles(**{**good, **arguments})


def test_the_highest_tile_there_can_be():
    offsets = torch.tensor([5, 5, 10], dtype=torch.int32)
    plan = plan_tiles(offsets, 10, 2**31 - 1 - 10)
    assert plan.num_tiles == 2
    assert plan.experts_C.tolist() == [0, 2, -1, -1]
    assert plan.starts_C.tolist() == [0, 5, -1, -1]
