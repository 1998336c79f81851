"""`mx_swiglu_experts` and `MXExperts`: against the parts they are made of, and by measure."""

import copy

import pytest
import torch
from olmo_mxfp8 import (
    MXExperts,
    MXRecipe,
    dequantize,
    mx_grouped_mm,
    mx_swiglu_experts,
    quantize,
    swiglu_quantize,
    swiglu_quantize_backward,
)

D, H = 128, 256
SIZES = (33, 0, 31, 7)


def offsets(sizes=SIZES):
    return torch.tensor(sizes).cumsum(0).int()


def operands(spare=0, sizes=SIZES):
    rows, experts = sum(sizes) + spare, len(sizes)
    g = torch.Generator().manual_seed(0)
    shapes = ((rows, D), (experts, 2 * H, D), (experts, D, H))
    x, up, down = (torch.randn(shape, generator=g) for shape in shapes)
    weights, dy = torch.rand(rows, generator=g), torch.randn(rows, D, generator=g)
    return x, up / D**0.5, down / H**0.5, weights, dy


def run(x, up, down, weights, dy, sizes=SIZES, **options):
    """Return the output and the gradients of rows, both weights and row weights."""
    leaves = [t.detach().requires_grad_() for t in (x, up, down, weights)]
    y = mx_swiglu_experts(
        leaves[0], leaves[1], leaves[2], offsets(sizes), row_weights_R=leaves[3], **options
    )
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def in_high_precision(x, up, down, weights, dy, sizes=SIZES):
    leaves = [t.detach().double().requires_grad_() for t in (x, up, down, weights)]
    parts, start = [], 0
    for e, size in enumerate(sizes):
        rows = leaves[0][start : start + size]
        gate, upper = (rows @ leaves[1][e].T).chunk(2, dim=-1)
        act = torch.nn.functional.silu(gate) * upper * leaves[3][start : start + size, None]
        parts.append(act @ leaves[2][e].T)
        start += size
    y = torch.cat(parts)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.double())


@pytest.mark.parametrize(
    ("recipe", "limits"),
    [
        (MXRecipe(), (0.071, 0.072, 0.072, 0.065, 0.083)),
        (MXRecipe(granularity=128), (0.071, 0.072, 0.072, 0.065, 0.083)),
        (MXRecipe(saved="mxfp8"), (0.071, 0.080, 0.079, 0.077, 0.102)),
        (MXRecipe(input_grad="high"), (0.071, 0.046, 0.053, 0.065, 0.065)),
        (MXRecipe(weight_grad="mxfp8"), (0.071, 0.072, 0.072, 0.071, 0.083)),
        (MXRecipe(grad_element="e5m2"), (0.071, 0.101, 0.099, 0.065, 0.103)),
    ],
    ids=str,
)
def test_it_is_close_to_high_precision(recipe, limits):
    """A product of two operands costs 3.8 %; each further one that is rounded adds 2.7 %."""
    problem = operands()
    names = ("y", "dx", "dw_up", "dw_down", "d_weights")
    want = in_high_precision(*problem)
    for name, got, expected, limit in zip(
        names, run(*problem, recipe=recipe), want, limits, strict=True
    ):
        assert (got - expected).norm() < limit * expected.norm(), name
        ratio = ((got * expected).sum() / expected.square().sum()).item()
        assert ratio == pytest.approx(1, abs=0.03 if name == "d_weights" else 0.01), name


@pytest.mark.parametrize("granularity", [32, 128])
@pytest.mark.parametrize("saved", ["high", "mxfp8"])
def test_it_is_the_parts_it_is_made_of(granularity, saved):
    """Every product and every quantisation, from the public functions, bit for bit."""
    x, up, down, weights, dy = operands()
    recipe = MXRecipe(granularity=granularity, saved=saved)
    got = run(x, up, down, weights, dy, recipe=recipe)

    rows = {"granularity": granularity}
    hidden = mx_grouped_mm(x, up, offsets(), recipe=recipe)
    act = swiglu_quantize(hidden, row_weights_R=weights, **rows)
    # An activation that is quantised already quantises to itself.
    y = mx_grouped_mm(dequantize(act), down, offsets(), recipe=recipe)
    kept = dequantize(quantize(hidden, **rows)) if saved == "mxfp8" else hidden
    act = dequantize(swiglu_quantize(kept, row_weights_R=weights, **rows)).requires_grad_()
    down = down.requires_grad_()
    d_act, d_down = torch.autograd.grad(
        mx_grouped_mm(act, down, offsets(), recipe=recipe), (act, down), dy
    )
    dh, d_weights = swiglu_quantize_backward(d_act, kept, row_weights_R=weights, **rows)
    x, up = x.requires_grad_(), up.requires_grad_()
    dx, d_up = torch.autograd.grad(
        mx_grouped_mm(x, up, offsets(), recipe=recipe), (x, up), dequantize(dh)
    )
    want = (y, dx, d_up, d_down, d_weights)
    names = ("y", "dx", "dw_up", "dw_down", "d_weights")
    for name, value, expected in zip(names, got, want, strict=True):
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("recipe", [MXRecipe(), MXRecipe(input_grad="high")], ids=str)
@pytest.mark.parametrize("sizes", [SIZES, (0, 5, 0), (0, 0), (1,)])
def test_the_tail_reaches_nothing_and_empty_experts_have_zero_gradients(recipe, sizes):
    spare, total = 5, sum(sizes)
    x, up, down, weights, dy = operands(spare, sizes)
    x[total:], weights[total:], dy[total:] = torch.nan, torch.nan, torch.inf
    got = run(x, up, down, weights, dy, sizes, recipe=recipe)
    short = (x[:total], up, down, weights[:total], dy[:total])
    want = run(*short, sizes, recipe=recipe)
    for i in (0, 1, 4):
        assert torch.equal(got[i][:total], want[i])
        assert (got[i][total:] == 0).all()
    for i in (2, 3):
        assert torch.equal(got[i], want[i])
        for e, size in enumerate(sizes):
            assert (got[i][e] == 0).all() == (size == 0)


@pytest.mark.parametrize("zero", ["x", "up", "down", "weights", "dy"])
@pytest.mark.parametrize(
    "recipe",
    [
        MXRecipe(),
        MXRecipe(granularity=128, saved="mxfp8"),
        MXRecipe(weight_grad="mxfp8", grad_element="e5m2"),
        MXRecipe(input_grad="high"),
    ],
    ids=str,
)
def test_an_operand_of_zeros_makes_zeros_and_no_nan(recipe, zero):
    """Whatever is a product with it is 0, and the rest is as finite as without."""
    problem = dict(zip(("x", "up", "down", "weights", "dy"), operands(), strict=True))
    problem[zero].zero_()
    got = run(*problem.values(), recipe=recipe)
    # Of zeros in x the hidden layer is 0, and so is the slope of silu(gate) up.
    zeros = {
        "x": {"y", "dx", "dw_up", "dw_down", "d_weights"},
        "up": {"y", "dx", "dw_up", "dw_down", "d_weights"},
        "down": {"y", "dx", "dw_up", "d_weights"},
        "weights": {"y", "dx", "dw_up", "dw_down"},
        "dy": {"dx", "dw_up", "dw_down", "d_weights"},
    }[zero]
    for name, value in zip(("y", "dx", "dw_up", "dw_down", "d_weights"), got, strict=True):
        assert value.isfinite().all(), name
        assert (value == 0).all() == (name in zeros), name


def test_only_the_gradients_asked_for():
    x, up, down, weights, dy = operands()
    full = run(x, up, down, weights, dy)
    for at in range(4):
        leaves = [t.detach() for t in (x, up, down, weights)]
        leaves[at].requires_grad_()
        y = mx_swiglu_experts(*leaves[:3], offsets(), row_weights_R=leaves[3])
        (gradient,) = torch.autograd.grad(y, leaves[at], dy)
        assert torch.equal(gradient, full[1 + at])
    plain = mx_swiglu_experts(x, up, down, offsets())
    assert torch.equal(
        plain, mx_swiglu_experts(x, up, down, offsets(), row_weights_R=torch.ones(71))
    )
    assert not plain.requires_grad


@pytest.mark.parametrize(("saved", "of_hidden"), [("high", 2.0), ("mxfp8", 33 / 32)])
def test_what_is_held_for_backward(saved, of_hidden):
    x, up, down, weights, _ = (t.bfloat16() for t in operands())
    x.requires_grad_()
    held = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: held.setdefault(t.data_ptr(), t), lambda t: t
    ):
        mx_swiglu_experts(
            x, up, down, offsets(), row_weights_R=weights, recipe=MXRecipe(saved=saved)
        )
    given = {t.data_ptr() for t in (up, down, weights)}
    activations = sum(t.nbytes for at, t in held.items() if at not in given)
    R = x.shape[0]
    assert activations == R * D * 33 / 32 + R * 2 * H * of_hidden + 4 * len(SIZES)


def test_dtypes():
    x, up, down, weights, dy = operands()
    got = run(x.bfloat16(), up, down.half(), weights.bfloat16(), dy.bfloat16())
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
    assert [t.dtype for t in got] == dtypes


class TestModule:
    @staticmethod
    def module(**options):
        torch.manual_seed(1)
        return MXExperts(len(SIZES), D, H, **options)

    def test_it_is_the_function(self):
        x, _, _, weights, _ = operands()
        recipe = MXRecipe(granularity=128, saved="mxfp8")
        experts = self.module(recipe=recipe)
        y = experts(x, offsets(), row_weights_R=weights)
        w = (experts.w_gate_up_E2HD, experts.w_down_EDH)
        want = mx_swiglu_experts(x, *w, offsets(), row_weights_R=weights, recipe=recipe)
        assert torch.equal(y, want)
        assert f"d_hidden={H}, recipe={recipe}" in repr(experts)

    @pytest.mark.parametrize("cached", [False, True])
    def test_state_dicts_hold_the_parameters_in_high_precision_alone(self, cached):
        state = self.module(cached=cached).state_dict()
        assert {name: w.dtype for name, w in state.items()} == {
            "w_gate_up_E2HD": torch.float32,
            "w_down_EDH": torch.float32,
        }
        assert (state["w_gate_up_E2HD"].abs() <= D**-0.5).all()
        assert (state["w_down_EDH"].abs() <= H**-0.5).all()

    def test_caches_give_the_same_numbers_and_are_renewed_by_load_and_move(self):
        x, *_, dy = operands()
        plain, cached = self.module(), self.module(cached=True)
        assert "cached=True" in repr(cached)
        for _ in range(2):
            results = []
            for module in (plain, cached, copy.deepcopy(cached), copy.deepcopy(plain)):
                module.zero_grad()
                module(x, offsets()).backward(dy)
                results.append([p.grad for p in module.parameters()])
            for other in results[1:]:
                assert all(map(torch.equal, results[0], other))
            state = {name: torch.randn_like(w) for name, w in plain.state_dict().items()}
            plain.load_state_dict(state)
            cached.load_state_dict(state)
        moved = cached.to(torch.bfloat16)
        assert torch.equal(moved(x, offsets()), plain.to(torch.bfloat16)(x, offsets()))

    def test_the_module_takes_zeros(self):
        """As the function does, from parameters that are all 0 to a whole batch of zeros."""
        module = self.module()
        x, _, _, weights, dy = operands()
        for parameter in module.parameters():
            torch.nn.init.zeros_(parameter)
        module(x.requires_grad_(), offsets(), row_weights_R=weights).backward(dy)
        for tensor in (x, *module.parameters()):
            assert (tensor.grad == 0).all()

    def test_eval_and_train_leave_the_caches_as_they_are(self):
        x, *_ = operands()
        module = self.module(cached=True)
        caches, y = dict(module.caches), module(x, offsets())
        for mode in (module.eval, module.train):
            assert torch.equal(mode()(x, offsets()), y)
            assert dict(module.caches) == caches
        with torch.no_grad():
            module.eval().w_down_EDH.mul_(2)
        for mode in (module.train, module.eval):
            with pytest.raises(RuntimeError, match="this `WeightCache` is stale"):
                mode()(x, offsets())
        module.refresh()
        assert torch.equal(module(x, offsets()), 2 * y)

    def test_a_step_without_refresh_is_an_error(self):
        x, *_ = operands()
        module = self.module(cached=True)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(x, offsets()).square().mean().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="this `WeightCache` is stale"):
            module(x, offsets())
        module.refresh()
        fresh = self.module()
        fresh.load_state_dict(module.state_dict())
        assert torch.equal(module(x, offsets()), fresh(x, offsets()))
        module.reset_parameters(torch.Generator().manual_seed(3))
        module(x, offsets())

    def test_bad_sizes_are_refused(self):
        with pytest.raises(ValueError, match="`num_experts` must be at least 1, got 0"):
            MXExperts(0, 64, 64)
        with pytest.raises(ValueError, match=r"`d_model` must be a multiple of 32 .* got 40"):
            MXExperts(2, 40, 64)
        with pytest.raises(ValueError, match=r"`d_hidden` must be a multiple of 128 .* got 64"):
            MXExperts(2, 128, 64, recipe=MXRecipe(granularity=128))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({0: torch.zeros(9, 96)}, ValueError, r"`x_RD` must be \(R, D\) and .*\(9, 96\)"),
        ({1: torch.zeros(4, 2 * H, D).double()}, TypeError, "`w_gate_up_E2HD` must be float32"),
        ({2: torch.zeros(4, D, 64)}, ValueError, r"`w_down_EDH` must be \(E, D, H\)"),
        ({3: torch.zeros(3)}, ValueError, r"one weight a row, \(71,\), got \(3,\)"),
        ({2: torch.zeros(4, D, H, device="meta")}, ValueError, "`w_down_EDH` must be on the"),
        (
            {1: torch.zeros(4, 96, D), 2: torch.zeros(4, D, 48)},
            ValueError,
            r"D, `w_down_EDH.shape\[-1\]`, must be a multiple of 32 .* got 48",
        ),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(changes, error, message):
    arguments = list(operands()[:4])
    for at, tensor in changes.items():
        arguments[at] = tensor
    with pytest.raises(error, match=message):
        mx_swiglu_experts(*arguments[:3], offsets(), row_weights_R=arguments[3])


def test_bad_offsets_are_refused():
    x, up, down, *_ = operands()
    with pytest.raises(ValueError, match="`offsets_E` must ascend"):
        mx_swiglu_experts(x, up, down, torch.tensor([5, 4, 3, 2]).int())
    with pytest.raises(TypeError, match="`offsets_E` must be int32"):
        mx_swiglu_experts(x, up, down, torch.tensor([1, 2, 3, 4]))
