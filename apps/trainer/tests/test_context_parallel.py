"""Sequences cut over context ranks give the numbers of one process."""

import pytest
import torch
import torch.distributed as dist
from olmo_trainer.build import assemble
from olmo_trainer.config import AttentionConfig, TrainerConfig
from olmo_trainer.data import Batch
from olmo_trainer.mesh import create_mesh
from olmo_trainer.model.attention import Attention
from olmo_trainer.model.context_exchange import ContextExchange
from olmo_trainer.model.visibility import Visibility
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import nano
from olmo_trainer.step import heldout_loss
from olmo_trainer.verify import Case, Layout, Measured, compare, measure

B, S, D = 2, 12, 16


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _documents() -> torch.Tensor:
    # Borders within a rank's positions, between two ranks', and none at all.
    documents = torch.zeros(B, S, dtype=torch.int32)
    documents[0, 2:] += 1
    documents[0, 6:] += 1
    return documents


def _exchange(rank: int, world: int, num_kv_heads: int) -> None:
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    exchange = ContextExchange(group)
    query, key, value = (
        _normal(B, heads, S, 3, seed=seed)
        for seed, heads in enumerate((4, num_kv_heads, num_kv_heads))
    )
    here = slice(rank * S // world, (rank + 1) * S // world)
    got = exchange.to_heads(query[:, :, here], key[:, :, here], value[:, :, here])
    assert torch.equal(got[0], query.chunk(world, 1)[rank])
    # Query head a reads key/value head a * G / A, here as in the whole.
    first = rank * num_kv_heads // world
    kept = slice(first, first + max(num_kv_heads // world, 1))
    assert torch.equal(got[1], key[:, kept])
    assert torch.equal(got[2], value[:, kept])
    assert torch.equal(exchange.to_positions(got[0]), query[:, :, here])


@pytest.mark.dist
@pytest.mark.parametrize(("world", "num_kv_heads"), [(2, 4), (2, 2), (4, 2), (4, 1)])
def test_a_rank_gets_its_heads_at_all_positions_and_gives_them_back(processes, world, num_kv_heads):
    processes.run(_exchange, num_kv_heads, world=world)


def _attend(rank: int, world: int, num_kv_heads: int) -> None:
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    config = AttentionConfig(num_heads=4, num_kv_heads=num_kv_heads, head_dim=4)
    here = slice(rank * S // world, (rank + 1) * S // world)
    for window, documents in ((0, None), (5, None), (0, _documents()), (5, _documents())):
        torch.manual_seed(0)
        whole = Attention(D, config, 1e-6, window=window).double()
        part = Attention(D, config, 1e-6, window=window, exchange=ContextExchange(group)).double()
        part.load_state_dict(whole.state_dict())
        x, dy = _normal(B, S, D, seed=3).requires_grad_(), _normal(B, S, D, seed=4)
        mine = x.detach()[:, here].clone().requires_grad_()
        visibility = Visibility(S, x.device, documents)
        want, got = whole(x, visibility), part(mine, visibility)
        want.backward(dy)
        got.backward(dy[:, here])
        # Rotations are computed in float32.
        near = {"rtol": 1e-5, "atol": 2e-6}
        torch.testing.assert_close(got, want[:, here], **near)
        torch.testing.assert_close(mine.grad, x.grad[:, here], **near)
        for (name, a), b in zip(part.named_parameters(), whole.parameters(), strict=True):
            dist.all_reduce(a.grad)
            torch.testing.assert_close(a.grad, b.grad, **near, msg=f"gradient of {name}")


@pytest.mark.dist
@pytest.mark.parametrize(("world", "num_kv_heads"), [(2, 2), (4, 2)])
def test_windows_documents_and_positions_go_across_the_cuts(processes, world, num_kv_heads):
    processes.run(_attend, num_kv_heads, world=world)


def _config(layout: Layout, *settings: str) -> TrainerConfig:
    sizes = [f"layout.{name}={size}" for name, size in layout._asdict().items()]
    config = apply_overrides(nano(), [*settings, *sizes, "batch.sequences=4", "device=cpu"])
    return config.for_world(layout.world)


def _batch() -> Batch:
    """Four sequences of 32: one whole, two cut off on either side of a border, one empty."""
    tokens = torch.randint(0, 257, (4, 33), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(32) < torch.tensor([32, 20, 9, 0])[:, None]
    documents = (torch.arange(32) >= torch.tensor([11, 16, 40, 7])[:, None]).int()
    targets = tokens[:, 1:].masked_fill(~mask, -100)
    return Batch(tokens[:, :-1].masked_fill(~mask, 256), targets, mask, documents)


# Balance over a microbatch's tokens is another function for other microbatches: here all take one.
SETTINGS = ("model.moe.balance_scope=microbatch", "model.moe.balance_loss=1")
SETTINGS += ("model.attention.window=10", "model.attention.full_every=2")


def _measure(rank: int, world: int, layout: Layout) -> Measured:
    return measure(_config(layout, *SETTINGS), _batch())


@pytest.mark.dist
def test_a_step_with_documents_windows_and_balance_over_a_microbatch(processes):
    alone = Layout(1, 1, 1)
    (reference,) = processes.run(_measure, alone, world=1)
    assert reference.counts[1].sum() == 2 * _batch().mask_BS.sum()
    for layout in (Layout(1, 2, 1, context=2), Layout(1, 1, 2, context=2)):
        for measured in processes.run(_measure, layout, world=layout.world):
            verdict = compare(Case(layout, 1, "documents"), measured, reference)
            assert not verdict.faults, (layout, verdict.faults)


def _evaluate(rank: int, world: int, layout: Layout) -> tuple[float, int]:
    config = _config(layout)
    assembly = assemble(config, create_mesh(config.layout, torch.device("cpu")))
    mesh = assembly.mesh
    return heldout_loss(assembly, [_batch().context_part(mesh.context, mesh.num_context)])


@pytest.mark.dist
def test_the_heldout_loss_does_not_depend_on_it(processes):
    ((loss, tokens),) = processes.run(_evaluate, Layout(1, 1, 1), world=1)
    assert tokens == 32 + 20 + 9
    for other, same in processes.run(_evaluate, Layout(1, 1, 1, context=2), world=2):
        assert other == pytest.approx(loss, rel=1e-6)
        assert same == tokens


def _places(rank: int, world: int, layout: Layout) -> tuple[tuple[int, ...], dict[str, list[int]]]:
    mesh = create_mesh(_config(layout).layout, torch.device("cpu"))
    names = ("dense_replica", "context", "expert", "expert_replica", "pipeline")
    groups = {name: dist.get_process_group_ranks(getattr(mesh, f"{name}_group")) for name in names}
    return (mesh.data, mesh.context, mesh.expert), groups


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "places", "groups_of_2"),
    [
        (
            Layout(2, 4, 1, context=2),
            [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)],
            ([0, 1, 2, 3], [2, 3], [0, 1, 2, 3], [2], [2]),
        ),
        (
            Layout(2, 2, 1, context=2),
            [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)],
            ([0, 1, 2, 3], [2, 3], [2, 3], [0, 2], [2]),
        ),
        (
            Layout(1, 2, 2, context=2),
            [(0, 0, 0), (0, 1, 1), (0, 0, 0), (0, 1, 1)],
            ([2, 3], [2, 3], [2, 3], [2], [0, 2]),
        ),
    ],
    ids=["experts over all", "experts over a context group", "pipeline"],
)
def test_experts_fold_data_and_context_ranks(processes, layout, places, groups_of_2):
    found = processes.run(_places, layout, world=4)
    assert [place for place, _ in found] == places
    assert tuple(found[2][1].values()) == groups_of_2


def test_a_part_of_a_batch_keeps_the_documents_whole():
    batch = _batch()
    parts = [batch.context_part(part, 4) for part in range(4)]
    for name in ("tokens_BS", "targets_BS", "mask_BS"):
        assert torch.equal(
            torch.cat([getattr(each, name) for each in parts], 1), getattr(batch, name)
        )
    assert all(each.documents_BS is batch.documents_BS for each in parts)
    with pytest.raises(
        ValueError, match=r"`num_parts` \(5\) must divide the sequence length \(32\)"
    ):
        batch.context_part(0, 5)
