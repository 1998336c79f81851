"""Every result is a tree of tensors to torch: FSDP2, vmap and export look inside."""

import dataclasses
import io

import olmo_routing
import pytest
import torch
import torch.distributed as dist
from olmo_routing import (
    BalanceReport,
    LoadReport,
    Router,
    Routing,
    RowPlan,
    SelectionBias,
    TilePlan,
    admit,
    balance_loss,
    keep_routes,
    margin_balance_loss,
    measure_balance,
    measure_load,
    plan_rows,
    plan_tiles,
    route_fractions,
    router_z_loss,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

T, D, E, K = 12, 4, 8, 2


def results():
    torch.manual_seed(0)
    routing = Router(D, E, K)(torch.randn(T, D))
    plan = plan_rows(routing.expert_ids_TK, E, align=4)
    return {
        Routing: routing,
        RowPlan: plan,
        TilePlan: plan_tiles(plan.offsets_E, len(plan.routes_R), 4),
        BalanceReport: measure_balance(routing.scores_TE, routing.expert_ids_TK),
        LoadReport: measure_load(routing.counts_E, routing.scores_TE.sum(0)),
    }


def test_no_result_is_forgotten():
    public = (getattr(olmo_routing, name) for name in olmo_routing.__all__)
    assert {each for each in public if dataclasses.is_dataclass(each)} == set(results())


@pytest.mark.parametrize("kind", [Routing, RowPlan, TilePlan, BalanceReport, LoadReport])
def test_a_result_is_its_fields_and_is_put_together_again(kind):
    result = results()[kind]
    leaves, spec = tree_flatten(result)
    names = [field.name for field in dataclasses.fields(kind)]
    assert all(leaf is getattr(result, name) for leaf, name in zip(leaves, names, strict=True))
    again = tree_unflatten(leaves, spec)
    assert type(again) is kind
    doubled = tree_map(lambda tensor: tensor.double() * 2, result)
    for name, leaf in zip(names, leaves, strict=True):
        assert getattr(again, name) is leaf
        torch.testing.assert_close(getattr(doubled, name), leaf.double() * 2, equal_nan=True)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router(D, E, K, selection_bias=SelectionBias(E, 0.1))

    def forward(self, x):
        routing = self.router(x)
        plan = plan_rows(routing.expert_ids_TK, E, align=4)
        tiles = plan_tiles(plan.offsets_E, plan.routes_R.shape[0], 4)
        pair = routing.scores_TE, routing.expert_ids_TK
        losses = [balance_loss(*pair), margin_balance_loss(*pair), router_z_loss(routing.logits_TE)]
        kept_ids = keep_routes(
            routing.expert_ids_TK, admit(routing.counts_E.view(1, E, 1), 3).view(-1)
        )
        fractions = route_fractions(routing.expert_ids_TK, E)
        report = measure_balance(*pair, kept_ids_TK=kept_ids, weights_TK=routing.weights_TK)
        return routing, plan, tiles, report, *losses, kept_ids, fractions


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_export_takes_and_saves_results(dynamic, strict):
    torch.manual_seed(0)
    module, x = Whole(), torch.randn(T, D)
    shapes = ({0: torch.export.Dim("tokens", min=2, max=4096)},) if dynamic else None
    program = torch.export.export(module, (x,), dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for tokens in (x, torch.randn(31, D)) if dynamic else (x,):
        got, expected = loaded(tokens), module(tokens)
        assert [type(each) for each in got] == [type(each) for each in expected]
        for have, want in zip(tree_flatten(got)[0], tree_flatten(expected)[0], strict=True):
            torch.testing.assert_close(have, want)


def _steps_of_each_rank(rank, world, sharded):
    """Train a router that FSDP2 shards, alone or under its block, and return its weight."""
    torch.manual_seed(0)
    router = Router(D, E, K, selection_bias=SelectionBias(E, 0.1))
    block = nn.Sequential(router)
    before = router.weight_ED.detach().clone()
    mesh = init_device_mesh("cpu", (world,))
    if sharded != "plain":
        fully_shard(router, mesh=mesh)
    if sharded == "block too":
        fully_shard(block, mesh=mesh)
    optimizer = torch.optim.SGD(block.parameters(), lr=1.0)
    for step in range(2):
        parts = torch.randn(world, T, D, generator=torch.Generator().manual_seed(step))
        routing = block(parts[rank])
        optimizer.zero_grad()
        balance_loss(routing.scores_TE, routing.expert_ids_TK).backward()
        if sharded == "plain":
            dist.all_reduce(router.weight_ED.grad)
            router.weight_ED.grad /= world
        optimizer.step()
        router.selection_bias.update(routing.counts_E, group=dist.group.WORLD)
    weight = router.weight_ED
    if sharded != "plain":
        assert isinstance(router, FSDPModule)
        weight = weight.full_tensor()
    return weight.tolist(), (weight - before).abs().max().item()


@pytest.mark.dist
def test_fsdp2_trains_a_router(processes):
    expected, moved = processes.run(_steps_of_each_rank, "plain", world=2)[0]
    assert moved > 1e-3
    for sharded in ("alone", "block too"):
        for weight, _ in processes.run(_steps_of_each_rank, sharded, world=2):
            torch.testing.assert_close(torch.tensor(weight), torch.tensor(expected))
