"""`MXPacker.saved_tensors`: what autograd saves in MXFP8, and what it leaves alone."""

import pytest
import torch
from olmo_mxfp8 import MXLinear, MXPacker, MXRecipe, dequantize, quantize
from olmo_mxfp8._saved_tensors import _COPIES, _JOINS, _VIEWS
from torch import nn
from torch.utils.checkpoint import checkpoint

F = nn.functional
ROWS, WIDTH = 8, 64


def _rounded(x, **options):
    return dequantize(quantize(x, **options), x.dtype)


def _activation(*shape, dtype=torch.float32):
    """Like one of a model: the result of an operation, which a graph leads to."""
    return torch.randn(*shape, dtype=dtype).requires_grad_().mul(1)


def _gradients(function, leaves, *, packer=None, **options):
    """Gradients of a weighted sum, and the tensors of which `select` was asked."""
    asked = []

    def select(tensor):
        asked.append(tensor)
        return True

    if packer is None:
        y = function()
    else:
        with packer.saved_tensors(**{"select": select, "min_numel": 1, **options}):
            y = function()
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return torch.autograd.grad(y, leaves, dy, retain_graph=True), asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_linear_layer_rounds_its_input_alone(dtype):
    layer = nn.Linear(WIDTH, 96).to(dtype)
    x = _activation(2, ROWS, WIDTH, dtype=dtype)
    leaves = (x, layer.weight, layer.bias)
    want, _ = _gradients(lambda: layer(x), leaves)
    got, asked = _gradients(lambda: layer(x), leaves, packer=MXPacker())
    assert [t.numel() for t in asked] == [x.numel()]
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[2], want[2])
    rounded = _rounded(x.detach())
    expected, _ = _gradients(lambda: layer(rounded), [layer.weight])
    assert torch.equal(got[1], expected[0])
    assert not torch.equal(got[1], want[1])


def test_casts_of_parameters_are_parameters():
    layer = nn.Linear(WIDTH, 96)
    x = _activation(ROWS, WIDTH)

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    want, _ = _gradients(run, [x])
    got, asked = _gradients(run, [x], packer=MXPacker())
    assert [t.shape for t in asked] == [x.shape]
    assert torch.equal(got[0], want[0])


def _into_a_buffer(w):
    return torch.empty(WIDTH, WIDTH, dtype=torch.float16).copy_(w).float()


VIEWS = {
    "itself": lambda w: w,
    "turned": lambda w: w.mT,
    "part": lambda w: w[:, :32],
    "reshaped": lambda w: w.unsqueeze(0).transpose(1, 2)[0],
    "packed": lambda w: w.T.contiguous(),
    "cast": lambda w: w.double().float().T,
    "copy": lambda w: w.clone().view(-1).view(WIDTH, WIDTH).permute(1, 0),
    "chunk": lambda w: w.chunk(2)[0].T,
    "split": lambda w: w.half().split([32, 32])[1].T.float(),
    "squeezed": lambda w: w[None].squeeze(0).half().float(),
    "squeezed all": lambda w: w.view(1, WIDTH, 1, WIDTH).squeeze().half().float(),
    "unfolded": lambda w: w.half().unfold(0, 32, 32)[0].float(),
    "unbound": lambda w: w.half()[None].unbind()[0].float(),
    "diagonal": lambda w: w.expand(WIDTH, -1, -1).diagonal().clone(),
    "turned round": lambda w: torch._neg_view(w).clone(),
    "made complex": lambda w: torch.view_as_complex(w.view(WIDTH, 32, 2)).real.repeat(2, 2).T,
    "joined": lambda w: torch.cat([w[:, :32].bfloat16(), torch.ones(WIDTH, 32)], 1).T,
    "stacked": lambda w: torch.stack([w, w.half()])[0],
    "in a buffer": _into_a_buffer,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_and_copies_of_parameters_are_left(view):
    w, x = nn.Parameter(torch.randn(WIDTH, WIDTH)), _activation(ROWS, WIDTH)
    _, asked = _gradients(lambda: x @ view(w), [x, w], packer=MXPacker())
    assert [t.shape for t in asked] == [x.shape]


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_so_are_those_of_frozen_parameters(view):
    w, x = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False), _activation(ROWS, WIDTH)
    assert _gradients(lambda: x @ view(w), [x], packer=MXPacker())[1] == []


def test_every_view_of_torch_is_known():
    """Of each operation that makes views, torch has a second node, for a form that copies."""
    names = dir(torch._C._functions)
    views = {name.removesuffix("Backward0_copy") for name in names if name.endswith("d0_copy")}
    assert {name for name in views if not name.startswith(("Nested", "Test"))} <= _VIEWS
    assert len(views) > 20
    copies = {f"{name}Backward0" for name in _COPIES}
    assert copies | {name.rpartition(":")[2] for name in _JOINS} <= set(names)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_under_autocast_too(view, trained):
    w = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=trained)
    x = _activation(ROWS, WIDTH)

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ view(w)

    want, _ = _gradients(run, [x])
    got, asked = _gradients(run, [x], packer=MXPacker())
    assert [t.shape for t in asked] == [x.shape] * trained
    assert torch.equal(got[0], want[0])


def test_a_copy_that_was_made_without_gradients_is_a_constant():
    w, x = nn.Parameter(torch.randn(WIDTH, WIDTH)), _activation(ROWS, WIDTH)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        copies = w.bfloat16().float(), w.detach() * 1, w.data, w * 2
    for copy in copies:
        want, _ = _gradients(lambda copy=copy: x @ copy, [x])
        got, asked = _gradients(lambda copy=copy: x @ copy, [x], packer=MXPacker())
        assert asked == []
        assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_inputs_are_held_by_others_and_left(needs_gradient):
    x, layer = torch.randn(2, ROWS, WIDTH, requires_grad=needs_gradient), nn.Linear(WIDTH, WIDTH)
    for given in (lambda: x, lambda: x.view(-1, WIDTH), lambda: x.mT.mT, x.bfloat16):
        run = lambda given=given: layer.to(given().dtype)(given())  # noqa: E731
        want, _ = _gradients(run, [layer.weight])
        got, asked = _gradients(run, [layer.weight], packer=MXPacker())
        assert asked == []
        assert torch.equal(got[0], want[0])


def test_what_is_computed_of_parameters_is_an_activation():
    w, x = nn.Parameter(torch.randn(WIDTH, WIDTH)), _activation(ROWS, WIDTH)
    for weight in (w * 2, w.flip(0), torch.cat([w, w * 2])[:WIDTH].clone()):
        _, asked = _gradients(lambda weight=weight: x @ weight, [x], packer=MXPacker())
        assert [t.shape for t in asked if t.shape != x.shape] == [w.shape]


def test_what_attention_saves_for_exponentials_is_left():
    q, k, v = (_activation(1, 2, 64, 32) for _ in range(3))
    run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    asked = _gradients(run, (q, k, v), packer=MXPacker())[1]
    assert {t.shape for t in asked} == {q.shape}


def test_writes_in_place_are_activations():
    def run():
        h = x.clone().mul(2)
        h[:4].exp_()
        return h.square()

    x = _activation(ROWS, WIDTH)
    (got,), asked = _gradients(run, [x], packer=MXPacker())
    assert len(asked) == 2
    (want,), _ = _gradients(run, [x])
    assert (got - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_norms_keep_their_statistics_and_weights(make):
    norm, x = make(WIDTH), _activation(ROWS, WIDTH)
    nn.init.normal_(norm.weight)
    leaves = (x, *norm.parameters())
    want, _ = _gradients(lambda: norm(x), leaves)
    got, asked = _gradients(lambda: norm(x), leaves, packer=MXPacker())
    assert {t.shape for t in asked} == {x.shape}
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 0.05 * b.norm()
    assert not torch.equal(got[1], want[1])


def test_token_ids_and_targets_pass():
    embedding, head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    ids, targets = torch.arange(32), torch.arange(32).flip(0)

    def loss():
        return F.cross_entropy(head(embedding(ids).relu()), targets)[None] + 1

    leaves = (head.bias, head.weight, embedding.weight)
    want, _ = _gradients(loss, leaves)

    def activations(tensor):
        return tensor.grad_fn.name() != "LogSoftmaxBackward0"

    got, _ = _gradients(loss, leaves, packer=MXPacker(), select=activations)
    assert torch.equal(got[0], want[0])  # the log-probabilities are what they were
    assert not torch.equal(got[1], want[1])
    got, _ = _gradients(loss, leaves, packer=MXPacker(), select=lambda tensor: False)
    assert all(map(torch.equal, got, want))
    got, _ = _gradients(loss, leaves, packer=MXPacker())
    assert not torch.equal(got[0], want[0])  # why they had better be left out


@pytest.mark.parametrize("cached", [False, True])
def test_quantised_layers_are_left_as_they_are(cached):
    layer = MXLinear(WIDTH, 96, recipe=MXRecipe(element="e5m2"), cached=cached)
    x = _activation(ROWS, WIDTH)
    want, _ = _gradients(lambda: layer(x), (x, layer.weight))
    got, asked = _gradients(lambda: layer(x), (x, layer.weight), packer=MXPacker())
    assert asked == []
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_inside_starts_from_its_rounded_input(use_reentrant):
    layer, x = nn.Linear(WIDTH, WIDTH, bias=False), _activation(ROWS, WIDTH)
    with MXPacker().saved_tensors(min_numel=1):
        y = checkpoint(lambda x: layer(x * 2), x, use_reentrant=use_reentrant)
    y.sum().backward()
    expected = (2 * _rounded(x.detach())).sum(0).expand(WIDTH, WIDTH)
    torch.testing.assert_close(layer.weight.grad, expected)


def test_a_checkpoint_around_rounds_what_is_rounded_without_it():
    layer, x = nn.Linear(WIDTH, WIDTH), _activation(ROWS, WIDTH)

    def rounded():
        with MXPacker().saved_tensors(min_numel=1):
            return layer(x * 2)

    around = lambda: checkpoint(rounded, use_reentrant=False)  # noqa: E731
    got, _ = _gradients(around, [layer.weight])
    assert torch.equal(got[0], _gradients(rounded, [layer.weight])[0][0])
    assert not torch.equal(got[0], _gradients(lambda: layer(x * 2), [layer.weight])[0][0])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(ROWS, 44),
        torch.randn(ROWS, WIDTH, dtype=torch.float64),
        torch.randn(()),
        torch.randn(ROWS, 1),
        torch.zeros(0, WIDTH),
        torch.randn(1, WIDTH).expand(ROWS, WIDTH),
        torch.randn(100, WIDTH)[:1].expand(50, WIDTH),
        torch.randn(2 * WIDTH)[:96].unfold(0, WIDTH, 1),
        torch.randn(ROWS, WIDTH, dtype=torch.complex64),
    ],
    ids=lambda t: f"{tuple(t.shape)}-{t.dtype}",
)
def test_what_the_rule_does_not_admit_passes_untouched(tensor):
    x = torch.ones((), dtype=tensor.dtype, requires_grad=True)
    size, strides = tensor.shape, tensor.stride()
    h = x * tensor.new_ones(tensor.untyped_storage().nbytes() // tensor.element_size() or 1)
    activation = (h * 3).as_strided(size, strides)
    run = lambda: torch.view_as_real((x * activation).to(torch.complex128))  # noqa: E731
    (got,), asked = _gradients(run, [x], packer=MXPacker())
    (want,), _ = _gradients(run, [x])
    assert asked == []
    assert torch.equal(got, want)


def test_subclasses_of_tensors_pass():
    class Mine(torch.Tensor):
        pass

    x = torch.randn(ROWS, WIDTH).as_subclass(Mine).requires_grad_()
    run = (x * 2).square
    (dx,), asked = _gradients(run, [x], packer=MXPacker())
    assert asked == []
    assert torch.equal(dx, _gradients(run, [x])[0][0])


def test_small_tensors_pass():
    x = _activation(ROWS, WIDTH)
    for min_numel, number in ((x.numel(), 1), (x.numel() + 1, 0)):
        asked = _gradients(x.square, [x], packer=MXPacker(), min_numel=min_numel)[1]
        assert len(asked) == number
    with MXPacker().saved_tensors():
        y = x.square()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 2 * x)


def test_a_parameter_that_changes_before_backward_is_an_error():
    layer, x = nn.Linear(WIDTH, WIDTH), _activation(ROWS, WIDTH)
    with MXPacker().saved_tensors(min_numel=1):
        y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*\(64, 64\) is at"):
        y.sum().backward()


def test_coarse_scales_want_wider_rows():
    options = {"granularity": 128, "element": "e5m2"}
    for width, number in ((64, 0), (128, 1)):
        x = _activation(ROWS, width)
        (dx,), asked = _gradients(x.square, [x], packer=MXPacker(**options))
        assert len(asked) == number
    dy = torch.linspace(-1, 1, x.numel()).view_as(x)
    assert torch.equal(dx, dy * (2 * _rounded(x.detach(), **options)))


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="`select` must be a function of a tensor or None, got 3"):
        MXPacker().saved_tensors(select=3)
    with pytest.raises(TypeError, match=r"`min_numel` must be an int, got 1.0"):
        MXPacker().saved_tensors(min_numel=1.0)
    with pytest.raises(ValueError, match="`min_numel` must be at least 1, got 0"):
        MXPacker().saved_tensors(min_numel=0)
