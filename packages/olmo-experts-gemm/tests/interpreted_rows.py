"""The kernels that order, list and add rows, run on the CPU by Triton's interpreter.

`test_triton_kernels.py` runs this module in a process of its own.
"""

from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from expert_problem import INTERPRETED, assert_near, make_problem, sorted_routes
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_experts_gemm._triton import sort_routes as sorting
from olmo_experts_gemm._triton.collect import collect, collect_weight_gradient
from olmo_experts_gemm._triton.expert_sums import add_to_rows, dot_rows, sum_rows
from olmo_experts_gemm._triton.sort_routes import sort_routes
from olmo_experts_gemm._triton.tile_map import make_tile_map, tile_at
from torch import Tensor
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

pytestmark = INTERPRETED

# sort_routes


@settings(max_examples=12, deadline=None, derandomize=True)
@given(T=st.integers(0, 60), K=st.integers(1, 5), E=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_sort_routes_is_the_stable_sort(T: int, K: int, E: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(-1, E, (T, K), generator=draw)
    _assert_sorted(ids_TK, E)
    _assert_sorted(ids_TK.int(), E)


@pytest.mark.parametrize("E", [1, 16, 17, 512])
def test_sort_routes_of_few_and_many_experts(E: int) -> None:
    ids_TK = torch.randint(-1, E, (100, 3), generator=torch.Generator().manual_seed(E))
    ids_TK[ids_TK == E // 2] = -1
    _assert_sorted(ids_TK, E)
    _assert_sorted(torch.full((70, 2), E - 1), E)
    _assert_sorted(torch.full((70, 2), -1), E)
    _assert_sorted(ids_TK.T, E)


@pytest.mark.parametrize("programs", [1, 2, 1000])
def test_sort_routes_does_not_depend_on_its_blocks(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorting, "_PROGRAMS", programs)  # blocks of 512, 256 and 64 routes
    ids_TK = torch.randint(-1, 200, (150, 2), generator=torch.Generator().manual_seed(1))
    _assert_sorted(ids_TK, 200)


def test_sort_routes_adds_up_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "_TABLE", 1)  # 4 blocks a step, of 7
    ids_TK = torch.randint(-1, 300, (220, 2), generator=torch.Generator().manual_seed(1))
    _assert_sorted(ids_TK, 300)


@pytest.mark.parametrize("wrong", [5, 6, 100, 2**32 + 1])
def test_sort_routes_refuses_an_id_past_the_last_expert(
    wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The launch asks for assertions; the interpreter does not listen.
    monkeypatch.setattr(interpreter_builder, "options", InterpreterOptions(debug=True))
    ids_TK = torch.zeros(40, 2, dtype=torch.long)
    ids_TK[33, 1] = wrong
    with pytest.raises(InterpreterError, match="below the number of experts"):
        sort_routes(ids_TK, 5)


def test_sort_routes_gives_a_negative_id_no_row() -> None:
    # As int32 it would be expert 3.
    ids_TK = torch.tensor([[1, 3 - 2**32], [-7, 0]])
    offsets_E, route_R, row_TK = sort_routes(ids_TK, 5)
    assert offsets_E.tolist() == [1, 2, 2, 2, 2]
    assert route_R[:2].tolist() == [3, 0]
    assert row_TK.tolist() == [[1, -1], [-1, 0]]


def _assert_sorted(ids_TK: Tensor, E: int) -> None:
    offsets_E, route_R, row_TK = sort_routes(ids_TK, E)
    want_offsets_E, want_route_R, want_row_N = sorted_routes(ids_TK.flatten().long(), E)
    n = int(want_offsets_E[-1])
    assert torch.equal(offsets_E, want_offsets_E)
    assert torch.equal(route_R[:n], want_route_R[:n])
    assert torch.equal(row_TK, want_row_N.view(ids_TK.shape))


# tile_map


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 15, 16, 17, 40, 130]), min_size=1, max_size=40),
    tail=st.sampled_from([0, 7]),
    rows=st.sampled_from([16, 32, 128]),
)
def test_tile_map_covers_every_row_once(counts: list[int], tail: int, rows: int) -> None:
    _assert_covered(counts, tail, rows)


@pytest.mark.parametrize("counts", [[0], [0] * 512, [1] * 512, [0] * 511 + [40], [300] + [0] * 20])
def test_tile_map_of_one_and_many_experts(counts: list[int]) -> None:
    _assert_covered(counts, 3, 16)


def _assert_covered(counts: list[int], tail: int, rows: int) -> None:
    ends = torch.tensor(counts).cumsum(0).int()
    R = sum(counts) + tail
    tiles = make_tile_map(ends, R, rows)
    capacity = -(-R // rows) + len(counts)
    assert [len(t) for t in tiles] == [capacity, capacity, capacity, 1]
    want = [
        (expert, row, end)
        for expert, (start, end) in enumerate(pairwise([0, *ends.tolist()]))
        for row in range(start, end, rows)
    ]
    used = int(tiles.used)
    got = [(int(e), int(r), int(z)) for e, r, z in zip(*tiles[:3], strict=True)]
    assert got[:used] == want
    assert got[used:] == [(0, 0, 0)] * (capacity - used)


@triton.jit
def _list_tiles(out, down, across, GROUP: tl.constexpr):
    number = tl.program_id(0)
    i, j = tile_at(number, down, across, GROUP)
    tl.store(out + 2 * number, i)
    tl.store(out + 2 * number + 1, j)


@pytest.mark.parametrize(("down", "across", "group"), [(1, 1, 8), (7, 3, 2), (7, 3, 4), (3, 5, 8)])
def test_tile_at_visits_every_tile_once_and_a_group_together(
    down: int, across: int, group: int
) -> None:
    out = torch.empty(down * across, 2, dtype=torch.int32)
    _list_tiles[(down * across,)](out, down, across, GROUP=group)
    tiles = [tuple(tile) for tile in out.tolist()]
    assert sorted(tiles) == [(i, j) for i in range(down) for j in range(across)]
    first = min(group, down)
    assert tiles[:first] == [(i, 0) for i in range(first)]


# collect


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("K", "D"), [(1, 8), (3, 56), (4, 2056)])
def test_collect_adds_the_rows_of_a_token(K: int, D: int, dtype: torch.dtype) -> None:
    p = make_problem(T=9, K=K, D=8)
    rows_RD = torch.randn(9 * K, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows_RD[p.rows :] = torch.nan
    y_TD = collect(rows_RD, p.row_TK)
    want = torch.zeros(9, D, dtype=torch.double)
    want.index_add_(0, p.tokens_n, rows_RD[: p.rows].double())
    assert y_TD.dtype == dtype
    assert_near(y_TD, want, "y", dtype)
    assert (collect(rows_RD, torch.full((9, K), -1, dtype=torch.int32)) == 0).all()


def test_collect_adds_in_slot_order() -> None:
    # In this order, and only in it, 1 is lost in 2^25.
    rows_RD = torch.tensor([[1.0], [2.0**25], [-(2.0**25)]]).expand(3, 8).contiguous()
    row_TK = torch.tensor([[0, 1, 2], [1, 2, 0]], dtype=torch.int32)
    assert collect(rows_RD, row_TK)[:, 0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("P", [1, 3])
def test_collect_weight_gradient_adds_the_parts(P: int) -> None:
    p = make_problem(T=150)
    ds_PR = torch.randn(P, 300, generator=torch.Generator().manual_seed(0))
    ds_PR[:, p.rows :] = torch.nan
    ds_TK = collect_weight_gradient(ds_PR, p.row_TK)
    want_N = torch.zeros(300, dtype=torch.double)
    want_N[p.routes_n] = ds_PR[:, : p.rows].double().sum(0)
    assert ds_TK.dtype == torch.float32
    assert_near(ds_TK, want_N.view(150, 2), "ds")
    assert (ds_TK[p.row_TK < 0] == 0).all()


# expert_sums


FORMS = pytest.mark.parametrize(
    ("gather", "weighted"), [(True, True), (True, False), (False, True), (False, False)]
)


@FORMS
def test_sum_rows(gather: bool, weighted: bool) -> None:
    p = make_problem(T=90, D=152, empty=(0, 2))
    rows = p.x_TD if gather else p.rows_of(p.x_TD)
    weights = p.weights if gather else p.weights_of_rows()
    sums_ED = sum_rows(
        rows,
        p.offsets_E,
        route_R=p.route_R if gather else None,
        weights=weights if weighted else None,
        top_k=p.top_k,
    )
    factors_n = p.weights[p.routes_n].double() if weighted else torch.ones(p.rows).double()
    want = torch.zeros(5, 152, dtype=torch.double)
    want.index_add_(0, p.experts_n, factors_n[:, None] * p.x_TD[p.tokens_n].double())
    assert_near(sums_ED, want, "sums")
    assert (sums_ED[[0, 2]] == 0).all()


@FORMS
def test_add_to_rows(gather: bool, weighted: bool) -> None:
    p = make_problem(T=90, D=152)
    y_RD, bias = p.rows_of(p.dy_TD), torch.randn(5, 152, generator=torch.Generator().manual_seed(0))
    weights = p.weights if gather else p.weights_of_rows()
    factors_n = p.weights[p.routes_n].double() if weighted else torch.ones(p.rows).double()
    want = y_RD[: p.rows].double() + factors_n[:, None] * bias.double()[p.experts_n]
    add_to_rows(
        y_RD,
        bias,
        p.offsets_E,
        route_R=p.route_R if gather else None,
        weights=weights if weighted else None,
    )
    assert_near(y_RD[: p.rows], want, "y")
    assert y_RD[p.rows :].isnan().all(), "rows past the last offset were written"


@pytest.mark.parametrize("gather", [True, False])
def test_dot_rows(gather: bool) -> None:
    p = make_problem(T=90, D=152)
    rows, bias = p.x_TD if gather else p.rows_of(p.x_TD), p.w_up[:, 0].contiguous()
    route_R = p.route_R if gather else None
    dots_R = dot_rows(rows, bias, p.offsets_E, len(p.route_R), route_R=route_R, top_k=p.top_k)
    want = (p.x_TD[p.tokens_n].double() * bias.double()[p.experts_n]).sum(1)
    assert_near(dots_R[: p.rows], want, "dots")
    assert dots_R[p.rows :].isnan().all(), "rows past the last offset were written"


# No rows at all


def test_no_rows() -> None:
    offsets_E, route_R, row_TK = sort_routes(torch.empty(0, 2, dtype=torch.long), 3)
    assert offsets_E.tolist() == [0, 0, 0]
    assert (route_R.shape, row_TK.shape) == ((0,), (0, 2))
    assert int(make_tile_map(offsets_E, 0, 16).used) == 0
    assert collect(torch.empty(0, 16), row_TK).shape == (0, 16)
    assert collect_weight_gradient(torch.empty(2, 0), row_TK).shape == (0, 2)
