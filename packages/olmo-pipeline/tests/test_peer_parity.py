"""The same stages under torch.distributed.pipelining: the same losses and gradients."""

import pytest
import torch
from olmo_pipeline import (
    PipelineExecutor,
    interleaved_one_f_one_b,
    one_f_one_b,
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


def _theirs(rank, schedule, chunks):
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

    world, count = schedule.num_ranks, schedule.num_microbatches
    indices = range(rank, world * chunks, world)
    layers = {s: Layer(s) for s in indices}
    stages = [PipelineStage(layers[s], s, world * chunks, torch.device("cpu")) for s in indices]
    options = {"n_microbatches": count, "loss_fn": _loss, "scale_grads": False}
    peer = (
        Schedule1F1B(stages[0], **options)
        if chunks == 1
        else ScheduleInterleaved1F1B(stages, **options)
    )
    inputs, targets = _inputs(count)
    losses = []
    arguments = (inputs,) if rank == 0 else ()
    if rank == world - 1:
        peer.step(*arguments, target=targets, losses=losses)
    else:
        peer.step(*arguments)
    return losses, layers


def _compare(rank, world, chunks, count):
    schedule = (
        one_f_one_b(world, count) if chunks == 1 else interleaved_one_f_one_b(world, count, chunks)
    )
    losses, layers = _ours(rank, schedule)
    their_losses, their_layers = _theirs(rank, schedule, chunks)
    if rank == world - 1:
        assert len(losses) == count
        torch.testing.assert_close(torch.stack(losses), torch.stack(their_losses).detach())
    assert layers.keys() == their_layers.keys()
    for stage, layer in layers.items():
        for (name, ours), theirs in zip(
            layer.named_parameters(), their_layers[stage].parameters(), strict=True
        ):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=f"stage {stage} {name}")
    return {s: layer.linear.weight.grad for s, layer in their_layers.items()}


@pytest.mark.parametrize(("chunks", "count"), [(1, 4), (1, 7), (2, 4), (3, 6)])
def test_losses_and_gradients_are_the_peers(processes, chunks, count):
    processes.run(_compare, chunks, count, world=2)


def _other_placements(rank, world):
    """The peer's gradients are also those of orders and placements that it does not share."""
    found = [_ours(rank, schedule) for schedule in (v_shape(world, 4), zero_bubble(world, 4, "v"))]
    return _compare(rank, world, 2, 4), [
        {s: layer.linear.weight.grad for s, layer in layers.items()} for _, layers in found
    ]


def test_a_v_and_a_split_backward_give_the_peers_gradients(processes):
    ranks = processes.run(_other_placements, world=2)
    expected = {s: grad for theirs, _ in ranks for s, grad in theirs.items()}
    assert sorted(expected) == [0, 1, 2, 3]
    for _, ours in ranks:
        for gradients in ours:
            for stage, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[stage])
