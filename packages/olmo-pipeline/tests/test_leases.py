"""Slots for the buffers of live activations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import (
    PipelineExecutor,
    dual_pipe_v,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    search,
    v_shape,
    zero_bubble,
)

F64 = torch.float64


class Recorder:
    """Keeps who holds which slot, and refuses a slot that is taken or out of range."""

    def __init__(self, schedule):
        self.limits = schedule.max_live_per_stage
        self.held, self.most = {}, [0] * schedule.num_stages
        self.calls = []

    def acquire(self, stage, microbatch, slot):
        assert 0 <= slot < self.limits[stage]
        assert (stage, slot) not in self.held
        self.held[stage, slot] = microbatch
        self.most[stage] = max(self.most[stage], sum(s == stage for s, _ in self.held))
        self.calls.append(("acquire", stage, microbatch, slot))

    def release(self, stage, microbatch, slot):
        assert self.held.pop((stage, slot)) == microbatch
        self.calls.append(("release", stage, microbatch, slot))


class _Buffered(torch.autograd.Function):
    """y = w x, with x kept for the backward in a buffer of a pool, as a dispatch does."""

    @staticmethod
    def forward(ctx, x, weight, buffer):
        buffer.copy_(x)
        ctx.buffer, ctx.weight = buffer, weight
        return weight * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.weight, (gradient * ctx.buffer).sum(), None


class Pool(Recorder):
    """Gives each stage as many buffers as the schedule says, and poisons what is given back."""

    def __init__(self, schedule):
        super().__init__(schedule)
        self.buffers = [[torch.zeros(3, dtype=F64) for _ in range(n)] for n in self.limits]
        self.current = None

    def acquire(self, stage, microbatch, slot):
        super().acquire(stage, microbatch, slot)
        self.current = self.buffers[stage][slot]

    def release(self, stage, microbatch, slot):
        super().release(stage, microbatch, slot)
        self.buffers[stage][slot].fill_(float("nan"))


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_stage_never_has_more_than_its_slots(any_split_schedule, data):
    schedule = data.draw(any_split_schedule)
    live, most = dict.fromkeys(range(schedule.num_stages), 0), [0] * schedule.num_stages
    for row in schedule.actions:
        for action in row:
            if action.kind == "forward":
                live[action.stage] += 1
            if action.kind in ("backward", "weight_gradient"):
                live[action.stage] -= 1
            most[action.stage] = max(most[action.stage], live[action.stage])
    assert schedule.max_live_per_stage == tuple(most)


def test_known_numbers_of_slots():
    assert one_f_one_b(4, 8).max_live_per_stage == (4, 3, 2, 1)
    assert zero_bubble(4, 8).max_live_per_stage == (4, 4, 4, 4)


def _check_pool(rank, schedule):
    pool = Pool(schedule)
    last = schedule.num_stages - 1
    weights = [torch.tensor(1.5 + s, dtype=F64, requires_grad=True) for s in range(last + 1)]
    mixed = [torch.nn.Parameter(torch.eye(3, dtype=F64)) for _ in weights]

    def make(stage):
        def call(hidden, x):
            y = _Buffered.apply(x if hidden is None else hidden, weights[stage], pool.current)
            y = y @ mixed[stage]
            return (y.sum() if stage == last else y), None

        return call

    held = schedule.stages_of(rank)
    executor = PipelineExecutor(
        schedule, {s: make(s) for s in held}, device="cpu", dtype=F64, leases=pool
    )
    batch = [torch.full((3,), i + 1.0, dtype=F64) for i in range(schedule.num_microbatches)]
    executor.evaluate(batch, activation_shape=(3,))
    executor.run(batch, activation_shape=(3,))
    executor.close()
    assert not pool.held
    assert [pool.most[s] for s in held] == [schedule.max_live_per_stage[s] for s in held]
    assert sum(pool.most) == sum(pool.most[s] for s in held), "a slot of another rank's stage"
    whole = 3 * sum(i + 1.0 for i in range(len(batch)))
    product = torch.stack([w.detach() for w in weights]).prod()
    for stage in held:
        weight = weights[stage]
        torch.testing.assert_close(weight.grad, whole * product / weight.detach())


@pytest.mark.parametrize(
    "schedule", [interleaved_one_f_one_b(1, 6, 3), zero_bubble(1, 5, "v")], ids=["whole", "split"]
)
def test_a_pool_of_that_size_is_enough_and_never_overwritten(schedule):
    _check_pool(0, schedule)


def _pools_of_ranks(rank, world):
    schedules = [gpipe(world, 5), one_f_one_b(world, 5), interleaved_one_f_one_b(world, 5, 2)]
    schedules += [v_shape(world, 5), dual_pipe_v(world, 5)]
    schedules += [zero_bubble(world, 5, kind) for kind in ("h1", "v")]
    for split in (False, True):
        schedules.append(search(world, 5, memory_cap=world + 1, split_backward=split, tries=2))
    for schedule in schedules:
        _check_pool(rank, schedule)


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 4])
def test_pools_of_several_ranks(processes, world):
    processes.run(_pools_of_ranks, world=world)


def test_slots_are_held_from_forward_to_weight_gradient(parse_rows):
    schedule = parse_rows((0,), 2, "F0.0 I0.0 F0.1 W0.0 I0.1 W0.1")
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=F64))
    recorder = Recorder(schedule)
    executor = PipelineExecutor(
        schedule,
        {0: lambda h, x: ((x @ weight).sum(), None)},
        device="cpu", dtype=F64, leases=recorder,
    )  # fmt: skip
    executor.run([torch.ones(1, 2, dtype=F64)] * 2, activation_shape=())
    assert recorder.calls == [
        ("acquire", 0, 0, 0),
        ("acquire", 0, 1, 1),
        ("release", 0, 0, 0),
        ("release", 0, 1, 1),
    ]


def test_a_failed_pass_gives_everything_back():
    recorder = Recorder(interleaved_one_f_one_b(1, 3, 2))
    executor = PipelineExecutor(
        interleaved_one_f_one_b(1, 3, 2),
        {0: lambda h, x: (x * 1.0, None), 1: lambda h, x: 1 / 0},
        device="cpu", dtype=F64, leases=recorder,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"at F1\.0"):
        executor.run([torch.ones(2, dtype=F64, requires_grad=True)] * 3, activation_shape=(2,))
    assert recorder.calls
    assert not recorder.held
