"""Tokens to tokens: against a loop over tokens and slots, and bit for bit against itself."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_experts_gemm import moe_mlp
from olmo_experts_gemm._routes import collect_rows, gather_rows, sort_routes


def _routes(T, K, E, seed, dropped=0.2):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(T, E, generator=generator).argsort(dim=1)[:, :K].contiguous()
    ids[torch.rand(T, K, generator=generator) < dropped] = -1
    return ids


def _operands(T, K, E, D, H, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = {
        "x": normal(T, D),
        "weights": normal(T, K),
        "w_gate_up": normal(E, 2 * H, D) * D**-0.5,
        "w_down": normal(E, D, H) * H**-0.5,
    }
    return tensors, normal(T, D)


def _moe(ids, **options):
    return lambda x, weights, w_gate_up, w_down: moe_mlp(
        x, ids, weights, w_gate_up, w_down, **options
    )


def _oracle(oracle, ids):
    return lambda x, weights, w_gate_up, w_down: oracle.moe(x, ids, weights, w_gate_up, w_down)


@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(0, 11),
    E=st.integers(1, 13),
    K=st.integers(1, 4),
    D=st.integers(1, 5),
    H=st.integers(1, 5),
    seed=st.integers(0, 2**31),
    dropped=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_any_routing_gives_the_sum_over_slots_and_every_gradient(
    oracle, run, assert_same, T, E, K, D, H, seed, dropped
):
    ids = _routes(T, min(K, E), E, seed, dropped)
    tensors, dy = _operands(T, min(K, E), E, D, H, seed=seed)
    want = run(_oracle(oracle, ids), tensors, dy, torch.float64)
    tensors["weights"][ids < 0] = float("nan")
    got = run(_moe(ids), tensors, dy, torch.float64)
    assert_same(got, want, 1e-12)
    assert (got["weights"][ids < 0] == 0).all()
    assert (got["y"][(ids < 0).all(1)] == 0).all()
    for expert in set(range(E)) - set(ids.flatten().tolist()):
        assert (got["w_gate_up"][expert] == 0).all()
        assert (got["w_down"][expert] == 0).all()


def test_a_route_without_an_expert_leaves_no_trace(run):
    """Not in the first token, not in the last expert: the places that an index of -1 or 0 hits."""
    ids = torch.tensor([[0, 2], [-1, 1], [2, -1], [-1, -1], [1, 0]])
    tensors, dy = _operands(5, 2, 3, 4, 3)
    # What a dropped route would bring with it: its own token.
    tensors["x"][3] = 1e30
    got = run(_moe(ids), tensors, dy, torch.float64)
    kept = [0, 1, 2, 4]
    fewer = {**tensors, "x": tensors["x"][kept], "weights": tensors["weights"][kept]}
    want = run(_moe(ids[kept]), fewer, dy[kept], torch.float64)
    assert torch.equal(got["y"][kept], want["y"])
    assert torch.equal(got["x"][kept], want["x"])
    assert torch.equal(got["w_gate_up"], want["w_gate_up"])
    assert torch.equal(got["w_down"], want["w_down"])
    assert (got["y"][3] == 0).all()
    assert (got["x"][3] == 0).all()


def test_int32_and_int64_ids_give_the_same_bits(run):
    ids = _routes(13, 3, 11, seed=3)
    tensors, dy = _operands(13, 3, 11, 6, 4)
    got = run(_moe(ids.int()), tensors, dy, torch.float64)
    for name, value in run(_moe(ids), tensors, dy, torch.float64).items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_runs_agree_bit_for_bit(run, impl, dtype):
    ids = _routes(37, 3, 5, seed=5)
    tensors, dy = _operands(37, 3, 5, 16, 8, dtype=dtype)
    first = run(_moe(ids, impl=impl), tensors, dy, dtype)
    for _ in range(4):
        again = run(_moe(ids, impl=impl), tensors, dy, dtype)
        for name, value in first.items():
            assert torch.equal(again[name], value), name


def test_a_token_does_not_depend_on_the_others(run):
    ids = _routes(29, 3, 5, seed=6)
    tensors, dy = _operands(29, 3, 5, 8, 6)
    order = torch.randperm(29, generator=torch.Generator().manual_seed(0))
    moved = {**tensors, "x": tensors["x"][order], "weights": tensors["weights"][order]}
    want = run(_moe(ids), tensors, dy, torch.float64)
    got = run(_moe(ids[order]), moved, dy[order], torch.float64)
    for name in ("y", "x", "weights"):
        torch.testing.assert_close(got[name], want[name][order], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_errs_at_most_twice_as_much_as_plain_torch(
    oracle, run, assert_twice_as_good, dtype
):
    ids = _routes(67, 2, 4, seed=7)
    tensors, dy = _operands(67, 2, 4, 48, 32, dtype=dtype)

    def plain(x, weights, w_gate_up, w_down):
        y = torch.zeros_like(x)
        for expert in range(4):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            a, b = (x[token] @ w_gate_up[expert].t()).chunk(2, -1)
            out = (torch.nn.functional.silu(a) * b) @ w_down[expert].t()
            y = y.index_add(0, token, out * weights[token, slot][:, None])
        return y

    exact = run(_oracle(oracle, ids), tensors, dy, torch.float64)
    assert_twice_as_good(run(_moe(ids), tensors, dy, dtype), run(plain, tensors, dy, dtype), exact)


@settings(max_examples=40, deadline=None)
@given(
    T=st.integers(0, 12),
    K=st.integers(1, 4),
    E=st.integers(1, 12),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_routes_are_sorted_by_expert_then_token_then_slot(T, K, E, seed, dtype):
    ids = _routes(T, min(K, E), E, seed).to(dtype)
    K = ids.shape[1]
    offsets, route, row = sort_routes(ids, E)
    kept = [
        (e, t, k) for t, slots in enumerate(ids.tolist()) for k, e in enumerate(slots) if e >= 0
    ]
    want = [t * K + k for _, t, k in sorted(kept)]
    assert route[: len(want)].tolist() == want
    assert offsets.tolist() == [sum(e <= expert for e, _, _ in kept) for expert in range(E)]
    assert row[route].tolist() == list(range(T * K))
    # Row times width passes 2^31 long before the row does: the maps must be int64.
    assert (offsets.dtype, route.dtype, row.dtype) == (torch.int32, torch.int64, torch.int64)


@pytest.mark.parametrize("counts", [[0, 4, 3], [4, 3, 0], [0, 0], [32, 32], [0, 1, 31, 33, 0]])
def test_collecting_gathered_rows_gives_the_tokens_back(counts):
    ids = (
        torch.tensor([e for e, count in enumerate(counts) for _ in range(count)]).view(-1, 1).long()
    )
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    _, route, row = sort_routes(ids, len(counts))
    x = torch.arange(len(ids) * 3.0).view(-1, 3)
    assert torch.equal(collect_rows(gather_rows(x, route, row[:, None]), route, row[:, None]), x)


def test_rows_are_added_in_slot_order_in_float32():
    y = torch.tensor([[2.0**-9], [1.0], [2.0**-9], [-1.0]], dtype=torch.bfloat16)
    token = torch.zeros(4, dtype=torch.long)
    row = torch.tensor([[1, 0, 2, 3]])
    assert collect_rows(y, token, row).item() == 2.0**-8
    tiny = torch.tensor([[2.0**-24], [1.0], [2.0**-24]])
    ascending, descending = torch.tensor([[0, 2, 1]]), torch.tensor([[1, 0, 2]])
    assert collect_rows(tiny, token[:3], ascending).item() == 1 + 2.0**-23
    assert collect_rows(tiny, token[:3], descending).item() == 1.0


def test_a_token_adds_its_experts_in_slot_order():
    """Two small parts reach a large one only when they meet before it."""
    tensors, _ = _operands(1, 3, 1, 8, 4, dtype=torch.float32)
    stacks = [tensors[name].expand(3, -1, -1) for name in ("w_gate_up", "w_down")]
    ids, small = torch.tensor([[2, 0, 1]]), 2.0**-25
    alone, first, last = (
        moe_mlp(tensors["x"], ids, torch.tensor([weights]), *stacks)
        for weights in ([1.0, 0.0, 0.0], [1.0, small, small], [small, small, 1.0])
    )
    assert torch.equal(first, alone)
    assert (last.abs() > alone.abs()).all()


def test_the_permutation_operators_keep_the_rules_of_torch():
    ids = _routes(5, 2, 3, seed=1)
    _, route, row = sort_routes(ids, 3)
    maps = (route // 2, row.view(-1, 2))
    for operator, length in ((gather_rows, 5), (collect_rows, 10)):
        rows = torch.randn(length, 3, dtype=torch.float64, requires_grad=True)
        torch.library.opcheck(operator, (rows, *maps))
        assert torch.autograd.gradcheck(operator, (rows, *maps))
        assert torch.autograd.gradgradcheck(operator, (rows, *maps))


def test_compiles_into_one_graph(run):
    ids = _routes(9, 2, 3, seed=2)
    tensors, dy = _operands(9, 2, 3, 8, 4, dtype=torch.float32)
    compiled = torch.compile(moe_mlp, backend="aot_eager", fullgraph=True)
    want = run(_moe(ids), tensors, dy, torch.float32)
    got = run(
        lambda x, weights, w_gate_up, w_down: compiled(x, ids, weights, w_gate_up, w_down),
        tensors,
        dy,
        torch.float32,
    )
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu_squared", "clamped_swiglu"])
def test_activations_biases_main_grads_and_a_packer_reach_the_experts(
    oracle, run, assert_same, activation
):
    T, K, E, D, H = 9, 2, 4, 5, 3
    ids = _routes(T, K, E, seed=8)
    tensors, dy = _operands(T, K, E, D, H)
    if activation == "relu_squared":
        tensors["w_gate_up"] = tensors["w_gate_up"][:, :H].contiguous()
    generator = torch.Generator().manual_seed(3)
    for name, width in (("b_gate_up", tensors["w_gate_up"].shape[1]), ("b_down", D)):
        tensors[name] = torch.randn(E, width, generator=generator, dtype=torch.float64)
    want = run(
        lambda x, weights, *stacks: oracle.moe(x, ids, weights, *stacks, activation=activation),
        tensors,
        dy,
        torch.float64,
    )

    def layer(x, weights, w_gate_up, w_down, b_gate_up, b_down, **options):
        biases = {"b_gate_up_E2H": b_gate_up, "b_down_ED": b_down}
        stacks = (w_gate_up, w_down)
        return moe_mlp(x, ids, weights, *stacks, activation=activation, **biases, **options)

    assert_same(run(layer, tensors, dy, torch.float64), want, 1e-12)
    seen = []
    packer = SimpleNamespace(
        pack=lambda tensor: seen.append(tuple(tensor.shape)) or tensor, unpack=lambda packed: packed
    )
    stacks = ("w_gate_up", "w_down")
    buffers = tuple(torch.zeros_like(tensors[name], dtype=torch.float32) for name in stacks)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    layer(*leaves.values(), pack=packer, main_grads=buffers).backward(dy)
    got = {name: leaf.grad for name, leaf in leaves.items() if name not in stacks}
    assert_same(got, {name: want[name] for name in got}, 1e-12)
    added = dict(zip(stacks, buffers, strict=True))
    assert_same(added, {name: want[name] for name in stacks}, 1e-6)
    assert set(seen) == {(T * K, D), (T * K, H)}
    assert all(leaves[name].grad is None for name in stacks)
