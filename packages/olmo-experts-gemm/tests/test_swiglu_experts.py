"""The expert MLP with row weights, with its own product or one of the caller."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_experts_gemm import grouped_mm, swiglu_experts

NAN = float("nan")


def _operands(counts, D, H, tail=0, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows, E = sum(counts) + tail, len(counts)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = {
        "x": normal(rows, D),
        "w_gate_up": normal(E, 2 * H, D) * D**-0.5,
        "w_down": normal(E, D, H) * H**-0.5,
        "row_weights": normal(rows),
    }
    return tensors, normal(rows, D)


def _experts(offsets, **options):
    return lambda x, w_gate_up, w_down, row_weights: swiglu_experts(
        x, w_gate_up, w_down, offsets, row_weights_R=row_weights, **options
    )


def _oracle(oracle, counts):
    return lambda x, w_gate_up, w_down, weights: oracle.swiglu(
        x, w_gate_up, w_down, counts, weights
    )


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    D=st.integers(1, 7),
    H=st.integers(1, 7),
    tail=st.integers(0, 3),
    seed=st.integers(0, 2**31),
    own=st.booleans(),
)
def test_any_counts_and_sizes_give_the_output_and_every_gradient(
    oracle, run, assert_same, counts, D, H, tail, seed, own
):
    tensors, dy = _operands(counts, D, H, tail, seed=seed)
    want = run(_oracle(oracle, counts), tensors, dy, torch.float64)
    rows = sum(counts)
    for name in ("x", "row_weights"):
        tensors[name][rows:] = NAN
    dy[rows:] = NAN
    options = {} if own else {"matmul": grouped_mm}
    got = run(_experts(oracle.ends(counts), **options), tensors, dy, torch.float64)
    assert_same(got, want, 1e-12)
    for name in ("y", "x", "row_weights"):
        assert (got[name][rows:] == 0).all(), name


def test_without_row_weights_every_weight_is_one(oracle, run):
    tensors, dy = _operands([2, 0, 3], 5, 3)
    tensors["row_weights"] = torch.ones(5, dtype=torch.float64)
    offsets = oracle.ends([2, 0, 3])
    want = run(_experts(offsets), tensors, dy, torch.float64)
    del tensors["row_weights"]
    got = run(lambda *args: swiglu_experts(*args, offsets), tensors, dy, torch.float64)
    for name, value in got.items():
        assert torch.equal(value, want[name]), name


def test_gate_comes_first_then_up(oracle):
    x = torch.tensor([[2.0]])
    w_gate_up, w_down = torch.tensor([[[1.0], [3.0]]]), torch.tensor([[[5.0]]])
    y = swiglu_experts(x, w_gate_up, w_down, oracle.ends([1]))
    assert y.item() == pytest.approx(2 / (1 + 2.718281828**-2) * 6 * 5, rel=1e-6)


def test_a_row_of_weight_zero_is_zero_and_its_weight_still_learns(oracle, run, assert_same):
    counts = [2, 1]
    tensors, dy = _operands(counts, 4, 3)
    tensors["row_weights"][1] = 0.0
    got = run(_experts(oracle.ends(counts)), tensors, dy, torch.float64)
    want = run(_oracle(oracle, counts), tensors, dy, torch.float64)
    assert_same(got, want, 1e-12)
    assert (got["y"][1] == 0).all()
    assert (got["x"][1] == 0).all()
    assert got["row_weights"][1] != 0


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("counts", [[0], [0, 0, 0]])
def test_without_any_row_every_gradient_exists_and_is_zero(oracle, run, impl, counts):
    tensors, dy = _operands(counts, 8, 4, dtype=torch.float32)
    got = run(_experts(oracle.ends(counts), impl=impl), tensors, dy, torch.float32)
    assert got["y"].shape == (0, 8)
    assert got["w_down"].shape == (len(counts), 8, 4)
    assert all((value == 0).all() for value in got.values())


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_errs_at_most_twice_as_much_as_plain_torch(
    oracle, run, assert_twice_as_good, impl, dtype
):
    counts = [31, 0, 33]
    tensors, dy = _operands(counts, 48, 32, dtype=dtype)

    def plain(x, w_gate_up, w_down, weights):
        parts = []
        for rows, up, down in zip(x.split(counts), w_gate_up, w_down, strict=True):
            a, b = (rows @ up.t()).chunk(2, -1)
            parts.append((torch.nn.functional.silu(a) * b) @ down.t())
        return torch.cat(parts) * weights[:, None]

    exact = run(_oracle(oracle, counts), tensors, dy, torch.float64)
    got = run(_experts(oracle.ends(counts), impl=impl), tensors, dy, dtype)
    assert_twice_as_good(got, run(plain, tensors, dy, dtype), exact)


def test_float32_row_weights_on_bfloat16_rows_round_once(oracle):
    tensors, dy = _operands([40, 24], 48, 32, dtype=torch.bfloat16)
    weights = torch.rand(64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    x, w_gate_up, w_down, _ = tensors.values()
    offsets = oracle.ends([40, 24])
    unweighted = swiglu_experts(x, w_gate_up, w_down, offsets)
    y = swiglu_experts(x, w_gate_up, w_down, offsets, row_weights_R=weights)
    y.backward(dy)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, (unweighted.double() * weights[:, None].double()).to(torch.bfloat16))
    want = (dy.double() * unweighted.double()).sum(1)
    assert weights.grad.dtype == torch.float32
    torch.testing.assert_close(weights.grad.double(), want, rtol=1e-5, atol=1e-5)


class _Careless(torch.autograd.Function):
    """A product that multiplies all rows, whatever they hold, and leaves rubbish past the end."""

    @staticmethod
    def forward(ctx, x, w, offsets):
        ctx.save_for_backward(x, w, offsets)
        y = grouped_mm(x, w, offsets)
        assert x.isfinite().all(), "rows past the end reached the product"
        y[offsets[-1] :] = NAN
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, offsets = ctx.saved_tensors
        assert (dy[offsets[-1] :] == 0).all(), "gradients past the end reached the product"
        with torch.enable_grad():
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            dx, dw = torch.autograd.grad(grouped_mm(x, w, offsets), (x, w), dy)
        dx[offsets[-1] :] = NAN
        return dx, dw, None


def test_a_careless_product_is_kept_from_the_rows_past_the_end(oracle, run, assert_same):
    counts = [3, 0, 2]
    tensors, dy = _operands(counts, 5, 4, tail=7)
    want = run(_oracle(oracle, counts), tensors, dy, torch.float64)
    tensors["x"][5:], tensors["row_weights"][5:], dy[5:] = NAN, NAN, NAN
    got = run(_experts(oracle.ends(counts), matmul=_Careless.apply), tensors, dy, torch.float64)
    assert_same(got, want, 1e-12)
    for name in ("y", "x", "row_weights"):
        assert (got[name][5:] == 0).all(), name


def test_what_is_held_for_backward_is_what_the_docstring_says(oracle):
    counts, D, H = [3, 0, 4], 8, 4
    tensors, _ = _operands(counts, D, H, dtype=torch.float32)
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    inputs = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in inputs:
            held[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = _experts(oracle.ends(counts))(*leaves)
    rows = sum(counts)
    assert y.requires_grad
    assert sum(held.values()) == rows * (4 * H + D) + rows, held  # and one weight a row


ACTIVATIONS = ["swiglu", "geglu", "relu_squared", "clamped_swiglu"]
IMPLS = ["reference", "torch"]


def _biased(counts, D, H, activation, tail=0, dtype=torch.float64):
    """Operands with biases in the order x, stacks, row weights, biases; large for the clamps."""
    tensors, dy = _operands(counts, D, H, tail, dtype)
    generator, E = torch.Generator().manual_seed(9), len(counts)
    if activation == "relu_squared":
        tensors["w_gate_up"] = tensors["w_gate_up"][:, :H].contiguous()
    if activation == "clamped_swiglu":
        tensors["w_gate_up"] *= 6
    for name, width in (("b_gate_up", tensors["w_gate_up"].shape[1]), ("b_down", D)):
        tensors[name] = torch.randn(E, width, generator=generator, dtype=torch.float64).to(dtype)
    return tensors, dy


def _with_biases(offsets, **options):
    return lambda x, w_gate_up, w_down, row_weights, b_gate_up, b_down: swiglu_experts(
        x,
        w_gate_up,
        w_down,
        offsets,
        row_weights_R=row_weights,
        b_gate_up_E2H=b_gate_up,
        b_down_ED=b_down,
        **options,
    )


@pytest.mark.parametrize("product", ["reference", "matmul"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases_give_the_output_and_every_gradient(
    oracle, run, assert_same, activation, product
):
    counts = [3, 0, 9, 1]
    tensors, dy = _biased(counts, 5, 3, activation, tail=4)
    want = run(
        lambda x, up, down, weights, *biases: oracle.swiglu(
            x, up, down, counts, weights, *biases, activation=activation
        ),
        tensors,
        dy,
        torch.float64,
    )
    tensors["x"][13:], tensors["row_weights"][13:], dy[13:] = NAN, NAN, NAN
    options = {"matmul": grouped_mm} if product == "matmul" else {"impl": product}
    function = _with_biases(oracle.ends(counts), activation=activation, **options)
    got = run(function, tensors, dy, torch.float64)
    assert_same(got, want, 1e-12)
    for name in ("y", "x", "row_weights"):
        assert (got[name][13:] == 0).all(), name
    for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
        assert (got[name][1] == 0).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_gives_what_the_reference_gives(oracle, run, assert_same, activation, dtype):
    counts = [30, 0, 34]
    tensors, dy = _biased(counts, 16, 8, activation, dtype=dtype)
    offsets = oracle.ends(counts)
    want, got = (
        run(_with_biases(offsets, activation=activation, impl=impl), tensors, dy, dtype)
        for impl in IMPLS
    )
    assert_same(got, want, {torch.float32: 1e-6, torch.float16: 1e-2}.get(dtype, 5e-2))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases_have_derivatives_of_any_order(oracle, activation):
    tensors, dy = _biased([2, 0, 1], 3, 2, activation, tail=1)
    tensors["w_gate_up"] /= 6 if activation == "clamped_swiglu" else 1  # away from the clamps
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    function = _with_biases(oracle.ends([2, 0, 1]), activation=activation)
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, (dy.requires_grad_(),))


@pytest.mark.parametrize("impl", IMPLS)
def test_main_grads_take_two_microbatches_that_are_both_alive(oracle, run, impl):
    batches = [[3, 0, 4], [2, 5, 0]]
    offsets = [oracle.ends(counts) for counts in batches]
    tensors, dy = _biased(batches[0], 8, 4, "swiglu", dtype=torch.float32)
    parts = [run(_with_biases(ends, impl=impl), tensors, dy, torch.float32) for ends in offsets]
    buffers = tuple(torch.zeros_like(tensors[name]) for name in ("w_gate_up", "w_down"))
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    live = [_with_biases(ends, impl=impl, main_grads=buffers)(*leaves.values()) for ends in offsets]
    for y in live:
        y.backward(dy)
    for name, buffer in zip(("w_gate_up", "w_down"), buffers, strict=True):
        assert leaves[name].grad is None
        assert torch.equal(buffer, parts[0][name] + parts[1][name])
    for name in ("x", "row_weights", "b_gate_up", "b_down"):
        assert torch.equal(leaves[name].grad, parts[0][name] + parts[1][name])


class _Packer:
    def __init__(self):
        self.shapes, self.unpacked = [], 0

    def pack(self, tensor):
        self.shapes.append(tuple(tensor.shape))
        return tensor.numpy().copy()

    def unpack(self, packed):
        self.unpacked += 1
        return torch.from_numpy(packed)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_packer_is_given_the_rows_and_the_hidden_layer_alone(
    oracle, run, assert_same, impl, activation
):
    counts, D, H = [3, 0, 4], 8, 4
    tensors, dy = _biased(counts, D, H, activation, dtype=torch.float32)
    packer, options = _Packer(), {"activation": activation, "impl": impl}
    want = run(_with_biases(oracle.ends(counts), **options), tensors, dy, torch.float32)
    got = run(_with_biases(oracle.ends(counts), pack=packer, **options), tensors, dy, torch.float32)
    # The packer closes the gaps between rows, and torch's gelu rounds otherwise without gaps.
    assert_same(got, want, 1e-6)
    # The square and the relu before it save one tensor: packed once, asked for twice.
    assert packer.unpacked == len(packer.shapes) + (activation == "relu_squared")
    assert packer.shapes[0] == (7, D)
    assert set(packer.shapes[1:]) == {(7, H)}


def test_a_packer_that_returns_something_else_is_refused(oracle):
    tensors, dy = _operands([3, 0, 4], 8, 4, dtype=torch.float32)
    packer = _Packer()
    packer.unpack = lambda packed: torch.from_numpy(packed).double()
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    y = _experts(oracle.ends([3, 0, 4]), pack=packer)(*leaves)
    with pytest.raises(ValueError, match=r"`pack.unpack` must return float32 .*, got float64"):
        y.backward(dy)
