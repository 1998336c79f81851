"""A tiny model with experts, trained for three steps: every layout equals one process.

In both ways of taking the mean over tokens: losses scaled beforehand and reduced at the end, and
losses that are sums, reduced within the last backward by scattering and divided by the count.

Tokens carry the id of their expert. A process gathers the rows of its expert-parallel group and
computes those of its own experts, so an expert sees the tokens of several data ranks.
"""

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from olmo_distopt import GradientReducer, Location, ReplicaGroups, ShardedAdamW, clip_grad_norm
from olmo_distopt.reference import adamw, global_norm
from torch import nn

E, D, SLOTS, MICROBATCHES, STEPS = 4, 5, 4, 3, 3
LR, MAX_NORM = 0.01, 0.05
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1


def _weights():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "experts.weight": draw(E, D, D),
        "router.weight": draw(E, D),
        "dense.weight": draw(D, D),
        "dense.bias": draw(D),
    }


def _microbatch(step, slot, index):
    """Unequal numbers of tokens, none on slot 1 of step 1; expert 3 waits for the last step."""
    generator = torch.Generator().manual_seed(100 * step + 10 * slot + index)
    num_tokens = 0 if (step, slot) == (1, 1) else (7 * slot + 3 * index + step) % 6
    x_TD = torch.randn(num_tokens, D, generator=generator)
    ids_T = torch.randint(E if step == 2 else E - 1, (num_tokens,), generator=generator)
    return x_TD, ids_T


def _num_tokens(step):
    return sum(
        len(_microbatch(step, slot, index)[1]) for slot in range(SLOTS) for index in range(3)
    )


def _before_experts(weights, x_TD, ids_T):
    hidden_TD = torch.tanh(x_TD @ weights["dense.weight"].T + weights["dense.bias"])
    gates_T = torch.sigmoid(x_TD @ weights["router.weight"].T).gather(1, ids_T[:, None])
    return torch.cat([hidden_TD, gates_T], 1)


def _expert_loss(experts, rows_RD, ids_R, first_expert):
    """Sum over the rows whose expert is held here."""
    loss = rows_RD.sum() * 0 + experts.sum() * 0
    for expert, weight in enumerate(experts, start=first_expert):
        rows = rows_RD[ids_R == expert]
        loss = loss + (rows[:, -1:] * torch.tanh(rows[:, :-1] @ weight.T)).square().sum()
    return loss


class _GatherRows(torch.autograd.Function):
    """Rows of all processes of a group; the backward sums what each of them did with mine."""

    @staticmethod
    def forward(ctx, rows, counts, group):
        ctx.counts, ctx.group = counts, group
        padded = rows.new_zeros(max(counts), rows.shape[1])
        padded[: len(rows)] = rows
        gathered = [torch.zeros_like(padded) for _ in counts]
        dist.all_gather(gathered, padded, group=group)
        return torch.cat([rows[:n] for rows, n in zip(gathered, counts, strict=True)])

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.split(ctx.counts)[dist.get_rank(ctx.group)], None, None


def _one_process():
    """Return (gradients, norm) of every step and the final weights, in float64."""
    weights = {name: weight.double() for name, weight in _weights().items()}
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
    steps = []
    for step in range(STEPS):
        for weight in weights.values():
            weight.requires_grad_(True)
        for slot in range(SLOTS):
            for index in range(MICROBATCHES):
                x_TD, ids_T = _microbatch(step, slot, index)
                rows = _before_experts(weights, x_TD.double(), ids_T)
                loss = _expert_loss(weights["experts.weight"], rows, ids_T, 0)
                (loss / _num_tokens(step)).backward()
        grads: dict[str, Any] = {name: weight.grad for name, weight in weights.items()}
        norm = global_norm(grads.values())
        steps.append((grads, norm.item()))
        for name, weight in list(weights.items()):
            new, *rest = adamw(
                weight.detach(),
                grads[name] * min(1.0, MAX_NORM / norm.item()),
                *moments[name],
                step=step + 1,
                lr=LR,
                betas=BETAS,
                eps=EPS,
                weight_decay=0.0 if name == "dense.bias" else DECAY,
            )
            weights[name], moments[name] = new, (rest[0], rest[1])
    return steps, weights


def _train(rank, world, layouts, counted):
    results = []
    for expert_parallel in layouts:
        exchange: Any = None
        replicas: Any = None
        for first in range(0, world, expert_parallel):
            ranks = range(first, first + expert_parallel)
            group = dist.new_group(list(ranks))
            exchange = group if rank in ranks else exchange
        for first in range(expert_parallel):
            ranks = range(first, world, expert_parallel)
            group = dist.new_group(list(ranks))
            replicas = group if rank in ranks else replicas
        results.append(_train_layout(rank, world, expert_parallel, exchange, replicas, counted))
    return results


def _train_layout(rank, world, expert_parallel, exchange, replicas, counted):
    held = E // expert_parallel
    first_expert = rank % expert_parallel * held
    weights: dict[str, Any] = {name: nn.Parameter(w) for name, w in _weights().items()}
    local = weights["experts.weight"].detach()[first_expert : first_expert + held].clone()
    weights["experts.weight"] = nn.Parameter(local)
    groups = ReplicaGroups(
        {"dense": dist.group.WORLD, "expert": replicas},
        lambda name, _: "expert" if "experts" in name else "dense",
    )
    reducer = GradientReducer(
        weights.items(),
        groups,
        bucket_bytes=128,
        collective="reduce_scatter" if counted else "all_reduce",
        overlap=counted,
        min_shard_numel=8,
    )
    optimizer = ShardedAdamW(
        weights.items(),
        groups,
        lr=LR,
        min_shard_numel=8,
        bucket_bytes=64,
        locations={"experts.weight": Location((E, D, D), first_expert)},
    )
    steps = []
    for step in range(STEPS):
        reducer.zero()
        num_tokens = 0
        for slot in range(rank, SLOTS, world):
            for index in range(MICROBATCHES):
                last = slot + world >= SLOTS and index == MICROBATCHES - 1
                x_TD, ids_T = _microbatch(step, slot, index)
                ids_by_rank: list[Any] = [None] * dist.get_world_size(exchange)
                dist.all_gather_object(ids_by_rank, ids_T.tolist(), group=exchange)
                rows = _before_experts(weights, x_TD, ids_T)
                all_rows = _GatherRows.apply(rows, [len(ids) for ids in ids_by_rank], exchange)
                ids_R = torch.tensor([i for ids in ids_by_rank for i in ids], dtype=torch.int64)
                loss = _expert_loss(weights["experts.weight"], all_rows, ids_R, first_expert)
                loss = loss if counted else loss / _num_tokens(step)
                num_tokens += len(ids_T)
                with contextlib.nullcontext() if last else reducer.no_sync():
                    loss.backward()
        reducer.reduce(num_tokens=num_tokens if counted else None)
        grads = {name: _whole(weight, groups.of(name, weight)) for name, weight in weights.items()}
        norm = clip_grad_norm(weights.items(), groups, MAX_NORM)
        optimizer.step()
        steps.append((grads, norm.item()))
    reducer.close()
    return first_expert, steps, {name: weight.detach() for name, weight in weights.items()}


def _whole(weight, group):
    """The whole reduced gradient, the ranges of the other replicas fetched from them."""
    held = vars(weight).get("main_grad_range")
    if held is None:
        return weight.main_grad.clone()
    ranges = group.gather_objects(weight.main_grad.view(-1).narrow(0, *held).tolist())
    return torch.tensor(ranges).view_as(weight)


@pytest.mark.dist
@pytest.mark.parametrize("counted", [False, True])
def test_every_layout_equals_one_process(processes, counted):
    expected_steps, expected_weights = _one_process()
    assert all(norm > MAX_NORM for _, norm in expected_steps), "clipping must take part"
    assert not expected_steps[1][0]["experts.weight"][3].any(), "expert 3 waits"
    assert expected_steps[2][0]["experts.weight"][3].any()
    for world, layouts in [(1, [1]), (2, [1, 2]), (4, [1, 2, 4])]:
        ranks = processes.run(_train, layouts, counted, world=world)
        for index, expert_parallel in enumerate(layouts):
            _check(
                [results[index] for results in ranks],
                f"dp {world}, ep {expert_parallel}",
                expected_steps,
                expected_weights,
            )


def _check(results, layout, expected_steps, expected_weights):
    replicas = {}
    for first_expert, steps, weights in results:
        held = slice(first_expert, first_expert + len(weights["experts.weight"]))
        for (grads, norm), (expected_grads, expected_norm) in zip(
            steps, expected_steps, strict=True
        ):
            assert norm == pytest.approx(expected_norm, rel=1e-5), layout
            for name, grad in grads.items():
                expected = expected_grads[name][held] if "experts" in name else expected_grads[name]
                _assert_ratio_is_one(grad.double(), expected, f"{layout}: {name}")
        for name, weight in weights.items():
            expected = expected_weights[name]
            if "experts" in name:
                expected = expected[held]
            torch.testing.assert_close(weight.double(), expected, rtol=0, atol=LR * 1e-2)
            twin = replicas.setdefault((name, first_expert if "experts" in name else 0), weight)
            assert torch.equal(twin, weight), f"{layout}: replicas of {name} differ"


def _assert_ratio_is_one(grad, expected, name):
    size = expected.square().sum().item()
    if size == 0:
        assert not grad.any(), name
        return
    assert (grad * expected).sum().item() / size == pytest.approx(1.0, abs=1e-5), name
    assert math.sqrt((grad - expected).square().sum().item() / size) < 1e-5, name
