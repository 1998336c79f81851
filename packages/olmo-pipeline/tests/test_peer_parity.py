"""The same stages under torch.distributed.pipelining: the same losses and gradients."""

import pytest
import torch
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
from torch import nn

F64 = torch.float64
WIDTH, ROWS = 5, 3
pytestmark = pytest.mark.dist


class Layer(nn.Module):
    def __init__(self, stage):
        super().__init__()
        torch.manual_seed(stage)
        self.norm = nn.LayerNorm(WIDTH, dtype=F64)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=F64)

    def forward(self, hidden):
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


def _loss(output, target):
    return ((output - target) ** 2).sum()


def _inputs(num_microbatches):
    generator = torch.Generator().manual_seed(7)
    shape = (2, num_microbatches * ROWS, WIDTH)
    return torch.randn(shape, generator=generator, dtype=F64)


def _ours(rank, schedule):
    layers = {s: Layer(s) for s in schedule.stages_of(rank)}
    last = schedule.num_stages - 1

    def make(stage):
        def call(hidden, microbatch):
            output = layers[stage](microbatch[0] if hidden is None else hidden)
            return (_loss(output, microbatch[1]) if stage == last else output), None

        return call

    executor = PipelineExecutor(schedule, {s: make(s) for s in layers}, device="cpu", dtype=F64)
    batch = zip(*(part.chunk(schedule.num_microbatches) for part in _inputs(
        schedule.num_microbatches)), strict=True)  # fmt: skip
    losses = executor.run(list(batch), activation_shape=(ROWS, WIDTH)).losses
    executor.close()
    return losses, layers


def _peer_of(kind, stages, count):
    from torch.distributed.pipelining import schedules as peers

    options = {"n_microbatches": count, "loss_fn": _loss, "scale_grads": False}
    if kind in ("gpipe", "one_f_one_b", "zero_bubble h1"):  # it has no split backward of one stage
        (stage,) = stages
        name = {"gpipe": "ScheduleGPipe"}.get(kind, "Schedule1F1B")
        return getattr(peers, name)(stage, **options)
    name = {
        "interleaved": "ScheduleInterleaved1F1B",
        "interleaved, 3 chunks": "ScheduleInterleaved1F1B",
        "interleaved zero bubble": "ScheduleInterleavedZeroBubble",
    }[kind]
    return getattr(peers, name)(stages, **options)


def _theirs(rank, schedule, kind):
    from torch.distributed.pipelining import PipelineStage

    num_stages, count = schedule.num_stages, schedule.num_microbatches
    layers = {s: Layer(s) for s in schedule.stages_of(rank)}
    stages = [PipelineStage(layers[s], s, num_stages, torch.device("cpu")) for s in layers]
    peer = _peer_of(kind, stages, count)
    inputs, targets = _inputs(count)
    losses = []
    arguments = (inputs,) if rank == 0 else ()
    if rank == schedule.rank_of_stage[-1]:
        peer.step(*arguments, target=targets, losses=losses)
    else:
        peer.step(*arguments)
    return losses, layers


# Not the peer's ZBV and DualPipeV: between stages of one rank they send, which gloo refuses.
KINDS = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": lambda ranks, count: interleaved_one_f_one_b(ranks, count, 2),
    "interleaved, 3 chunks": lambda ranks, count: interleaved_one_f_one_b(ranks, count, 3),
    # Ours has whole backwards: gradients are the same.
    "interleaved zero bubble": lambda ranks, count: interleaved_one_f_one_b(ranks, count, 2),
    "zero_bubble h1": lambda ranks, count: zero_bubble(ranks, count, "h1"),
}


def _compare(rank, world, kind, count):
    schedule = KINDS[kind](world, count)
    losses, layers = _ours(rank, schedule)
    their_losses, their_layers = _theirs(rank, schedule, kind)
    if rank == schedule.rank_of_stage[-1]:
        assert len(losses) == count
        torch.testing.assert_close(torch.stack(losses), torch.stack(their_losses).detach())
    assert layers.keys() == their_layers.keys()
    for stage, layer in layers.items():
        for (name, ours), theirs in zip(
            layer.named_parameters(), their_layers[stage].parameters(), strict=True
        ):
            assert ours.grad.any(), f"{kind}: stage {stage} {name}"
            torch.testing.assert_close(ours.grad, theirs.grad, msg=f"{kind}: {stage} {name}")
    return {s: layer.linear.weight.grad for s, layer in their_layers.items()}


def _compare_all(rank, world, kinds):
    for kind in kinds:
        _compare(rank, world, kind, 2 * world)


def test_losses_and_gradients_are_the_peers(processes):
    processes.run(_compare_all, list(KINDS), world=2)


def test_an_odd_number_of_microbatches_is_the_peers(processes):
    processes.run(_compare, "one_f_one_b", 7, world=2)


def test_four_ranks_are_the_peers(processes):
    processes.run(_compare_all, ["one_f_one_b", "interleaved"], world=4)


def _other_placements(rank, world):
    """The peer's gradients are also those of orders and placements that it does not share."""
    schedules = [v_shape(world, 4), zero_bubble(world, 4, "v"), dual_pipe_v(world, 4)]
    schedules += [
        search(world, 4, memory_cap=3, split_backward=split, tries=2) for split in (False, True)
    ]
    found = [_ours(rank, schedule) for schedule in schedules]
    return _compare(rank, world, "interleaved", 4), [
        {s: layer.linear.weight.grad for s, layer in layers.items()} for _, layers in found
    ]


def test_a_v_and_a_search_give_the_peers_gradients(processes):
    ranks = processes.run(_other_placements, world=2)
    expected = {s: grad for theirs, _ in ranks for s, grad in theirs.items()}
    assert sorted(expected) == [0, 1, 2, 3]
    for _, ours in ranks:
        for gradients in ours:
            for stage, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[stage])
