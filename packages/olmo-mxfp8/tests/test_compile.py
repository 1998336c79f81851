"""`torch.compile` around the differentiable products: bitwise the eager result and gradients."""

import subprocess
import sys

import pytest
import torch
from olmo_mxfp8 import (
    MXLinear,
    MXPacker,
    MXRecipe,
    mx_grouped_mm,
    mx_linear,
    quantize,
    scaled_grouped_mm,
)

BACKENDS = ["eager", "aot_eager"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ENDS = [[3, 3, 7], [0, 0, 0], [9, 10, 11]]  # of three steps with 11 rows
# The compiler warns of itself: it instantiates the class that it traces, and after a graph break it
# asks any tensor for `grad`.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Function.* should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(function, x, w, *arguments):
    """Return the output and both gradients; the op stands between others, as in a model."""
    torch.manual_seed(1)
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = function(x, w, *arguments)
    dx, dw = torch.autograd.grad(y, (x, w), torch.randn_like(y))
    return y.detach(), dx, dw


def assert_same(got, want):
    for name, value, expected in zip(("y", "dx", "dw"), got, want, strict=True):
        assert torch.equal(value, expected), name
        assert value.dtype == expected.dtype


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)],
)
def test_mx_linear_is_one_graph_and_equals_eager(x_dtype, w_dtype, backend):
    recipe = MXRecipe(grad_element="e5m2")

    def layer(x, w):
        return mx_linear(x * 2, w * 3, recipe=recipe) + 1

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x, w = torch.randn(2, 3, 64, dtype=x_dtype), torch.randn(32, 64, dtype=w_dtype)
    got = run(compiled, x, w)
    assert_same(got, run(layer, x, w))
    assert all(value.abs().sum() > 0 for value in got)


def test_mx_linear_with_other_numbers_of_rows_equals_eager():
    compiled = torch.compile(mx_linear, backend="eager", fullgraph=True)
    w = torch.randn(32, 64)
    for rows in (5, 3, 0):
        x = torch.randn(rows, 64)
        assert_same(run(compiled, x, w), run(mx_linear, x, w))


@pytest.mark.parametrize("bias", [False, True])
def test_mx_linear_module_is_one_graph_and_equals_eager(bias):
    layer = MXLinear(64, 32, bias=bias)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for forward in (compiled, layer):
        x = torch.ones(5, 64).cumsum(1).requires_grad_()
        forward(x).sin().sum().backward()
        grads = [x.grad, *(parameter.grad for parameter in layer.parameters())]
        layer.zero_grad(set_to_none=True)
        results.append([grad for grad in grads if grad is not None])
        assert len(results[-1]) == 2 + bias
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
        assert got.abs().sum() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mx_grouped_mm_equals_eager(dtype, backend):
    def layer(x, w, offsets):
        return mx_grouped_mm(x * 2, w * 3, offsets) + 1

    compiled = torch.compile(layer, backend=backend)
    x, w = torch.randn(11, 64, dtype=dtype), torch.randn(3, 32, 64, dtype=dtype)
    for ends in ENDS:
        offsets = torch.tensor(ends, dtype=torch.int32)
        got = run(compiled, x, w, offsets)
        assert_same(got, run(layer, x, w, offsets))
        assert all(value.abs().sum() > 0 for value in got) or ends[-1] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_grouped_mm_equals_eager(backend):
    def layer(x, w, offsets):
        return scaled_grouped_mm(quantize(x), quantize(w), offsets, out_dtype=torch.float32)

    compiled = torch.compile(layer, backend=backend)
    x, w = torch.randn(11, 64), torch.randn(3, 32, 64)
    for ends in ENDS:
        offsets = torch.tensor(ends, dtype=torch.int32)
        assert torch.equal(compiled(x, w, offsets), layer(x, w, offsets))


def test_grouped_products_check_offsets_and_say_why_they_break_the_graph():
    x, w = torch.randn(4, 32), torch.randn(2, 32, 32)
    with pytest.raises(ValueError, match="`offsets_E` must ascend"):
        torch.compile(mx_grouped_mm, backend="eager")(x, w, torch.tensor([5, 4]).int())

    def layer(x, w, offsets):
        return mx_grouped_mm(x, w, offsets) + 1

    fullgraph = torch.compile(layer, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="reads `offsets_E` on the host"):
        fullgraph(x, w, torch.tensor([2, 4]).int())


def test_nothing_imports_the_compiler_without_being_asked():
    program = (
        "import sys, torch, olmo_mxfp8 as m;"
        "m.mx_grouped_mm(torch.ones(4, 32), torch.ones(1, 32, 32), torch.tensor([4]).int());"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_saved_tensors_inside_break_the_graph_and_equal_eager(backend):
    packer = MXPacker()

    def layer(x, w):
        h = x * 2
        with packer.saved_tensors(min_numel=1):
            h = (h * 3) @ w.T
            y = h.sin() + h.view(-1, 2, 16).square().view_as(h)
        return y + 1

    x, w = torch.randn(11, 64), torch.randn(32, 64)
    want = run(layer, x, w)
    got = run(torch.compile(layer, backend=backend), x, w)
    assert_same(got, want)
    one_graph = torch.compile(layer, backend=backend, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="what autograd saves is chosen on"):
        one_graph(x, w)


def test_saved_tensors_around_a_compiled_function_round_its_inputs_alone():
    """What it makes itself may hold values of its weights, and no graph says which does."""
    layer = torch.compile(lambda h, w: (h * 3).sin() @ w.T + h.square().sum(), backend="aot_eager")
    packer, asked = MXPacker(), []

    def rounded(x, w):
        with packer.saved_tensors(min_numel=1, select=lambda t: asked.append(t.grad_fn) or True):
            return layer(x * 2, w)

    x, w = torch.randn(11, 64), torch.randn(32, 64)
    got, want = run(rounded, x, w), run(lambda x, w: layer(x * 2, w), x, w)
    assert {node.name() for node in asked} == {"MulBackward0"}
    assert torch.equal(got[0], want[0])
    assert 0 < (got[1] - want[1]).norm() < 0.1 * want[1].norm()


def test_a_cached_weight_breaks_the_graph_and_stays_the_weight_or_an_error():
    layer = MXLinear(64, 32, cached=True)
    compiled = torch.compile(layer, backend="eager")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(5, 64)
        y = compiled(x)
        assert torch.equal(y, layer(x))
        y.sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="this `WeightCache` is stale"):
            compiled(x)
        layer.refresh()
    torch._dynamo.reset()
    one_graph = torch.compile(layer, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="`WeightCache` reads the version"):
        one_graph(x)
