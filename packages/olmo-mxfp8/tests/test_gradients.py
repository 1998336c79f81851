"""`mx_linear` and `mx_grouped_mm`: the three products, exactly and by measure."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_mxfp8 import (
    MXLinear,
    MXRecipe,
    dequantize,
    mx_grouped_mm,
    mx_linear,
    quantize,
)

SIZES = [(5, 0, 32, 3), (0, 4, 0), (6, 0), (0, 0, 0), (33, 31, 0, 64), (1,)]


def offsets(sizes):
    return torch.tensor(sizes).cumsum(0).int()


def run(function, x, w, dy, *arguments, **options):
    """Return the output and both gradients."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = function(x, w, *arguments, **options)
    return y.detach(), *torch.autograd.grad(y, (x, w), dy)


def per_expert(sizes, function):
    """Return `function(e, rows)` of every expert."""
    ends = np.cumsum(sizes)
    return [function(e, slice(end - sizes[e], end)) for e, end in enumerate(ends)]


def operands(rows, experts, d=64, f=96, spread=0.0):
    """Values whose size differs along every dimension, so that each orientation matters."""
    x, w, dy = torch.randn(rows, d), torch.randn(experts, f, d), torch.randn(rows, f)
    for tensor in (x, w, dy):
        for dim in range(tensor.ndim):
            size = [1] * tensor.ndim
            size[dim] = tensor.shape[dim]
            tensor *= torch.exp2(torch.randn(size) * spread)
    return x, w, dy


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    element=st.sampled_from(["e4m3", "e5m2"]),
    grad_element=st.sampled_from(["e4m3", "e5m2"]),
    scale_rule=st.sampled_from(["rceil", "floor"]),
    granularity=st.sampled_from([32, 128]),
)
def test_small_integers_have_exact_products_and_gradients(
    seed, sizes, element, grad_element, scale_rule, granularity
):
    """Integers up to 7 have three significant bits: either format holds them exactly."""
    recipe = MXRecipe(
        element=element,
        grad_element=grad_element,
        scale_rule=scale_rule,
        granularity=granularity,
    )
    g = torch.Generator().manual_seed(seed)
    rows, experts, d, f = sum(sizes), len(sizes), 128, 256
    x, w, dy = (
        torch.randint(-7, 8, shape, generator=g).float()
        for shape in ((rows, d), (experts, f, d), (rows, f))
    )
    y, dx, dw = run(mx_grouped_mm, x, w, dy, offsets(sizes), recipe=recipe)
    x, w, dy = x.double(), w.double(), dy.double()
    assert torch.equal(y.double(), torch.cat(per_expert(sizes, lambda e, r: x[r] @ w[e].T)))
    assert torch.equal(dx.double(), torch.cat(per_expert(sizes, lambda e, r: dy[r] @ w[e])))
    assert torch.equal(dw.double(), torch.stack(per_expert(sizes, lambda e, r: dy[r].T @ x[r])))


@pytest.mark.parametrize(
    "recipe",
    [
        MXRecipe(),
        MXRecipe(element="e5m2"),
        MXRecipe(grad_element="e5m2"),
        MXRecipe(scale_rule="floor"),
        MXRecipe(granularity=128),
    ],
    ids=str,
)
def test_products_are_those_of_the_operands_quantised_by_the_oracle(recipe, oracle):
    """Each along its contraction; the weight gradient from the forward's `x` and `dy` itself."""
    sizes = (5, 0, 9)
    x, w, dy = operands(14, 3, d=128, f=256, spread=2.0)
    y, dx, dw = run(mx_grouped_mm, x, w, dy, offsets(sizes), recipe=recipe)

    def q(tensor, element):
        return oracle.round_trip(tensor, element, recipe.scale_rule, recipe.granularity)

    def q_weights(tensor):
        if recipe.granularity == 32:
            return q(tensor, recipe.element)
        return oracle.round_trip_tiles(tensor, recipe.element, recipe.scale_rule)

    qx, qw_along_d = q(x, recipe.element), q_weights(w)
    qdy, qw_along_f = q(dy, recipe.grad_element), q_weights(w.mT.contiguous()).mT
    expected_y = torch.cat(per_expert(sizes, lambda e, r: qx[r] @ qw_along_d[e].T))
    expected_dx = torch.cat(per_expert(sizes, lambda e, r: qdy[r] @ qw_along_f[e]))
    expected_dw = torch.stack(per_expert(sizes, lambda e, r: dy[r].double().T @ qx[r]))
    for got, expected in ((y, expected_y), (dx, expected_dx), (dw, expected_dw)):
        assert (got - expected).norm() < 1e-6 * expected.norm()  # a float32 sum


@pytest.mark.parametrize(
    ("recipe", "errors"),
    [
        (MXRecipe(), (0.039, 0.039, 0.0275)),
        (MXRecipe(grad_element="e5m2"), (0.039, 0.061, 0.0275)),
        (MXRecipe(granularity=128), (0.039, 0.039, 0.0275)),
    ],
    ids=str,
)
def test_gradients_are_close_to_the_unquantised_ones(recipe, errors):
    """One quantised operand costs 2.7 %, two 3.8 %; no product is off by a factor."""
    sizes = (64, 0, 100, 28)
    x, w, dy = operands(192, 4, d=128, f=256)
    got = run(mx_grouped_mm, x, w, dy, offsets(sizes), recipe=recipe)
    x, w, dy = x.double(), w.double(), dy.double()
    for e, rows in per_expert(sizes, lambda *group: group):
        expected = (x[rows] @ w[e].T, dy[rows] @ w[e], dy[rows].T @ x[rows])
        for result, value, error in zip(
            (got[0][rows], got[1][rows], got[2][e]), expected, errors, strict=True
        ):
            if sizes[e]:
                assert (result - value).norm() / value.norm() < error
                ratio = ((result * value).sum() / value.square().sum()).item()
                assert ratio == pytest.approx(1, abs=0.004)


@pytest.mark.parametrize("granularity", [32, 128])
@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("sizes", [(33, 31, 0, 64, 1), (32, 44, 127), (127, 32, 0, 44)], ids=str)
def test_a_quantised_weight_gradient_shares_no_scale_between_experts(
    sizes, granularity, rule, oracle
):
    """It is that of each expert alone, zero-padded to whole blocks, whoever its neighbours are."""
    total = sum(sizes)
    x, w, dy = operands(total + 5, len(sizes), d=128, f=128)
    ends = torch.tensor(sizes).cumsum(0)
    for rows, magnitude in ((slice(0, ends[0]), 1e4), (slice(ends[0], ends[1]), 1e-2)):
        x[rows] *= magnitude
        dy[rows] *= magnitude
    x[total:], dy[total:] = torch.nan, torch.inf
    recipe = MXRecipe(
        weight_grad="mxfp8", grad_element="e5m2", granularity=granularity, scale_rule=rule
    )
    _, _, dw = run(mx_grouped_mm, x, w, dy, offsets(sizes), recipe=recipe)

    def along_rows(tensor, element):
        spare = -tensor.shape[0] % granularity
        padded = torch.cat([tensor, tensor.new_zeros(spare, tensor.shape[1])])
        values = oracle.round_trip(padded.T.contiguous(), element, rule, granularity)
        return values.T[: tensor.shape[0]]

    def alone(e, rows):
        if sizes[e] == 0:
            return torch.zeros(128, 128).double()
        kept = oracle.round_trip(x[rows], "e4m3", rule, granularity).float()
        return along_rows(dy[rows], "e5m2").T @ along_rows(kept, "e4m3")

    for e, expected in enumerate(per_expert(sizes, alone)):
        assert (dw[e] - expected).norm() <= 1e-6 * expected.norm(), f"expert {e}"


def test_a_block_across_two_experts_would_lose_the_smaller_one():
    """The control: why experts are padded. In blocks of their own its values are 5/512 each."""
    sizes = (33, 31, 0, 64)
    magnitudes = torch.tensor([1e4, 1e-2, 0, 1]).repeat_interleave(torch.tensor(sizes))
    x = magnitudes[:, None].expand(128, 64)
    w, dy = torch.zeros(4, 32, 64), torch.ones(128, 32)
    across = dequantize(quantize(x, dim=0))
    assert (across[33:64] == 0).all()
    _, _, dw = run(mx_grouped_mm, x, w, dy, offsets(sizes), recipe=MXRecipe(weight_grad="mxfp8"))
    assert (dw[1] == 31 * 5 / 512).all()
    assert (dw[2] == 0).all()
    assert (dw[3] == 64).all()


@pytest.mark.parametrize("zero", ["x", "w", "dy"])
@pytest.mark.parametrize("form", ["mx_linear", "mx_grouped_mm"])
@pytest.mark.parametrize(
    "recipe",
    [
        MXRecipe(),
        MXRecipe(granularity=128),
        MXRecipe(element="e5m2", grad_element="e5m2", scale_rule="floor"),
        MXRecipe(weight_grad="mxfp8"),
        MXRecipe(weight_grad="mxfp8", granularity=128),
        MXRecipe(input_grad="high"),
    ],
    ids=str,
)
def test_an_operand_of_zeros_makes_zeros_and_no_nan(recipe, form, zero):
    """A whole tensor of zeros has scales of 2^-127, which nothing may divide by."""
    x, w, dy = operands(40, 1, d=128, f=128)
    {"x": x, "w": w, "dy": dy}[zero].zero_()
    if form == "mx_linear":
        got = run(mx_linear, x, w[0], dy, recipe=recipe)
    else:
        got = run(mx_grouped_mm, x, w, dy, offsets((40,)), recipe=recipe)
    made_of = {"y": "xw", "dx": ("dy", "w"), "dw": ("dy", "x")}
    for (name, sources), value in zip(made_of.items(), got, strict=True):
        assert value.isfinite().all(), name
        assert (value == 0).all() == (zero in sources), name


def test_an_input_gradient_in_high_precision():
    sizes = (5, 0, 9)
    x, w, dy = operands(16, 3)
    dy[14:] = torch.nan
    _, dx, _ = run(mx_grouped_mm, x, w, dy, offsets(sizes), recipe=MXRecipe(input_grad="high"))
    expected = torch.cat(per_expert(sizes, lambda e, r: dy[r].double() @ w[e].double()))
    assert (dx[:14] - expected).norm() < 1e-6 * expected.norm()
    assert (dx[14:] == 0).all()


@pytest.mark.parametrize("sizes", SIZES)
def test_the_tail_is_not_read_and_empty_experts_have_zero_gradients(sizes):
    total, spare = sum(sizes), 7
    x, w, dy = operands(total + spare, len(sizes))
    x[total:], dy[total:] = torch.nan, torch.inf
    y, dx, dw = run(mx_grouped_mm, x, w, dy, offsets(sizes))
    exact = run(mx_grouped_mm, x[:total], w, dy[:total], offsets(sizes))
    for got, expected in zip((y[:total], dx[:total], dw), exact, strict=True):
        assert torch.equal(got, expected)
        assert got.isfinite().all()
    assert torch.equal(y[total:], torch.zeros(spare, 96))
    assert torch.equal(dx[total:], torch.zeros(spare, 64))
    for e, size in enumerate(sizes):
        assert (dw[e] == 0).all() == (size == 0)


def test_each_expert_is_as_if_alone():
    """Values of very different sizes: no scale is shared between experts."""
    sizes = (33, 31, 0, 64)
    x, w, dy = operands(128, 4)
    for rows, magnitude in ((slice(0, 33), 1e4), (slice(33, 64), 1e-2)):
        x[rows] *= magnitude
        dy[rows] *= magnitude
    y, dx, dw = run(mx_grouped_mm, x, w, dy, offsets(sizes))
    for e, rows in per_expert(sizes, lambda *group: group):
        alone = run(mx_linear, x[rows], w[e], dy[rows])
        for got, expected in zip((y[rows], dx[rows], dw[e]), alone, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 5)])
def test_linear_takes_any_leading_dimensions(shape):
    x, w, dy = torch.randn(*shape, 64), torch.randn(96, 64), torch.randn(*shape, 96)
    y, dx, dw = run(mx_linear, x, w, dy)
    assert (y.shape, dx.shape) == (dy.shape, x.shape)
    flat = run(mx_linear, x.reshape(-1, 64), w, dy.reshape(-1, 96))
    for got, expected in zip((y, dx, dw), flat, strict=True):
        assert torch.equal(got, expected.view(got.shape))


def test_weight_gradients_add_up_over_microbatches():
    w = torch.randn(3, 32, 64, requires_grad=True)
    expected = torch.zeros_like(w)
    for sizes in ((4, 3, 0), (0, 2, 5), (1, 0, 0)):
        x, _, dy = operands(sum(sizes), 3, f=32)
        mx_grouped_mm(x, w, offsets(sizes)).backward(dy)
        expected += run(mx_grouped_mm, x, w, dy, offsets(sizes))[2]
    assert w.grad is not None
    assert torch.equal(w.grad, expected)


def test_mixed_dtypes_keep_the_weight_gradient_in_the_dtype_of_the_weight():
    x, w, dy = operands(40, 2)
    x, dy = x.bfloat16(), dy.bfloat16()
    y, dx, dw = run(mx_grouped_mm, x, w, dy, offsets((30, 10)))
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    wide = run(mx_grouped_mm, x.float(), w, dy.float(), offsets((30, 10)))
    assert torch.equal(y, wide[0].bfloat16())
    assert torch.equal(dx, wide[1].bfloat16())
    assert torch.equal(dw, wide[2])  # a bfloat16 sum would differ


def test_autocast_changes_nothing():
    x, w, dy = operands(12, 2)
    plain = run(mx_grouped_mm, x, w, dy, offsets((5, 7)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(mx_grouped_mm, x, w, dy, offsets((5, 7)))
    assert all(map(torch.equal, inside, plain))


def test_strided_operands_are_read_by_value():
    x, w, dy = operands(10, 2)
    expected = run(mx_grouped_mm, x, w, dy, offsets((6, 4)))
    x_strided = torch.full((10, 129), torch.nan)[:, 1::2].copy_(x)
    w_transposed = w.mT.contiguous().mT
    w_offset = torch.full((2, 97, 64), torch.nan)[:, 1:].copy_(w)
    for weight in (w_transposed, w_offset):
        got = run(mx_grouped_mm, x_strided, weight, dy.T.contiguous().T, offsets((6, 4)))
        assert all(map(torch.equal, got, expected))


def test_only_the_gradients_asked_for():
    x, w, _ = operands(3, 1)
    w.requires_grad_()
    mx_linear(x, w[0]).sum().backward()
    assert x.grad is None
    x.requires_grad_()
    mx_linear(x, w[0].detach()).sum().backward()
    assert x.grad is not None
    assert not mx_linear(x.detach(), w[0].detach()).requires_grad


@pytest.mark.parametrize("saved", ["high", "mxfp8"])
@pytest.mark.parametrize("precision", ["high", "mxfp8"])
@pytest.mark.parametrize("granularity", [32, 128])
@pytest.mark.parametrize("form", ["mx_linear", "MXLinear", "mx_grouped_mm"])
def test_saves_the_rows_as_they_were_multiplied_whatever_the_recipe_saves(
    form, granularity, precision, saved
):
    """33 bytes for 32 values. `saved` is for the hidden layer of experts alone."""
    recipe = MXRecipe(
        granularity=granularity, input_grad=precision, weight_grad=precision, saved=saved
    )
    x, w = torch.randn(64, 128, requires_grad=True), torch.randn(1, 128, 128)
    layer = MXLinear.from_linear(torch.nn.Linear(128, 128, bias=False), recipe)
    layer.weight.data.copy_(w[0])
    calls = {
        "mx_linear": lambda: mx_linear(x, w[0], recipe=recipe),
        "MXLinear": lambda: layer(x),
        "mx_grouped_mm": lambda: mx_grouped_mm(x, w, offsets((64,)), recipe=recipe),
    }
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        calls[form]()
    data, scales, weight, ends = kept
    rows = quantize(x, granularity=granularity)
    assert torch.equal(data.view(torch.uint8), rows.data.view(torch.uint8))
    assert torch.equal(scales, rows.scales)
    assert data.nbytes + scales.nbytes == 64 * 128 * 33 // 32
    storages = [t.untyped_storage().data_ptr() for t in (weight, w, layer.weight)]
    assert storages[0] == storages[2 if form == "MXLinear" else 1]
    assert ends.tolist() == [64]


def test_a_weight_edited_before_the_backward_is_noticed():
    x, w, dy = operands(3, 1)
    w.requires_grad_()
    x.requires_grad_()
    y = mx_linear(x, w[0])
    with torch.no_grad():
        w += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_nan_in_a_row_or_its_gradient_stays_visible_and_local():
    x, w, dy = operands(6, 2)
    x[1, 3], dy[4, 70] = torch.nan, torch.nan
    y, dx, dw = run(mx_grouped_mm, x, w, dy, offsets((3, 3)))
    assert y.isnan().all(1).tolist() == y.isnan().any(1).tolist() == [False, True] + [False] * 4
    assert dx.isnan().all(1).tolist() == dx.isnan().any(1).tolist() == [False] * 4 + [True, False]
    assert dw[0, :, :32].isnan().all()
    assert dw[0, :, 32:].isfinite().all()
    assert dw[1, 70].isnan().all()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("element", "fp8", "`element` must be 'e4m3' or 'e5m2', got 'fp8'"),
        ("grad_element", None, "`grad_element` must be 'e4m3' or 'e5m2', got None"),
        ("scale_rule", "even", "`scale_rule` must be 'rceil' or 'floor', got 'even'"),
        ("granularity", 16, "`granularity` must be 32 or 128, got 16"),
        ("input_grad", "bf16", "`input_grad` must be 'mxfp8' or 'high', got 'bf16'"),
        ("weight_grad", "bf16", "`weight_grad` must be 'mxfp8' or 'high', got 'bf16'"),
        ("saved", None, "`saved` must be 'mxfp8' or 'high', got None"),
        ("impl", "triton", "`impl` must be one of .*, got 'triton'"),
    ],
)
def test_recipe_refuses_other_values(field, value, message):
    with pytest.raises(ValueError, match=message):
        MXRecipe(**{field: value})


@pytest.mark.parametrize(
    ("x", "w", "options", "error", "message"),
    [
        ((4, 64), (2, 32, 96), {}, ValueError, r"`x_RD` must be \(R, D\).*\(4, 64\) and \(2, 32"),
        ((4, 64), (32, 64), {}, ValueError, r"`w_EFD` \(E, F, D\), got \(4, 64\) and \(32, 64\)"),
        ((4, 44), (2, 32, 44), {}, ValueError, r"D, `w_EFD.shape\[-1\]`, must be .* got 44; .* 64"),
        ((4, 64), (2, 44, 64), {}, ValueError, r"F, `w_EFD.shape\[-2\]`, must be .* got 44; .* 64"),
        ((4, 64), (2, 128, 64), {"granularity": 128}, ValueError, "D.* multiple of 128.* got 64"),
    ],
)
def test_grouped_operands_that_do_not_fit(x, w, options, error, message):
    with pytest.raises(error, match=message):
        mx_grouped_mm(torch.zeros(x), torch.zeros(w), offsets((2, 2)), recipe=MXRecipe(**options))


def test_linear_operands_that_do_not_fit():
    with pytest.raises(ValueError, match=r"`x` must be \(.., D\) and `w` \(F, D\), got \(4, 32\)"):
        mx_linear(torch.zeros(4, 32), torch.zeros(32, 64))
    with pytest.raises(ValueError, match=r"D, `w.shape\[-1\]`, must be a multiple of 32 .* got 40"):
        mx_linear(torch.zeros(4, 40), torch.zeros(32, 40))
    with pytest.raises(TypeError, match=r"`w` must be float32, bfloat16 or float16, got .*float64"):
        mx_linear(torch.zeros(4, 32), torch.zeros(32, 32).double())
    with pytest.raises(TypeError, match="`x` must be float32"):
        mx_linear(torch.zeros(4, 32).double(), torch.zeros(32, 32))
    with pytest.raises(ValueError, match="`x` and `w` must be on one device, got cpu and meta"):
        mx_linear(torch.zeros(4, 32), torch.zeros(32, 32, device="meta"))
    with pytest.raises(TypeError, match="`offsets_E` must be int32"):
        mx_grouped_mm(torch.zeros(4, 32), torch.zeros(1, 32, 32), torch.tensor([4]))
