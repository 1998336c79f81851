from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st
from olmo_pipeline import Action, Schedule

torch.set_num_threads(1)


@st.composite
def _any_schedule(draw: st.DrawFn, *, split: bool) -> Schedule:
    """Any placement of stages, any legal order: a random order of all actions, needs first.

    Where `split` is drawn, any backward may be split; its weight gradient comes at any later time.
    """
    num_ranks = draw(st.integers(1, 4))
    num_stages = draw(st.integers(1, 6))
    num_microbatches = draw(st.integers(1, 4))
    placement = draw(
        st.lists(st.integers(0, num_ranks - 1), min_size=num_stages, max_size=num_stages)
    )
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    split = split and draw(st.booleans())
    deferred: list[Action] = []
    progress = [0] * num_microbatches  # a microbatch is a chain of 2 * num_stages actions
    unfinished = list(range(num_microbatches))
    while unfinished:
        microbatch = draw(st.sampled_from(unfinished))
        step = progress[microbatch]
        if step < num_stages:
            action = Action("forward", step, microbatch)
        else:
            action = Action("backward", 2 * num_stages - 1 - step, microbatch)
            if split and draw(st.booleans()):
                action = Action("input_gradient", action.stage, microbatch)
                deferred.append(Action("weight_gradient", action.stage, microbatch))
        rows[placement[action.stage]].append(action)
        progress[microbatch] += 1
        if progress[microbatch] == 2 * num_stages:
            unfinished.remove(microbatch)
        while deferred and (not unfinished or draw(st.booleans())):
            late = deferred.pop(draw(st.integers(0, len(deferred) - 1)))
            rows[placement[late.stage]].append(late)
    return Schedule(
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        actions=tuple(map(tuple, rows)),
        rank_of_stage=tuple(placement),
        name="any",
    )


@pytest.fixture(scope="session")
def any_schedule() -> st.SearchStrategy[Schedule]:
    """Whole backwards, as the executor runs them."""
    return _any_schedule(split=False)


@pytest.fixture(scope="session")
def any_split_schedule() -> st.SearchStrategy[Schedule]:
    """Some backwards split, or none."""
    return _any_schedule(split=True)


@pytest.fixture(scope="session")
def parse_rows() -> Callable[..., Schedule]:
    """From rows of short action names to a schedule, without proof."""

    def parse(rank_of_stage: tuple[int, ...], num_microbatches: int, *rows: str) -> Schedule:
        return Schedule(
            num_ranks=len(rows),
            num_stages=len(rank_of_stage),
            num_microbatches=num_microbatches,
            actions=tuple(tuple(map(Action.parse, row.split())) for row in rows),
            rank_of_stage=rank_of_stage,
            name="by hand",
        )

    return parse
