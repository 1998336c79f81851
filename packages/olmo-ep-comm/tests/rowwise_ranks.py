"""What ranks of a one-sided exchange do, the same between CPU processes and between GPUs.

Each function is run by `processes`, with "cpu" or "cuda" for where its buffers are.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from gpu_ranks import gpu_of
from olmo_ep_comm import RowwiseDispatcher
from rowwise_problem import Inputs, Problem, expert_results, loss_of
from torch import Tensor


@contextmanager
def group_on(device: str, rank: int) -> Iterator[dist.ProcessGroup]:
    """Make a group of all ranks; within, it is there."""
    options = {}
    if device == "cuda":
        torch.cuda.set_device(gpu_of(rank))
        options = {"backend": "nccl", "device_id": gpu_of(rank)}
    group = dist.new_group(**options)
    assert isinstance(group, dist.ProcessGroup)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def make_dispatcher(case: Problem, group: dist.ProcessGroup, **options) -> RowwiseDispatcher:
    sizes = {"max_tokens": max(case.tokens), "width": case.width, "top_k": case.top_k}
    return RowwiseDispatcher(
        num_experts=case.num_experts, group=group, dtype=case.dtype, **sizes, **options
    )


def keep_in_order(requested_SQL: Tensor, capacity: int) -> Tensor:
    """A policy: rows in their order until the room is used up."""
    running = requested_SQL.permute(1, 2, 0).flatten(1).cumsum(1).clamp(max=capacity)
    kept = running.diff(dim=1, prepend=torch.zeros_like(running[:, :1]))
    return kept.view(requested_SQL.permute(1, 2, 0).shape).permute(2, 0, 1)


def without_drops(case: Problem, capacity: int) -> list[Tensor]:
    """Return the ids of each rank with -1 for what finds no room, by walking the rows."""
    ids = [case.inputs(rank)[1] for rank in range(len(case.tokens))]
    share = case.num_experts // len(case.tokens)
    for first in range(0, case.num_experts, share):
        left = capacity
        for expert in range(first, first + share):
            for ids_TK in ids:
                for token, slot in (ids_TK == expert).nonzero().tolist():
                    if left:
                        left -= 1
                    else:
                        ids_TK[token, slot] = -1
    return ids


def run_layer(dispatcher: RowwiseDispatcher, inputs: Inputs) -> list[Tensor]:
    """Return result, gradients of tokens and weights, and the number of drops."""
    loss, values = start_layer(dispatcher, inputs)
    loss.backward()
    return finish(values)


def start_layer(dispatcher: RowwiseDispatcher, inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
    x_TD, ids, weights_TK = inputs
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    sent = dispatcher.dispatch(x_TD, ids, weights_TK)
    y_RD = expert_results(sent, dispatcher.local_experts) + sent.rows_RD.square()  # keeps its rows
    y_TD = dispatcher.combine(y_RD, sent.handle)
    return loss_of([y_TD]), [y_TD, x_TD, weights_TK, sent.num_dropped]


def finish(values: list[Tensor]) -> list[Tensor]:
    y_TD, x_TD, weights_TK, num_dropped = values
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    return [y_TD.detach(), x_TD.grad, weights_TK.grad, num_dropped]


def drop_what_has_no_room(rank: int, world: int, device: str, combine_by: str) -> list[int]:
    """A layer with drops is one whose dropped routes were never asked for; the drops, by seed."""
    drops = []
    with group_on(device, rank) as group:
        for seed in range(3):
            case = Problem(tokens=(9, 7), num_experts=4, top_k=3, seed=seed, width=64)
            limited, roomy = (
                make_dispatcher(
                    case, group, capacity=capacity, admit=keep_in_order, combine_by=combine_by
                )
                for capacity in (12, 99)
            )
            x_TD, ids, weights_TK = case.inputs(rank, device)
            fewer = without_drops(case, 12)[rank].to(device)
            *got, num_dropped = run_layer(limited, (x_TD, ids, weights_TK))
            for dispatcher in (limited, roomy):
                *want, none = run_layer(dispatcher, (x_TD, fewer, weights_TK))
                assert none == 0
                assert all(map(torch.equal, got[:2], want[:2])), seed
                # Over the width of a row a GPU sums by the number of rows.
                torch.testing.assert_close(got[2], want[2], rtol=1e-4, atol=1e-4)
            assert num_dropped == (ids >= 0).sum() - (fewer >= 0).sum()
            assert (got[2][fewer < 0] == 0).all()
            drops.append(int(num_dropped))
    return drops


def keep_two_forwards_alive(rank: int, world: int, device: str, combine_by: str) -> None:
    """Two at once, backward in both orders, are as each alone."""
    with group_on(device, rank) as group:
        cases = [
            Problem(tokens=(9, 7), num_experts=4, top_k=2, seed=seed, width=64, is_distinct=True)
            for seed in range(2)
        ]
        dispatcher = make_dispatcher(cases[0], group, live_forwards=2, combine_by=combine_by)
        inputs = [case.inputs(rank, device) for case in cases]
        alone = [run_layer(dispatcher, one) for one in inputs]
        assert not torch.equal(alone[0][0], alone[1][0])
        for order in ((0, 1), (1, 0)):
            losses, values = zip(*(start_layer(dispatcher, one) for one in inputs), strict=True)
            for number in order:
                losses[number].backward()
            for got, want in zip(map(finish, values), alone, strict=True):
                assert all(map(torch.equal, got, want)), order


def use_two_dispatchers_in_turn(rank: int, world: int, device: str) -> None:
    """Two dispatchers of one group, forward and backward of one between those of the other."""
    with group_on(device, rank) as group:
        cases = [
            Problem(tokens=(9, 7), num_experts=4, top_k=2, width=64, seed=5, is_distinct=True),
            Problem(tokens=(3, 8), num_experts=6, top_k=3, width=128, seed=6, is_distinct=True),
        ]
        dispatchers = [make_dispatcher(case, group) for case in cases]
        inputs = [case.inputs(rank, device) for case in cases]
        alone = [run_layer(*pair) for pair in zip(dispatchers, inputs, strict=True)]
        for order in ((0, 1), (1, 0)) * 3:
            started = {number: start_layer(dispatchers[number], inputs[number]) for number in order}
            for number in order:
                started[number][0].backward()
            for number, (_, values) in started.items():
                assert all(map(torch.equal, finish(values), alone[number])), (number, order)
