"""Experts that get no tokens for some steps: a gradient of zeros, under every layout.

Expert 3 waits until the last step. Its moments stay zero and its weight decays meanwhile; there is
no missing state to save or to load.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from olmo_distopt import GradientReducer, ReplicaGroups, ShardedAdamW, ShardedMuon
from torch import nn
from torch.utils.checkpoint import checkpoint

E, D, STEPS, SAVED = 4, 3, 4, 2
MAKERS = {"adamw": ShardedAdamW, "muon": ShardedMuon}


def _named(rank, expert_parallel) -> list[tuple[str, Any]]:
    held = E // expert_parallel
    first = rank % expert_parallel * held
    return [
        (f"experts.{e}.w", nn.Parameter(torch.full((D, D), 1.0 + e).tril()))
        for e in range(first, first + held)
    ]


def _gradient(expert, step, rank):
    """Zeros would not do: expert 3 gets no gradient at all before the last step."""
    if expert == 3 and step < STEPS - 1:
        return None
    draw = torch.Generator().manual_seed(100 * expert + 10 * step + rank)
    return torch.randint(-8, 8, (D, D), generator=draw) / 8.0


def _run(rank, world, kind, expert_parallel, recompute, folder):
    """Weights after every step; halfway through the state goes to a checkpoint and back."""
    replicas: Any = None
    for first in range(expert_parallel):
        group = dist.new_group(list(range(first, world, expert_parallel)))
        replicas = group if rank % expert_parallel == first else replicas
    groups = ReplicaGroups({"experts": replicas}, lambda *_: "experts")
    # With expert parallelism an expert sees the tokens of all ranks it exchanges them with.
    sources = range(rank // expert_parallel * expert_parallel, world)[:expert_parallel]

    def start():
        named = _named(rank, expert_parallel)
        reducer = GradientReducer(named, groups, overlap=True)
        return named, reducer, MAKERS[kind](named, groups, lr=0.25, min_shard_numel=1)

    def backward(named, step, source):
        terms = []
        for name, weight in named:
            grad = _gradient(int(name.split(".")[1]), step, source)
            if grad is None:
                continue

            def product(w, grad=grad):
                return torch.sin(w * 0).sum() + (w * grad).sum()

            terms.append(
                checkpoint(product, weight, use_reentrant=False) if recompute else product(weight)
            )
        if terms:
            torch.stack(terms).sum().backward()

    named, reducer, optimizer = start()
    weights = []
    for step in range(STEPS):
        if folder and step == SAVED:
            dcp.save(optimizer.state_dict(), checkpoint_id=folder)
            named, reducer, optimizer = start()
            dcp.load(optimizer.start_loading(), checkpoint_id=folder)
            optimizer.finish_loading()
        with reducer.no_sync():
            for source in sources:
                backward(named, step, source)
        reducer.reduce()
        optimizer.step()
        reducer.zero()
        weights.append({name: p.detach().clone() for name, p in named})
    state = {k: getattr(v, "local", v).clone() for k, v in optimizer.state_dict().items()}
    assert not any(value.isnan().any() for value in state.values())
    return weights


@pytest.mark.dist
@pytest.mark.parametrize("kind", MAKERS)
def test_an_idle_expert_decays_alike_in_every_layout(processes, tmp_path, kind):
    wanted = processes.run(_run, kind, 1, False, None, world=2)[0]
    for step, weights in enumerate(wanted[:-1]):
        faded = torch.full((D, D), 4.0).tril() * (1 - 0.25 * 0.1) ** (step + 1)
        torch.testing.assert_close(weights["experts.3.w"], faded)
    assert not torch.allclose(
        wanted[-1]["experts.3.w"], wanted[-2]["experts.3.w"] * (1 - 0.25 * 0.1)
    )
    for expert_parallel, recompute, saves in [(2, False, False), (1, True, True), (2, True, True)]:
        folder = tmp_path / f"{expert_parallel}" if saves else None
        arguments = (kind, expert_parallel, recompute, folder)
        seen = set()
        for weights in processes.run(_run, *arguments, world=2):
            for step, by_name in enumerate(weights):
                for name, weight in by_name.items():
                    seen.add(name)
                    assert torch.equal(weight, wanted[step][name]), f"{name}, step {step + 1}"
        assert len(seen) == E
