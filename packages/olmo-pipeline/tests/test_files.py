import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import load_schedule, one_f_one_b, save_schedule, zero_bubble


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_a_schedule_survives_its_file(any_split_schedule, tmp_path_factory, data):
    schedule = data.draw(any_split_schedule)
    for suffix in ("json", "txt"):
        path = tmp_path_factory.mktemp("saved") / f"schedule.{suffix}"
        save_schedule(schedule, path)
        assert load_schedule(str(path)) == schedule


def test_what_the_files_hold(tmp_path):
    schedule = zero_bubble(2, 1)
    save_schedule(schedule, tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "name": "zero_bubble, h1",
        "num_microbatches": 1,
        "rank_of_stage": [0, 1],
        "actions": [["F0.0", "I0.0", "W0.0"], ["F1.0", "I1.0", "W1.0"]],
    }
    save_schedule(schedule, tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_text() == str(schedule)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actions": None}, "`actions` must be one list of short names"),
        ({"actions": [["F0.0", 3], []]}, "`actions` must be one list of short names"),
        ({"actions": [["F0,0"], []]}, "an action must read like `F2.5`"),
        ({"rank_of_stage": [0, "1"]}, "`rank_of_stage` must be a list of whole numbers"),
        ({"rank_of_stage": [0, 2]}, r"`rank_of_stage` must be in \[0, 2\)"),
        ({"num_microbatches": 1.5}, "`num_microbatches` a whole number, got 'one_f_one_b' and 1.5"),
        ({"more": 1}, r"must have the keys \['name', .*, got \['actions', 'more'"),
    ],
)
def test_faulty_json_is_named(tmp_path, change, message):
    path = tmp_path / "a.json"
    save_schedule(one_f_one_b(2, 1), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_schedule(path)


def test_a_file_that_is_no_json(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("name: x")
    with pytest.raises(ValueError, match="a schedule in JSON must be one object, got: Expecting"):
        load_schedule(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"must have the keys .*, got list"):
        load_schedule(path)


def test_other_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`path` must end in `.json` or `.txt`, got '.*a.csv'"):
        save_schedule(one_f_one_b(1, 1), tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"`path` must end in `.json` or `.txt`"):
        load_schedule(tmp_path / "a")
    assert not list(tmp_path.iterdir())
