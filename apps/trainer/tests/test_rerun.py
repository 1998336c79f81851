"""When a step is run again, with how much room, and what is said of it; ranks are in tests/."""

import weakref
from xml.etree import ElementTree

import pytest
import torch
from olmo_ep_comm import Dispatched, LocalDispatcher
from olmo_trainer import dispatcher as dispatcher_module
from olmo_trainer import loop
from olmo_trainer.cli import main
from olmo_trainer.config import DropsRerun
from olmo_trainer.dispatcher import build_dispatcher
from olmo_trainer.growing_dispatcher import GrowingDispatcher
from olmo_trainer.mesh import Mesh
from olmo_trainer.metrics import StepRecord, record_from_dict
from olmo_trainer.overrides import ConfigError, apply_overrides
from olmo_trainer.recipes import nano
from olmo_trainer.report.history import gather_history
from olmo_trainer.report.page import write_report
from olmo_trainer.report.pictures import draw_capacity, draw_dropped
from olmo_trainer.rerun import DroppedError, Reruns, StepRerun
from olmo_trainer.statistics import StepStatistics
from olmo_trainer.verify import Case, Layout, case_config

ROOM = (
    *("layout.expert=2", "layout.dispatcher.kind=rowwise"),
    "layout.dispatcher.capacity_factor=1.2",
)


def _growing(factor: float = 1.0, most: float = 4.0) -> GrowingDispatcher:
    return GrowingDispatcher(lambda _: LocalDispatcher(num_experts=4), factor, most=most)


class Step:
    """A step that needs a capacity factor of `need`, of 100 routes; what is above is dropped."""

    def __init__(self, dispatcher: GrowingDispatcher, need: float) -> None:
        self.dispatcher, self.need = dispatcher, need
        self.statistics = StepStatistics(nano().model, torch.device("cpu"))
        self.factors: list[float] = []

    def run(self) -> None:
        self.factors.append(self.dispatcher.factor)
        self.statistics.zero()
        self.statistics._counts_LE[0] += 25
        missing = max(1 - self.dispatcher.factor / self.need, 0.0)
        dropped = torch.tensor(round(100 * missing))
        nothing = torch.zeros(4, dtype=torch.int32)
        sent = Dispatched(torch.zeros(0, 32), torch.zeros(0), nothing, dropped, None)
        self.statistics.add_dispatched(1, sent, local_experts=range(4))


@pytest.mark.parametrize(
    ("settings", "need", "factors", "over"),
    [
        ({}, 0.9, [1.0], False),
        ({}, 1.4, [1.0, 1.5], False),
        ({}, 4.0, [1.0, 1.5, 2.25, 3.375, 4.0], False),
        ({}, 5.0, [1.0, 1.5, 2.25, 3.375, 4.0], True),
        ({"most_times": 2}, 4.0, [1.0, 1.5, 2.25], True),
        ({"growth": 3.0}, 4.0, [1.0, 3.0, 4.0], False),
        ({"most_dropped": 0.5}, 2.0, [1.0], False),
        ({"most_dropped": 0.49}, 2.0, [1.0, 1.5], False),
    ],
)
def test_a_step_is_run_until_it_drops_few_enough_or_cannot_grow(settings, need, factors, over):
    dispatcher = _growing()
    step, rerun = Step(dispatcher, need), StepRerun(DropsRerun(**settings), dispatcher)
    rerun.repeat(step.run, step.statistics)
    assert step.factors == factors
    last = rerun.report()
    part = max(round(100 * (1 - factors[-1] / need)) / 100, 0.0)
    assert last == Reruns(len(factors) - 1, factors[-1], part, over)
    step.need = 0.5
    rerun.repeat(step.run, step.statistics)  # the next step begins with the larger buffers
    assert step.factors[len(factors) :] == factors[-1:]
    assert rerun.report() == Reruns(0, factors[-1], 0.0, False)


@pytest.mark.parametrize("at_limit", ["take", "stop"])
def test_a_step_over_the_limit_is_taken_or_not(at_limit):
    dispatcher = _growing()
    step = Step(dispatcher, 8.0)
    rerun = StepRerun(DropsRerun(most_times=1, at_limit=at_limit), dispatcher)
    rerun.require_room(1)  # before any
    rerun.repeat(step.run, step.statistics)
    if at_limit == "take":
        rerun.require_room(7)
        return
    message = (
        "step 7: 81.00% of its routes found no room, 0.00% may, after 1 reruns up to a capacity "
        "factor of 1.5; nothing was updated. Raise rerun.most_capacity_factor"
    )
    with pytest.raises(DroppedError, match=message):
        rerun.require_room(7)


def test_a_step_that_diverged_is_left_to_the_guard():
    # Its scores choose the same experts for every token, which no room would help.
    dispatcher = _growing()
    rerun = StepRerun(DropsRerun(at_limit="stop"), dispatcher)
    step = Step(dispatcher, 4.0)

    def run() -> None:
        step.run()
        step.statistics.add_loss(torch.tensor(torch.nan), torch.tensor(9))

    rerun.repeat(run, step.statistics)
    assert step.factors == [1.0]
    assert rerun.report() == Reruns(0, 1.0, 0.0, False)
    rerun.require_room(1)  # what is not finite is the word for it, not what was dropped
    rerun.repeat(step.run, step.statistics)
    assert dispatcher.factor == 4.0


def test_words_of_a_step():
    first, over = Reruns(), Reruns(0, 1.5, 0.125, True)
    assert Reruns().describe(first) == ""
    assert Reruns(0, 1.5, 0.01, False).describe(first) == ""
    assert Reruns(2, 2.25, 0.0, False).describe(first) == (
        "was run 3 times, up to a capacity factor of 2.25, which stays"
    )
    assert Reruns(1, 1.5, 0.125, True).describe(first) == (
        "was run 2 times, up to a capacity factor of 1.5, which stays; it is taken, but 12.50% of "
        "its routes found no room"
    )
    assert over.describe(first) == "is taken, but 12.50% of its routes found no room"
    assert over.describe(Reruns(0, 1.5, 0.0, False)) == over.describe(first)


def test_a_run_over_its_limit_does_not_say_so_at_every_step():
    over = Reruns(0, 1.5, 0.125, True)
    assert over.describe(Reruns(1, 1.5, 0.2, True)) == over.describe(over) == ""
    assert "it is taken, but" in Reruns(1, 2.0, 0.125, True).describe(over)


def test_buffers_go_before_larger_ones_come_and_those_that_do_not_fit_are_named():
    made: list[weakref.ref] = []

    def make(factor: float) -> LocalDispatcher:
        assert all(each() is None for each in made)
        if factor > 2:
            raise ValueError("layout.dispatcher.kind = 'rowwise': no room for 9 bytes")
        dispatcher = LocalDispatcher(num_experts=4)
        made.append(weakref.ref(dispatcher))
        return dispatcher

    dispatcher = GrowingDispatcher(make, 1.0, most=4.0)
    assert dispatcher.grow(1.5)
    assert len(made) == 2
    step, rerun = Step(dispatcher, 4.0), StepRerun(DropsRerun(), dispatcher)
    with pytest.raises(DroppedError, match=r"no room for 9 bytes; lower rerun.most_capacity_fa"):
        rerun.repeat(step.run, step.statistics)
    assert step.factors == [1.5]


def test_rows_travel_as_without_growth():
    dispatcher, plain = _growing(), LocalDispatcher(num_experts=4)
    x, ids = torch.randn(5, 8), torch.tensor([[0, 3], [1, 2], [3, 0], [2, -1], [0, 1]])
    weights = torch.rand(5, 2)
    results = []
    for each in (dispatcher, plain):
        sent = each.dispatch(x, ids, weights)
        results.append(each.combine(sent.rows_RD * sent.row_weights_R[:, None], sent.handle))
    assert torch.equal(*results)
    assert (dispatcher.num_experts, dispatcher.local_experts) == (4, range(4))


@pytest.mark.parametrize(
    ("loaded", "factor"), [(2.0, 2.0), (9.0, 4.0), (0.5, 1.0)], ids=["larger", "too", "smaller"]
)
def test_a_loaded_capacity_is_taken_as_far_as_it_fits(loaded, factor):
    dispatcher = _growing()
    rerun = StepRerun(DropsRerun(), dispatcher)
    (held,) = rerun.state_dict().values()
    assert held.item() == 1.0
    held.fill_(loaded)
    rerun.finish_loading()
    assert (dispatcher.factor, held.item()) == (factor, factor)
    dispatcher.grow(1.5)
    step = Step(dispatcher, 5.0)
    rerun.repeat(step.run, step.statistics)
    assert held.item() == dispatcher.factor == 4.0


def _mesh(num_expert: int) -> Mesh:
    sizes = {"rank": 0, "world": num_expert, "data": 0, "num_data": num_expert}
    more = {"context": 0, "num_context": 1, "expert": 0, "num_expert": num_expert, "pipeline": 0}
    return Mesh(**sizes, **more, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("settings", "num_experts", "most"),
    [
        ((), 4, 2.0),  # both routes of each token of both ranks
        ((), 2, 1.0),  # an expert a rank: no token sends two routes there
        (("rerun.most_capacity_factor=1.3",), 4, 1.3),
        (("rerun.most_capacity_factor=7",), 4, 2.0),
    ],
)
def test_buffers_grow_up_to_the_worst_case(monkeypatch, settings, num_experts, most):
    rows = []

    def create(kind, *, capacity, **options):
        rows.append(capacity)
        return LocalDispatcher(num_experts=num_experts)

    monkeypatch.setattr(dispatcher_module, "create_dispatcher", create)
    experts = f"model.moe.num_experts={num_experts}"
    first = "layout.dispatcher.capacity_factor=0.9"
    config = apply_overrides(nano(), [*ROOM, first, experts, "rerun.kind=drops", *settings])
    made = build_dispatcher(config.for_world(2), _mesh(2), dtype=torch.float32, live_forwards=1)
    assert isinstance(made, GrowingDispatcher)
    assert made.most == most
    while made.grow(1.1):
        pass
    even = 4 * 64 * 2  # sequences of a rank, their length, experts a token
    assert rows[0] == -(-9 * even // 10)
    assert rows[-1] == -(-most * even // 1)
    assert rows == sorted(set(rows))


@pytest.mark.parametrize("rerun", ["none", "drops"])
def test_no_buffer_is_larger_than_the_worst_case(monkeypatch, rerun):
    rows = []

    def create(kind, *, capacity, **options):
        rows.append(capacity)
        return LocalDispatcher(num_experts=4)

    monkeypatch.setattr(dispatcher_module, "create_dispatcher", create)
    settings = ("layout.dispatcher.capacity_factor=1e9", f"rerun.kind={rerun}")
    config = apply_overrides(nano(), [*ROOM, *settings]).for_world(2)
    build_dispatcher(config, _mesh(2), dtype=torch.float32, live_forwards=1)
    assert rows == [2 * 4 * 64 * 2]  # of both ranks, what `even` counts above


@pytest.mark.parametrize(("factor", "words"), [(1.9, 0), (2, 1)])
def test_reruns_that_never_come_are_said(factor, words):
    settings = (*ROOM, f"layout.dispatcher.capacity_factor={factor}", "steps=100")
    assert apply_overrides(nano(), settings).unreached() == []
    said = apply_overrides(nano(), [*settings, "rerun.kind=drops"]).unreached()
    assert len(said) == words
    assert all("(2.0) is no less than the worst case (2): nothing is dropped" in it for it in said)


def test_without_reruns_nothing_grows(monkeypatch):
    monkeypatch.setattr(
        dispatcher_module, "create_dispatcher", lambda kind, **_: LocalDispatcher(num_experts=4)
    )
    config = apply_overrides(nano(), ROOM).for_world(2)
    made = build_dispatcher(config, _mesh(2), dtype=torch.float32, live_forwards=1)
    assert isinstance(made, LocalDispatcher)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("rerun.kind=drops",),
            "rerun.kind = 'drops' needs layout.dispatcher.kind = 'rowwise' with a capacity_factor, "
            "got kind = 'auto' without one, which drops nothing; set layout.dispatcher.capacity",
        ),
        (
            (*ROOM[:2], "rerun.kind=drops"),
            "needs layout.dispatcher.kind = 'rowwise' with a capacity_factor, got kind = 'rowwise'",
        ),
        (
            (*ROOM, "rerun.kind=drops", "rerun.most_capacity_factor=1.2"),
            r"rerun.most_capacity_factor \(1.2\) must be above layout.dispatcher.capacity_factor",
        ),
        (
            (*ROOM, "rerun.kind=drops", "rerun.growth=1"),
            "rerun.growth = 1: input should be greater",
        ),
        (
            (*ROOM, "rerun.kind=drops", "model.num_dense_layers=4"),
            "rerun.kind = 'drops' needs a routed layer, and the model has none",
        ),
        ((*ROOM, "rerun.kind=drops", "rerun.most_times=0"), "rerun.most_times = 0: input should"),
        ((*ROOM, "rerun.kind=drops", "rerun.most_dropped=1"), "rerun.most_dropped = 1: input sho"),
        ((*ROOM, "rerun.kind=x"), "rerun.kind = 'x': must be one of 'none', 'drops'"),
        ((*ROOM, "rerun.growth=2"), "rerun.growth: no such key for kind = 'none'"),
    ],
)
def test_wrong_reruns_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(nano(), settings)


def test_verify_compares_layouts_without_a_capacity_and_so_without_reruns():
    config = apply_overrides(nano(), [*ROOM, "rerun.kind=drops"])
    for layout in (Layout(1, 1, 1), Layout(2, 2, 1)):
        made = case_config(config, Case(layout, 1, "ragged"))
        assert made.rerun.kind == "none"


def test_a_run_that_may_not_drop_so_much_ends_with_1(monkeypatch, capsys):
    def refuse(*_, **__):
        raise DroppedError("step 3: too many")

    monkeypatch.setattr(loop, "train", refuse)
    assert main(["nano", "--set", "layout.expert=1"]) == 1
    assert capsys.readouterr().err == "error: step 3: too many\n"


def _record(step: int, **changes: object) -> StepRecord:
    numbers = {"loss": 2.0, "balance_loss": 1.0, "auxiliary_loss": 0.0, "z_loss": 0.0}
    numbers |= {"grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 9, "seconds": 1.0}
    layers = {"expert_counts": [[30, 20]] * 2, "imbalance": [1.2] * 2, "honesty": [1.0] * 2}
    layers |= {"entropy_deficit": [0.1] * 2, "dead_experts": [0] * 2}
    values = {"step": step, "tokens_per_second": 9.0, **numbers, **layers, **changes}
    return record_from_dict({"kind": "step", **values})


def _page(folder, records) -> str:
    path = write_report(
        folder / "r.html", title="t", config={}, summary={}, records=records, sample=""
    )
    return " ".join("".join(ElementTree.fromstring(path.read_text()).itertext()).split())


def test_a_report_says_what_was_dropped_and_run_again(tmp_path):
    grown = {"capacity_factor": 1.8, "reruns": 2}
    records = [
        _record(1, capacity_factor=0.8),
        _record(2, **grown, dropped=5),
        _record(3, capacity_factor=1.8, dropped=10, over_capacity=1),
    ]
    words = _page(tmp_path, records)
    for each in (
        "Dropped routes",
        "Steps that dropped routes2",
        "Most of a step's routes dropped10.00% in step 3",
        "Steps run again1, 2 times in all",
        "Steps taken over the limit1",
        "Capacity factor0.8 in the first step, 1.8 in the last",
    ):
        assert each in words
    history = gather_history(records, None)
    for draw, values in ((draw_dropped, [0.0, 0.05, 0.1]), (draw_capacity, [0.8, 1.8, 1.8])):
        (line,) = draw(history).axes[0].lines
        assert list(line.get_ydata()) == pytest.approx(values)


def test_a_report_without_reruns_tells_of_drops_alone_and_without_any_of_nothing(tmp_path):
    words = _page(tmp_path, [_record(1), _record(2, dropped=1)])
    assert "Most of a step's routes dropped1.00% in step 2" in words
    assert "Steps run again" not in words
    assert "Dropped routes" not in _page(tmp_path, [_record(1), _record(2)])
