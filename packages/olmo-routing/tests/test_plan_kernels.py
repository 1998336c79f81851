"""The kernels of row and tile plans against the reference.

They run as those of `test_gate_kernels.py` do.
"""

from dataclasses import fields

import pytest
import torch
from kernel_problem import INTERPRETED, NEEDS_GPU_OR_INTERPRETER, make_logits
from olmo_routing import plan_rows, plan_tiles, route
from olmo_routing._rows import _plan_rows
from olmo_routing._tiles import _plan_tiles

pytestmark = NEEDS_GPU_OR_INTERPRETER


def make_ids(T, E, K, dropped=0.2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(T, E, generator=generator).argsort(dim=1)[:, :K].contiguous()
    ids[torch.rand(T, K, generator=generator) < dropped] = -1
    return ids


def assert_equal_plans(ids, num_experts, align, device):
    got = plan_rows(ids.to(device), num_experts, align=align, impl="triton")
    want = plan_rows(ids, num_experts, align=align, impl="reference")
    for field in fields(want):
        value = getattr(got, field.name)
        assert value.dtype == getattr(want, field.name).dtype
        assert torch.equal(value.cpu(), getattr(want, field.name)), field.name


# A program holds 2^17 / E routes, but 64 to 1024 of them, E rounded up to a power of two.
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("align", [1, 32, 128])
@pytest.mark.parametrize(
    ("T", "E", "K"),
    [(0, 4, 2), (1, 1, 1), (40, 5, 2), (512, 8, 2), (700, 24, 3), (50, 300, 3), (3, 64, 8)],
)
def test_equal_to_the_reference(device, T, E, K, align):
    assert_equal_plans(make_ids(T, E, K), E, align, device)


@pytest.mark.usefixtures("poisoned_memory")
def test_loads_of_every_kind(device):
    T, E = 300, 8
    for ids in (
        torch.full((T, 2), -1),
        torch.full((T, 1), E - 1),
        torch.arange(T)[:, None] % E,
        (torch.arange(T)[:, None] > 250).long() * 3,
        torch.stack([torch.zeros(T), torch.full((T,), 5)], dim=1).long(),
    ):
        assert_equal_plans(ids, E, 16, device)


@pytest.mark.usefixtures("poisoned_memory")
def test_more_blocks_than_a_step_adds_up(device):
    """17 blocks of 64 routes, where a step takes 8 of them."""
    ids = torch.randint(-1, 520, (540, 2), generator=torch.Generator().manual_seed(0))
    assert_equal_plans(ids, 520, 8, device)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("height", [1, 16, 128])
@pytest.mark.parametrize("num_experts", [1, 5, 64, 300])
def test_tiles_equal_to_the_reference(device, num_experts, height):
    ids = make_ids(150, num_experts, min(3, num_experts))
    offsets = plan_rows(ids, num_experts).offsets_E
    for rows in (ids.numel(), ids.numel() + 77):
        got = plan_tiles(offsets.to(device), rows, height, impl="triton")
        want = plan_tiles(offsets, rows, height, impl="reference")
        for field in fields(want):
            assert torch.equal(getattr(got, field.name).cpu(), getattr(want, field.name))


def test_ids_of_any_strides(device):
    ids = make_ids(77, 8, 6)
    assert_equal_plans(ids[:, ::2], 8, 4, device)
    got = plan_rows(ids.to(device).T[:2].T, 8, impl="triton").rows_TK
    assert torch.equal(got.cpu(), plan_rows(ids[:, :2].contiguous(), 8).rows_TK)


def test_repeats_give_the_same_bits(device):
    ids = make_ids(*((100, 24, 4) if INTERPRETED else (20000, 128, 8))).to(device)
    num_experts = 24 if INTERPRETED else 128
    first = plan_rows(ids, num_experts, align=16, impl="triton")
    for _ in range(3 if INTERPRETED else 100):
        again = plan_rows(ids, num_experts, align=16, impl="triton")
        for field in fields(first):
            assert torch.equal(getattr(again, field.name), getattr(first, field.name))


def test_the_operators_keep_the_rules_of_torch(device):
    torch.library.opcheck(_plan_rows, (make_ids(5, 4, 2).to(device), 4, 8))
    offsets = torch.tensor([3, 3, 9], dtype=torch.int32, device=device)
    torch.library.opcheck(_plan_tiles, (offsets, 12, 4))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(device, dynamic):
    impl = "triton" if INTERPRETED else "auto"

    def run(logits):
        plan = plan_rows(route(logits, 2, impl=impl).expert_ids_TK, 8, align=4, impl=impl)
        return plan.offsets_E, plan.rows_TK, plan.routes_R

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for T in (13, 7) if dynamic else (13,):
        logits = make_logits(T, 8).to(device)
        assert all(torch.equal(a, b) for a, b in zip(compiled(logits), run(logits), strict=True))


def test_three_launches_from_logits_to_plan(device, monkeypatch):
    """And a fourth backward; `test_gpu_kernels.py` counts what torch adds, a fill of zeros."""
    from olmo_routing._triton import gate

    kind, launched = type(gate._gate_kernel), []
    run = kind.run

    def counted(self, *args, **options):
        launched.append(self)
        return run(self, *args, **options)

    monkeypatch.setattr(kind, "run", counted)
    routing = route(make_logits(20, 8).to(device).requires_grad_(), 2, impl="triton")
    plan_rows(routing.expert_ids_TK, 8, align=16, impl="triton")
    assert len(launched) == 3
    (routing.weights_TK.sum() + routing.scores_TE.sum()).backward()
    assert len(launched) == 4


def test_what_the_kernels_cannot_plan_is_said(device):
    ids = torch.zeros(2, 1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="up to 1024 experts, got 1025; use impl='reference'"):
        plan_rows(ids, 1025, impl="triton")
    with pytest.raises(ValueError, match=r"at most 2\^31 - 1, .*got room for 2147483650"):
        plan_rows(ids, 2, align=2**30 + 1, impl="triton")
    if device == "cuda":
        assert plan_rows(ids, 1025).offsets_E.shape == (1025,)
