"""The kernels that multiply, run on the CPU by Triton's interpreter, against float64.

`test_triton_kernels.py` runs this module in a process of its own, because Triton decides at import
whether it interprets. float32 is exact enough to see one wrong element; the interpreter's bfloat16
is wrong, so bfloat16 is proved on a GPU only.
"""

import mmap
from pathlib import Path

import pytest
import torch
from expert_problem import (
    INTERPRETED,
    Problem,
    activated,
    assert_near,
    down_gradients,
    make_problem,
    outer_products,
    row_products,
)
from olmo_experts_gemm._triton import down_gradient as down
from olmo_experts_gemm._triton.collect import collect
from olmo_experts_gemm._triton.down_gradient import down_gradient
from olmo_experts_gemm._triton.row_product import row_product
from olmo_experts_gemm._triton.tile_map import make_tile_map
from olmo_experts_gemm._triton.tiling import Tiling
from olmo_experts_gemm._triton.up_product import up_product
from olmo_experts_gemm._triton.weight_gradient import weight_gradient
from torch import Tensor

pytestmark = INTERPRETED

TILINGS = [
    Tiling(rows=16, columns=32, inner=16, group=1),
    Tiling(rows=32, columns=64, inner=32, group=2, pieces=2, flatten=True),
    Tiling(rows=16, columns=64, inner=32, group=3, pieces=4, programs=2),
    Tiling(rows=64, columns=64, inner=16, group=4, pieces=8),
]
# Rows gathered or not, with bias and weights or plain: each pair of these, and each activation with
# each value of both.
FORMS = pytest.mark.parametrize(
    ("activation", "gather", "plain"),
    [
        ("swiglu", True, False),
        ("swiglu", False, True),
        ("geglu", True, True),
        ("geglu", False, False),
        ("relu_squared", True, False),
        ("relu_squared", False, True),
        ("clamped_swiglu", True, True),
        ("clamped_swiglu", False, False),
    ],
)


@pytest.fixture(params=TILINGS, ids=lambda cut: f"{cut.rows}x{cut.columns}-{cut.pieces}")
def cut(request: pytest.FixtureRequest) -> Tiling:
    return request.param


def assert_unwritten(rows: Tensor, what: str) -> None:
    assert rows.isnan().all(), f"{what}: rows past the last offset were written"


# row_product


@pytest.mark.parametrize("transposed", [False, True])
def test_row_product(cut: Tiling, transposed: bool) -> None:
    p = make_problem()
    x_RD = p.rows_of(p.x_TD)
    w = p.w_up.mT.contiguous() if transposed else p.w_up
    y_RF = row_product(x_RD, w, p.offsets_E, transposed=transposed, cut=cut)
    assert_near(y_RF[: p.rows], row_products(x_RD[: p.rows], p.w_up, p.experts_n), "y")
    assert (y_RF[p.rows :] == 0).all(), "rows past the last offset must be zero"

    again = row_product(x_RD, w, p.offsets_E, transposed=transposed, zero_tail=False, cut=cut)
    assert torch.equal(again[: p.rows], y_RF[: p.rows])
    assert_unwritten(again[p.rows :], "y")


@pytest.mark.parametrize("transposed", [False, True])
def test_row_product_of_tokens(cut: Tiling, transposed: bool) -> None:
    p = make_problem()
    w = p.w_up.mT.contiguous() if transposed else p.w_up
    form = {"transposed": transposed, "route_R": p.route_R, "top_k": p.top_k, "cut": cut}
    y_RF = row_product(p.x_TD, w, p.offsets_E, **form)
    assert_near(y_RF[: p.rows], row_products(p.x_TD[p.tokens_n], p.w_up, p.experts_n), "y")
    assert (y_RF[p.rows :] == 0).all()


def test_row_product_takes_a_tile_map(cut: Tiling) -> None:
    p = make_problem(K=1)
    x_RD = p.rows_of(p.x_TD)
    tiles = make_tile_map(p.offsets_E, len(x_RD), cut.rows)
    y_RF = row_product(x_RD, p.w_up, p.offsets_E, tiles=tiles, cut=cut)
    assert torch.equal(y_RF, row_product(x_RD, p.w_up, p.offsets_E, cut=cut))


def test_row_product_in_float16_and_by_the_default_tiling() -> None:
    p = make_problem(dtype=torch.float16)
    x_RD = p.rows_of(p.x_TD)
    y_RF = row_product(x_RD, p.w_up, p.offsets_E)
    want = row_products(x_RD[: p.rows], p.w_up, p.experts_n)
    assert y_RF.dtype == torch.float16
    assert_near(y_RF[: p.rows], want, "y", torch.float16)


@pytest.mark.parametrize("poisoned", [0, 2, 4])
def test_row_product_keeps_each_expert_to_its_rows(cut: Tiling, poisoned: int) -> None:
    p = make_problem()
    x_RD = p.rows_of(p.x_TD)
    clean = row_product(x_RD, p.w_up, p.offsets_E, cut=cut)[: p.rows]
    theirs = p.experts_n == poisoned
    x_RD[: p.rows][theirs] = torch.nan
    y_RF = row_product(x_RD, p.w_up, p.offsets_E, cut=cut)[: p.rows]
    assert torch.equal(y_RF[~theirs], clean[~theirs])
    assert y_RF[theirs].isnan().all()


# up_product


@FORMS
def test_up_product(cut: Tiling, activation: str, gather: bool, plain: bool) -> None:
    p = make_problem(activation=activation, seed=cut.pieces)
    # Large enough that the clamps of `clamped_swiglu` bind.
    p.x_TD.mul_(4.0)
    a_RH, hidden = _up_product(p, cut, gather=gather, plain=plain, save_hidden=True)
    want = row_products(p.x_TD[p.tokens_n], p.w_up, p.experts_n)
    want += 0 if plain else p.bias.double()[p.experts_n]
    layer = activated(want, activation)
    layer *= 1 if plain else p.weights[p.routes_n].double()[:, None]
    assert_near(hidden[: p.rows], want, "hidden")
    assert_near(a_RH[: p.rows], layer, "a")
    assert_unwritten(hidden[p.rows :], "hidden")
    assert_unwritten(a_RH[p.rows :], "a")

    same, nothing = _up_product(p, cut, gather=gather, plain=plain, save_hidden=False)
    assert torch.equal(same[: p.rows], a_RH[: p.rows])
    assert nothing.shape == (0, p.w_up.shape[1])


def test_up_product_keeps_each_expert_to_its_rows(cut: Tiling) -> None:
    p = make_problem()
    clean, _ = _up_product(p, cut, gather=False, save_hidden=False)
    theirs = p.experts_n == 2
    a_RH, _ = _up_product(p, cut, gather=False, save_hidden=False, poisoned=theirs)
    assert torch.equal(a_RH[: p.rows][~theirs], clean[: p.rows][~theirs])


def _up_product(
    p: Problem,
    cut: Tiling,
    *,
    gather: bool,
    save_hidden: bool,
    plain: bool = False,
    poisoned: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    x = p.x_TD if gather else p.rows_of(p.x_TD)
    if poisoned is not None:
        x[: p.rows][poisoned] = torch.nan
    weights = p.weights if gather else p.weights_of_rows()
    return up_product(
        x,
        p.w_up,
        None if plain else p.bias,
        p.offsets_E,
        route_R=p.route_R if gather else None,
        weights=None if plain else weights,
        top_k=p.top_k if gather else 1,
        activation=p.activation,
        save_hidden=save_hidden,
        cut=cut,
    )


# down_gradient


@pytest.fixture(params=[16, 32, 256])
def _columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(down, "_COLUMNS", request.param)


@FORMS
@pytest.mark.usefixtures("_columns")
def test_down_gradient(activation: str, gather: bool, plain: bool) -> None:
    weighted = not plain
    p = make_problem(activation=activation, seed=1)
    hidden = _hidden(p)
    weights_n = p.weights[p.routes_n] if weighted else torch.ones(p.rows)
    want_d_hidden, want_a, terms = down_gradients(p, hidden[: p.rows], weights_n)
    d_hidden, a_RH, ds_PR = _down_gradient(p, hidden, gather=gather, weighted=weighted)
    assert_near(d_hidden[: p.rows], want_d_hidden, "d hidden")
    assert_near(a_RH[: p.rows], want_a, "a")
    assert_unwritten(d_hidden[p.rows :], "d hidden")
    assert_unwritten(a_RH[p.rows :], "a")
    if not weighted:
        assert ds_PR.shape == (0, len(hidden))
        return
    assert ds_PR.dtype == torch.float32
    assert_near(ds_PR[:, : p.rows].double().sum(0), terms.sum(1), "ds")
    assert_unwritten(ds_PR[:, p.rows :], "parts of ds")


def test_down_gradient_keeps_each_expert_to_its_rows() -> None:
    p = make_problem()
    hidden = _hidden(p)
    clean = _down_gradient(p, hidden, gather=False)
    theirs = p.experts_n == 2
    hidden[: p.rows][theirs] = torch.nan
    got = _down_gradient(p, hidden, gather=False, poisoned=theirs)
    for name, value, want in zip(["d hidden", "a"], got, clean, strict=False):
        assert torch.equal(value[: p.rows][~theirs], want[: p.rows][~theirs]), name
    assert torch.equal(got[2][:, : p.rows][:, ~theirs], clean[2][:, : p.rows][:, ~theirs])


def _hidden(p: Problem) -> Tensor:
    """What forward saved, (R, 2H), some of it past the clamps; NaN past the last offset."""
    hidden = torch.full((len(p.route_R), p.w_up.shape[1]), torch.nan)
    draw = torch.Generator().manual_seed(3)
    hidden[: p.rows] = 4 * torch.randn(p.rows, hidden.shape[1], generator=draw)
    return hidden


def _down_gradient(
    p: Problem,
    hidden: Tensor,
    *,
    gather: bool,
    weighted: bool = True,
    poisoned: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dy = p.dy_TD if gather else p.rows_of(p.dy_TD)
    if poisoned is not None:
        dy[: p.rows][poisoned] = torch.nan
    weights = p.weights if gather else p.weights_of_rows()
    return down_gradient(
        dy,
        p.w_down,
        hidden,
        p.offsets_E,
        route_R=p.route_R if gather else None,
        weights=weights if weighted else None,
        top_k=p.top_k if gather else 1,
        activation=p.activation,
    )


# weight_gradient

GATHERS = ["none", "left", "right"]


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("empty", [(0, 4), (1, 2), (0, 1, 2, 3, 4)], ids=str)
def test_weight_gradient(cut: Tiling, gather: str, empty: tuple[int, ...]) -> None:
    p = make_problem(empty=empty, D=72, H=40)
    left, right = _operands(p, gather)
    dw = _weight_gradient(p, left, right, gather, cut)
    want = outer_products(p.dy_TD[p.tokens_n], p.x_TD[p.tokens_n, :40], p.offsets_E)
    assert_near(dw, want, "dw")
    for expert in empty:
        assert (dw[expert] == 0).all(), f"expert {expert} has no rows"

    into = torch.randn(dw.shape, generator=torch.Generator().manual_seed(5))
    total = want + into
    unused = into[list(empty)].clone()
    assert _weight_gradient(p, left, right, gather, cut, into=into) is into
    assert_near(into, total, "dw added")
    assert torch.equal(into[list(empty)], unused)


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("poisoned", [0, 2])
def test_weight_gradient_keeps_each_expert_to_its_rows(
    cut: Tiling, gather: str, poisoned: int
) -> None:
    p = make_problem(K=1)
    left, right = _operands(p, gather)
    clean = _weight_gradient(p, left, right, gather, cut)
    theirs = p.experts_n == poisoned
    for operand, is_tokens in ((left, gather == "left"), (right, gather == "right")):
        operand[p.tokens_n[theirs] if is_tokens else theirs.nonzero()[:, 0]] = torch.nan
    dw = _weight_gradient(p, left, right, gather, cut)
    others = torch.arange(5) != poisoned
    assert torch.equal(dw[others], clean[others])
    assert dw[poisoned].isnan().all()


def test_weight_gradient_of_micro_batches_is_their_sum() -> None:
    # Expert 2 gets rows in the second batch only.
    batches = [make_problem(seed=seed, empty=() if seed == 1 else (2,)) for seed in range(3)]
    into = torch.zeros(5, 56, 56)
    for p in batches:
        _weight_gradient(p, p.dy_TD, p.rows_of(p.x_TD), "left", TILINGS[1], into=into)
    wants = [outer_products(p.dy_TD[p.tokens_n], p.x_TD[p.tokens_n], p.offsets_E) for p in batches]
    assert wants[1][2].abs().max() > 0
    for expert in range(5):
        assert_near(into[expert], sum(want[expert] for want in wants), f"expert {expert}")


def test_weight_gradient_in_float16() -> None:
    p = make_problem(dtype=torch.float16)
    dw = _weight_gradient(p, p.dy_TD, p.rows_of(p.x_TD), "left", TILINGS[1])
    assert dw.dtype == torch.float16
    want = outer_products(p.dy_TD[p.tokens_n], p.x_TD[p.tokens_n], p.offsets_E)
    assert_near(dw, want, "dw", torch.float16)


def _operands(p: Problem, gather: str) -> tuple[Tensor, Tensor]:
    """`left` 72 or 56 wide and `right` 40, each of tokens or of rows."""
    right = p.x_TD[:, :40].contiguous()
    return (
        p.dy_TD.clone() if gather == "left" else p.rows_of(p.dy_TD),
        right if gather == "right" else p.rows_of(right),
    )


def _weight_gradient(
    p: Problem, left: Tensor, right: Tensor, gather: str, cut: Tiling, into: Tensor | None = None
) -> Tensor:
    return weight_gradient(
        left,
        right,
        p.offsets_E,
        route_R=None if gather == "none" else p.route_R,
        gather=gather,
        top_k=p.top_k,
        into=into,
        cut=cut,
    )


# Addresses in 64 bits


@pytest.fixture
def far_token(tmp_path: Path) -> tuple[Tensor, int, Tensor]:
    """Tokens 4096 wide of which only the first and token 2^20 are held; the first, where an address
    in 32 bits ends, is NaN.
    """
    width, token = 4096, 2**20
    with open(tmp_path / "tokens", "w+b") as file:
        file.truncate(2 * width * (token + 1))  # a hole: it takes no space
        memory = mmap.mmap(file.fileno(), 0)
    first, last = (
        torch.frombuffer(memory, dtype=torch.float16, count=width, offset=2 * width * t).view(1, -1)
        for t in (0, token)
    )
    first.fill_(torch.nan)
    last.copy_(torch.randn(1, width, generator=torch.Generator().manual_seed(0)))
    return first, token, last.clone()


def test_rows_beyond_2_31_elements_are_found(far_token: tuple[Tensor, int, Tensor]) -> None:
    x, token, x_1D = far_token
    D = x.shape[1]
    assert torch.equal(collect(x, torch.tensor([[token]], dtype=torch.int32)), x_1D)

    route_R, end = torch.tensor([token], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    draw = torch.Generator().manual_seed(1)
    w = (torch.randn(1, 16, D, generator=draw) / 64).half()
    cut = Tiling(rows=16, columns=32, inner=256)
    y_1F = row_product(x, w, end, route_R=route_R, cut=cut)
    assert_near(y_1F, (w[0].double() @ x_1D[0].double())[None], "y", torch.float16)
    form = {"route_R": route_R, "weights": None, "top_k": 1, "activation": "swiglu"}
    _, hidden = up_product(x, w, None, end, save_hidden=True, cut=cut, **form)
    assert_near(hidden, (w[0].double() @ x_1D[0].double())[None], "hidden", torch.float16)

    w_down = w[:, :8].mT.contiguous()
    d_hidden, _, _ = down_gradient(x, w_down, hidden, end, **form)
    layer = hidden.double().requires_grad_()
    g = x_1D.double() @ w_down[0].double()
    activated(layer, "swiglu").backward(g)
    assert_near(d_hidden, layer.grad, "d hidden", torch.float16)

    cut = Tiling(rows=256, columns=256, inner=16)
    form = {"route_R": route_R, "cut": cut}
    outer = hidden[0].double()[:, None] * x_1D.double()
    dw = weight_gradient(hidden, x, end, gather="right", **form)
    assert_near(dw[0], outer, "dw, right", torch.float16)
    dw = weight_gradient(x, hidden, end, gather="left", **form)
    assert_near(dw[0], outer.T, "dw, left", torch.float16)
