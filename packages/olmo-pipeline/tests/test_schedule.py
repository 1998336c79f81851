import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import Action, Schedule, interleaved_one_f_one_b, one_f_one_b

KINDS = ["forward", "backward", "input_gradient", "weight_gradient"]


@given(st.sampled_from(KINDS), st.integers(0, 10**6), st.integers(0, 10**6))
def test_an_action_survives_its_short_form(kind, stage, microbatch):
    action = Action(kind, stage, microbatch)
    assert Action.parse(str(action)) == action


def test_the_short_form_of_an_action():
    assert str(Action("forward", 2, 15)) == "F2.15"
    assert str(Action("backward", 0, 3)) == "B0.3"
    assert str(Action("input_gradient", 0, 3)) == "I0.3"
    assert str(Action("weight_gradient", 0, 3)) == "W0.3"


@pytest.mark.parametrize("text", ["", "F", "F1", "F1.", "f1.2", "F1.2 ", "F-1.2", "X1.2", "F1.2.3"])
def test_other_text_is_no_action(text):
    with pytest.raises(ValueError, match=r"must read like `F2.5`, with F, B, I or W, got '"):
        Action.parse(text)


def test_an_action_is_checked_and_frozen():
    with pytest.raises(ValueError, match=r"`kind` must be one of \['forward', .*\], got 'weight'"):
        Action("weight", 0, 0)
    with pytest.raises(ValueError, match=r"must not be negative, got 0 and -1"):
        Action("forward", 0, -1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Action("forward", 0, 0).stage = 1


def test_the_text_of_a_schedule():
    assert str(one_f_one_b(2, 2)) == (
        "name: one_f_one_b\n"
        "microbatches: 2\n"
        "rank of stage: 0 1\n"
        "rank 0: F0.0 F0.1 B0.0 B0.1\n"
        "rank 1: F1.0 B1.0 F1.1 B1.1\n"
    )


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_schedule_survives_its_text(any_schedule, data):
    schedule = data.draw(any_schedule)
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert Schedule.from_text("\n" + schedule.to_text().replace("\n", "\n\n")) == schedule


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name:", "title:", r"line 1 of a schedule must begin with `name:`, got 'title: one"),
        ("rank 1:", "rank 2:", r"line 5 of a schedule must begin with `rank 1:`, got 'rank 2: F1"),
        ("rank of stage: 0 1", "rank of stage: 0 x", r"`rank of stage` .* whole numbers, got 'x'"),
        ("microbatches: 2", "microbatches:", r"`microbatches` .* must be whole numbers, got ''"),
        ("F0.1", "F0,1", r"must read like `F2.5`, .* got 'F0,1'"),
    ],
)
def test_faulty_text_is_named(old, new, message):
    text = one_f_one_b(2, 2).to_text()
    assert old in text
    with pytest.raises(ValueError, match=message):
        Schedule.from_text(text.replace(old, new))


def test_text_without_ranks_is_named():
    with pytest.raises(ValueError, match=r"line 4 of a schedule must begin with `rank 0:`, got ''"):
        Schedule.from_text("name: x\nmicrobatches: 1\nrank of stage: 0\n")
    with pytest.raises(ValueError, match=r"line 1 of a schedule must begin with `name:`, got ''"):
        Schedule.from_text("")


def test_stages_of_a_rank():
    schedule = interleaved_one_f_one_b(3, 4, 2)
    assert [schedule.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    with pytest.raises(ValueError, match=r"`rank` must be in \[0, 3\), got 3"):
        schedule.stages_of(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ranks": 0}, r"`num_ranks` must be at least 1, got 0"),
        ({"num_microbatches": 0}, r"`num_microbatches` must be at least 1, got 0"),
        ({"actions": ((),)}, r"`actions` must hold one tuple per rank \(2\), got 1"),
        ({"rank_of_stage": (0,)}, r"`rank_of_stage` must hold one rank per stage \(2\), got 1"),
        ({"rank_of_stage": (0, 2)}, r"`rank_of_stage` must be in \[0, 2\), got 2 for stage 1"),
        ({"name": "two\nlines"}, r"`name` must be one line without blanks around it"),
    ],
)
def test_the_form_of_a_schedule_is_checked(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(one_f_one_b(2, 2), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_microbatches": 1.0},
            r"sizes and `rank_of_stage` .* whole numbers, got \[1, 1, 1\.0",
        ),
        ({"rank_of_stage": (0.0,)}, r"whole numbers, got \[1, 1, 1, 0\.0\]"),
        ({"name": None}, "`name` must be text, got None"),
        ({"actions": (("F0.0", "B0.0"),)}, r"rows of `Action`, got 'F0\.0'; `Action\.parse` reads"),
        ({"actions": ("F0.0 B0.0",)}, "must hold rows of `Action`, got 'F'"),
        ({"actions": ((Action("forward", 0.5, 0),),)}, r"whole numbers, got F0\.5\.0"),
    ],
)
def test_the_kinds_of_a_schedule_are_checked(change, message):
    fields = {
        "num_ranks": 1,
        "num_stages": 1,
        "num_microbatches": 1,
        "actions": ((Action("forward", 0, 0), Action("backward", 0, 0)),),
        "rank_of_stage": (0,),
        "name": "x",
    }
    with pytest.raises(TypeError, match=message):
        Schedule(**{**fields, **change})
    as_lists = {**fields, "actions": [list(fields["actions"][0])], "rank_of_stage": [0]}
    assert {Schedule(**as_lists): 1}[Schedule(**fields)] == 1
