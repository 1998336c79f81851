"""The module: names, init, and that it is `swiglu_experts` with its own weights."""

from types import SimpleNamespace

import pytest
import torch
from olmo_experts_gemm import Experts, grouped_mm, moe_mlp, swiglu_experts


def _rows(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(9, 8, generator=generator).to(dtype), torch.rand(9, generator=generator)


def test_state_dict_holds_the_two_stacks():
    experts = Experts(3, 8, 4)
    shapes = {name: tuple(value.shape) for name, value in experts.state_dict().items()}
    assert shapes == {"w_gate_up_E2HD": (3, 8, 8), "w_down_EDH": (3, 8, 4)}
    other = Experts(3, 8, 4)
    other.load_state_dict(experts.state_dict())
    rows, weights = _rows()
    offsets = torch.tensor([2, 2, 7], dtype=torch.int32)
    assert torch.equal(
        experts(rows, offsets, row_weights_R=weights), other(rows, offsets, row_weights_R=weights)
    )


@pytest.mark.parametrize("options", [{}, {"impl": "torch"}, {"matmul": grouped_mm}])
def test_forward_is_the_function(options):
    experts = Experts(3, 8, 4, **options)
    rows, weights = _rows()
    offsets = torch.tensor([2, 2, 7], dtype=torch.int32)
    stacks = (experts.w_gate_up_E2HD, experts.w_down_EDH)
    for row_weights in (None, weights):
        got = experts(rows, offsets, row_weights_R=row_weights)
        want = swiglu_experts(rows, *stacks, offsets, row_weights_R=row_weights, **options)
        assert torch.equal(got, want)
        gradients = torch.autograd.grad(got.sum(), stacks)
        for a, b in zip(gradients, torch.autograd.grad(want.sum(), stacks), strict=True):
            assert torch.equal(a, b)


def test_init_is_uniform_within_the_inner_width_and_repeatable():
    experts = Experts(4, 64, 16, dtype=torch.float64)
    for weight in experts.parameters():
        bound = weight.shape[-1] ** -0.5
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert abs(weight.mean().item()) < 0.05 * bound
    values = []
    for seed in (1, 1, 2):
        experts.reset_parameters(torch.Generator().manual_seed(seed))
        values.append([weight.detach().clone() for weight in experts.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(values[0], values[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(values[0], values[2], strict=True))


def test_parameters_are_made_where_and_as_asked():
    experts = Experts(2, 8, 4, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in experts.parameters()} == {("meta", torch.bfloat16)}
    experts = experts.to_empty(device="cpu")
    experts.reset_parameters()
    rows, _ = _rows(torch.bfloat16)
    y = experts(rows, torch.tensor([4, 9], dtype=torch.int32))
    assert y.dtype == torch.bfloat16
    assert y.isfinite().all()


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu_squared", "clamped_swiglu"])
def test_activation_and_biases_reach_the_function(activation):
    experts = Experts(3, 8, 4, activation=activation, bias=True)
    width = 4 if activation == "relu_squared" else 8
    shapes = {name: tuple(value.shape) for name, value in experts.state_dict().items()}
    biases = {"b_gate_up_E2H": (3, width), "b_down_ED": (3, 8)}
    assert shapes == {"w_gate_up_E2HD": (3, width, 8), "w_down_EDH": (3, 8, 4), **biases}
    rows, weights = _rows()
    offsets = torch.tensor([2, 2, 7], dtype=torch.int32)
    buffers = tuple(torch.zeros_like(w) for w in (experts.w_gate_up_E2HD, experts.w_down_EDH))
    got = experts(rows, offsets, row_weights_R=weights, main_grads=buffers)
    want = swiglu_experts(
        rows,
        *(experts.w_gate_up_E2HD, experts.w_down_EDH, offsets),
        row_weights_R=weights,
        activation=activation,
        **{name: getattr(experts, name) for name in biases},
    )
    assert torch.equal(got, want)
    got.sum().backward()
    gradients = torch.autograd.grad(want.sum(), list(experts.parameters()))
    results = (*buffers, experts.b_gate_up_E2H.grad, experts.b_down_ED.grad)
    for result, gradient in zip(results, gradients, strict=True):
        assert torch.equal(result, gradient)
    assert experts.w_down_EDH.grad is None


@pytest.mark.parametrize("options", [{}, {"impl": "torch"}, {"matmul": grouped_mm}])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu_squared", "clamped_swiglu"])
def test_moe_is_moe_mlp_with_all_that_the_module_holds(activation, options):
    experts = Experts(3, 8, 4, activation=activation, bias=True, **options)
    x = _rows()[0].requires_grad_()
    ids = torch.tensor([[0, 2], [2, -1], [1, 0]] * 3)
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    parameters = dict(experts.named_parameters())
    settings = {name: parameters[name] for name in ("b_gate_up_E2H", "b_down_ED")}
    want = moe_mlp(
        *(x, ids, weights, experts.w_gate_up_E2HD, experts.w_down_EDH),
        activation=activation,
        **settings,
        **options,
    )
    got = experts.moe(x, ids, weights)
    assert torch.equal(got, want)
    leaves = (x, weights, *parameters.values())
    pairs = zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (got, want)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_moe_hands_on_main_grads_and_a_packer():
    experts, seen = Experts(3, 8, 4), []
    packer = SimpleNamespace(pack=lambda t: seen.append(t.shape) or t, unpack=lambda t: t)
    buffers = tuple(torch.zeros_like(w) for w in experts.parameters())
    ids = torch.tensor([[0, 2], [2, -1], [1, 0]] * 3)
    arguments = (_rows()[0], ids, torch.ones(9, 2))
    want = torch.autograd.grad(experts.moe(*arguments).sum(), list(experts.parameters()))
    experts.moe(*arguments, main_grads=buffers, pack=packer).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(buffers, want, strict=True))
    assert experts.w_down_EDH.grad is None
    assert seen[0] == (18, 8)
    taken = Experts(3, 8, 4, matmul=grouped_mm)
    for options in ({"main_grads": buffers}, {"pack": packer}):
        with pytest.raises(ValueError, match="must stay None when `matmul` is given"):
            taken.moe(*arguments, **options)


def test_biases_are_drawn_after_the_stacks_and_within_their_bounds():
    plain, biased = Experts(4, 64, 16), Experts(4, 64, 16, bias=True)
    for experts in (plain, biased):
        experts.reset_parameters(torch.Generator().manual_seed(1))
    assert torch.equal(plain.w_down_EDH, biased.w_down_EDH)
    assert 0.9 * 64**-0.5 < biased.b_gate_up_E2H.abs().max() <= 64**-0.5
    assert 0.9 * 16**-0.5 < biased.b_down_ED.abs().max() <= 16**-0.5


def test_print_shows_the_sizes():
    experts = Experts(3, 8, 4, activation="geglu", bias=True)
    assert repr(experts).endswith("d_hidden=4, activation='geglu', bias=True)")
    assert repr(Experts(3, 8, 4)) == "Experts(num_experts=3, d_model=8, d_hidden=4)"
