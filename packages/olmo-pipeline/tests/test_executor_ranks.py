"""The executor over gloo. The functions with `rank` and `world` run in worker processes."""

import random
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from olmo_pipeline import (
    Action,
    PipelineExecutor,
    Schedule,
    dual_pipe_v,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    search,
    v_shape,
    zero_bubble,
)

F64 = torch.float64
WIDTH = 5
pytestmark = pytest.mark.dist


class Stage(torch.nn.Module):
    """y = x + tanh(linear(x)): its output is not saved for its backward, so it may be overwritten.

    Stages 0, 3, 6, ... have an auxiliary loss; the last one returns a loss against a target.
    """

    def __init__(self, stage, num_stages):
        super().__init__()
        generator = torch.Generator().manual_seed(100 + stage)
        self.weight = torch.nn.Parameter(
            torch.randn(WIDTH, WIDTH, generator=generator, dtype=F64) / 2
        )
        self.stage, self.is_last = stage, stage == num_stages - 1

    def forward(self, hidden, microbatch):
        inputs, targets = microbatch
        hidden = inputs if hidden is None else hidden
        change = torch.tanh(hidden @ self.weight)
        auxiliary = (self.stage + 1) * (change**2).sum() if self.stage % 3 == 0 else None
        hidden = hidden + change
        return (hidden * targets).sum() if self.is_last else hidden, auxiliary


def _batch(seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, WIDTH, generator=generator, dtype=F64)  # noqa: E731
    return [(draw(n), draw(n)) for n in lengths]


def _shape(microbatch):
    return microbatch[0].shape


def _executor(schedule, rank, **options):
    stages = {s: Stage(s, schedule.num_stages) for s in schedule.stages_of(rank)}
    return stages, PipelineExecutor(schedule, stages, device="cpu", dtype=F64, **options)


def _oracle(num_stages, batches):
    """Losses of the last batch and gradients over all batches, in one process."""
    stages = [Stage(s, num_stages) for s in range(num_stages)]
    losses = []
    for batch in batches:
        losses = []
        for microbatch in batch:
            hidden, auxiliaries = None, []
            for stage in stages:
                hidden, auxiliary = stage(hidden, microbatch)
                auxiliaries += [] if auxiliary is None else [auxiliary]
            losses.append(hidden.detach())
            sum([hidden, *auxiliaries]).backward()
    return losses, [stage.weight.grad for stage in stages]


def _check_gradients(stages, expected):
    for stage, module in stages.items():
        ratio = (module.weight.grad.norm() / expected[stage].norm()).item()
        assert ratio == pytest.approx(1, abs=1e-12), f"stage {stage}: ratio {ratio}"
        torch.testing.assert_close(module.weight.grad, expected[stage], rtol=1e-11, atol=1e-12)


def _equal_one_process(rank, world, schedule, lengths_of_calls):
    batches = [_batch(seed, lengths) for seed, lengths in enumerate(lengths_of_calls)]
    stages, executor = _executor(schedule, rank)
    for batch in batches:
        result = executor.run(batch, activation_shape=_shape)
    losses, gradients = _oracle(schedule.num_stages, batches)
    _check_gradients(stages, gradients)
    if rank == schedule.rank_of_stage[-1]:
        torch.testing.assert_close(torch.stack(result.losses), torch.stack(losses))
    else:
        assert result.losses == []
    with_auxiliary = [s for s in schedule.stages_of(rank) if s % 3 == 0]
    assert set(result.auxiliaries) == {
        (s, i) for s in with_auxiliary for i in range(schedule.num_microbatches)
    }


def _many_schedules(rank, world):
    for count in (1, 3, 4, 8):
        # Another length in each microbatch and call; one microbatch without tokens.
        lengths = [[(call + 2 * i) % 5 for i in range(count)] for call in (1, 4)]
        for schedule in _all_schedules(world, count):
            _equal_one_process(rank, world, schedule, lengths)


def _all_schedules(num_ranks, count):
    yield gpipe(num_ranks, count)
    yield one_f_one_b(num_ranks, count)
    yield from (interleaved_one_f_one_b(num_ranks, count, chunks) for chunks in (2, 3))
    yield v_shape(num_ranks, count)
    yield from (zero_bubble(num_ranks, count, kind) for kind in ("h1", "v"))
    yield dual_pipe_v(num_ranks, count)
    for split in (False, True):
        cap = num_ranks + 1
        yield search(num_ranks, count, memory_cap=cap, split_backward=split, tries=2)


@pytest.mark.parametrize("world", [2, 4])
def test_every_schedule_equals_one_process(processes, world):
    processes.run(_many_schedules, world=world)


def _last_stage_on_the_first_rank(rank, world):
    rows = (
        "F0.0 F0.1 F3.0 B3.0 F3.1 B3.1 B0.0 B0.1",
        "F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1",
    )
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    _equal_one_process(rank, world, Schedule(2, 4, 2, actions, (0, 1, 1, 0), "v"), [[3, 2]])
    # Used in another order than sent; large messages, which wait for their receiver.
    rows = ("F0.0 F0.1 F0.2 B0.1 B0.0 B0.2", "F1.2 B1.2 F1.0 F1.1 B1.1 B1.0")
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    crossed = Schedule(2, 2, 3, actions, (0, 1), "crossed")
    _equal_one_process(rank, world, crossed, [[3000, 2, 20000]])


def test_other_placements_and_orders(processes):
    processes.run(_last_stage_on_the_first_rank, world=2)


def _evaluate_and_train(rank, world, schedule, evaluations):
    stages, executor = _executor(schedule, rank)
    record = []
    for step in range(3):
        if evaluations:
            batch = _batch(50 + step, [2, 7, 1, 0, 3][: 5 - 2 * step])
            result = executor.evaluate(batch, activation_shape=_shape)
            if rank == schedule.rank_of_stage[-1]:
                # The plain loss of each microbatch, not divided by anything.
                losses, _ = _oracle_after(schedule.num_stages, step, batch, schedule)
                torch.testing.assert_close(torch.stack(result.losses), torch.stack(losses))
        lengths = [step + 1 + i for i in range(schedule.num_microbatches)]
        result = executor.run(_batch(step, lengths), activation_shape=_shape)
        record += [loss.item() for loss in result.losses]
        for module in stages.values():
            with torch.no_grad():
                module.weight -= 0.01 * module.weight.grad
            record += module.weight.grad.flatten().tolist()
            module.weight.grad = None
    return record


def _oracle_after(num_stages, num_steps, batch, schedule):
    """Losses of `batch` after some training steps in one process."""
    stages = [Stage(s, num_stages) for s in range(num_stages)]

    def losses_of(microbatches):
        losses, extra = [], []
        for microbatch in microbatches:
            hidden = None
            for stage in stages:
                hidden, auxiliary = stage(hidden, microbatch)
                extra += [] if auxiliary is None else [auxiliary]
            losses.append(hidden)
        return losses, extra

    for step in range(num_steps):
        lengths = [step + 1 + i for i in range(schedule.num_microbatches)]
        losses, extra = losses_of(_batch(step, lengths))
        sum(losses + extra).backward()
        for stage in stages:
            with torch.no_grad():
                stage.weight -= 0.01 * stage.weight.grad
            stage.weight.grad = None
    losses, extra = losses_of(batch)
    return [loss.detach() for loss in losses], extra


def _evaluation_leaves_no_trace(rank, world):
    schedules = [one_f_one_b(world, 3), interleaved_one_f_one_b(world, 2, 2)]
    schedules += [v_shape(world, 3), zero_bubble(world, 3, "v")]
    for schedule in schedules:
        with_evaluations = _evaluate_and_train(rank, world, schedule, True)
        assert with_evaluations == _evaluate_and_train(rank, world, schedule, False)


@pytest.mark.parametrize("world", [2, 3])
def test_evaluate_first_between_and_with_other_sizes(processes, world):
    processes.run(_evaluation_leaves_no_trace, world=world)


def _poison_what_is_free(rank, world, num_calls, schedule):
    from olmo_pipeline._exchange import Exchange

    class Poisoning(Exchange):
        freed = 0

        def _free(self, sent):
            super()._free(sent)
            Poisoning.freed += 1
            sent.tensor.fill_(float("nan"))

    import olmo_pipeline._executor as module

    stages, executor = _executor(schedule, rank)
    draw = random.Random(rank)

    def sleepy(stage):
        def call(hidden, microbatch):
            if draw.random() < 0.1:
                time.sleep(0.002 * draw.random())
            return stages[stage](hidden, microbatch)

        return call

    executor._stages = {s: sleepy(s) for s in stages}
    batch = _batch(7, [3, 1, 4, 2, 3])
    losses, gradients = _oracle(schedule.num_stages, [batch])
    expected = losses if rank == schedule.rank_of_stage[-1] else []
    original = module.Exchange
    module.Exchange = Poisoning
    try:
        for _ in range(num_calls):
            before = Poisoning.freed
            ran = executor.run(batch, activation_shape=_shape).losses
            assert Poisoning.freed >= before + schedule.num_microbatches
            _check_gradients(stages, gradients)
            for stage in stages.values():
                stage.weight.grad = None
            before = Poisoning.freed
            evaluated = executor.evaluate(batch, activation_shape=_shape).losses
            sends = sum(a != b for a, b in pairwise(schedule.rank_of_stage) if a == rank)
            assert Poisoning.freed == before + sends * len(batch)
            for found in (ran, evaluated):
                torch.testing.assert_close(found, expected)
    finally:
        module.Exchange = original
    executor.close()


@pytest.mark.parametrize(
    "schedule",
    [interleaved_one_f_one_b(2, 5, 2), zero_bubble(2, 5, "v")],
    ids=["interleaved", "zero_bubble v"],
)
def test_a_sent_tensor_is_free_when_the_library_says_so(processes, schedule):
    processes.run(_poison_what_is_free, 200, schedule, world=2)


def _poison_under_every_schedule(rank, world, num_calls):
    for schedule in _all_schedules(world, 5):
        _poison_what_is_free(rank, world, num_calls, schedule)


@pytest.mark.parametrize(("world", "num_calls"), [(2, 10), (4, 3)])
def test_sent_tensors_under_every_schedule(processes, world, num_calls):
    processes.run(_poison_under_every_schedule, num_calls, world=world)


def _two_pipelines(rank, world):
    # Ranks have made different numbers of groups before, and rank 3 takes no part in the second
    # use of the name space: a communicator must not depend on how many there are.
    if rank in (0, 1):
        dist.new_group([0, 1], use_local_synchronization=True)
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    group = replicas[rank % 2]
    stage_rank = dist.get_rank(group)
    schedule = interleaved_one_f_one_b(2, 3, 2)
    for attempt in range(2):  # a second executor in the same processes
        stages, executor = _executor(schedule, stage_rank, group=group)
        batch = _batch(10 * (rank % 2) + attempt, [2, 3, 1])
        result = executor.run(batch, activation_shape=_shape)
        losses, gradients = _oracle(schedule.num_stages, [batch])
        _check_gradients(stages, gradients)
        if stage_rank == 1:
            torch.testing.assert_close(torch.stack(result.losses), torch.stack(losses))
        executor.close()
    # Only some ranks of the job have a pipeline.
    pair = dist.new_group([1, 2])
    if rank in (1, 2):
        _, executor = _executor(one_f_one_b(2, 1), dist.get_rank(pair), group=pair)
        executor.run(_batch(0, [2]), activation_shape=_shape)


def test_pipelines_side_by_side(processes):
    processes.run(_two_pipelines, world=4)


def _close_at_once(rank, world):
    for attempt in range(10):
        schedule = one_f_one_b(world, 3)
        stages, executor = _executor(schedule, rank)
        batch = _batch(attempt, [500, 2, 3000])
        if rank == 0:
            original = stages[0].forward
            stages[0].forward = lambda h, x, call=original: (time.sleep(0.01), call(h, x))[1]
        executor.run(batch, activation_shape=_shape)
        executor.evaluate(batch, activation_shape=_shape)
        executor.close()  # while the other rank may still receive
        _check_gradients(stages, _oracle(schedule.num_stages, [batch])[1])


def test_a_rank_may_close_before_the_others(processes):
    processes.run(_close_at_once, world=2)


def _raised(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _one_stage_fails(rank, world):
    schedule = one_f_one_b(world, 4)
    stages, executor = _executor(schedule, rank)
    if rank == 1:
        original = stages[1].forward

        def fail_once(hidden, microbatch):
            if len(microbatch[0]) == 3:
                raise KeyError("broken")
            return original(hidden, microbatch)

        stages[1].forward = fail_once
    started = time.monotonic()
    message = _raised(executor.run, _batch(0, [1, 2, 3, 4]), activation_shape=_shape)
    assert time.monotonic() - started < 20
    return message


def test_a_failing_rank_ends_its_peers(processes):
    messages = processes.run(_one_stage_fails, world=3)
    expected = (
        "RuntimeError: pipeline rank 1 failed at F1.2, the forward of stage 1 on microbatch 2"
    )
    assert messages[1].startswith(expected)
    assert messages[0].startswith("RuntimeError: pipeline rank 0 failed at ")
    assert messages[2].startswith("RuntimeError: pipeline rank 2 failed at ")


def _disagree(rank, world):
    group = dist.group.WORLD
    stages = {rank: Stage(rank, 2)}
    return [
        _raised(PipelineExecutor, one_f_one_b(2, 2 + rank), stages, device="cpu", dtype=F64),
        _raised(
            PipelineExecutor, one_f_one_b(2, 2), stages, device="cpu",
            dtype=(F64, torch.float32)[rank], group=group,
        ),
        _raised(PipelineExecutor, one_f_one_b(3, 2), stages, device="cpu", dtype=F64),
        _raised(PipelineExecutor, one_f_one_b(2, 2), {0: stages[rank]}, device="cpu", dtype=F64),
    ]  # fmt: skip


def test_disagreement_is_named_on_every_rank(processes):
    for rank, messages in enumerate(processes.run(_disagree, world=2)):
        for message in messages[:2]:
            assert "must bring the same arguments; rank 1 has" in message
        assert "`group` must have 3 ranks, as many as the schedule has, got 2." in messages[2]
        assert "rank(s) [1] refused theirs" in messages[3] or rank == 1
        assert "`stages` of rank 1 must be [1], got [0]." in messages[3] or rank == 0
