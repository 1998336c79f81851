"""The fused MLP in what surrounds it: autograd, buffers, saved memory and compilers.

Run on a GPU by bfloat16, and on a CPU by `test_interpreter.py`, as `test_triton_layer.py`.
"""

import copy

import pytest
import torch
from layer_problem import (
    INTERPRETED,
    LOW,
    NAMES,
    NEEDS_GPU_OR_INTERPRETER,
    D,
    E,
    H,
    K,
    T,
    assert_bits,
    at_offset_one,
    gradients_of,
    layer_of,
    make_routes,
    make_tensors,
    rows_of,
)
from olmo_experts_gemm import moe_mlp

pytestmark = NEEDS_GPU_OR_INTERPRETER


@pytest.mark.parametrize("asked", [*NAMES, "x w_down", "weights b_down", "none"])
def test_a_gradient_that_nobody_asks_for_changes_no_other(device, asked):
    ids = make_routes().to(device)
    tensors, dy = make_tensors(device, LOW, bias=True)
    want = gradients_of(layer_of(ids), tensors, dy)
    leaves = {name: tensor.requires_grad_(name in asked) for name, tensor in tensors.items()}
    y = layer_of(ids)(*leaves.values())
    assert torch.equal(y, want["y"])
    assert y.requires_grad == (asked != "none")
    if y.requires_grad:
        y.backward(dy)
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in asked.split()), name
        assert leaf.grad is None or torch.equal(leaf.grad, want[name]), name


@pytest.mark.parametrize("aligned", [True, False])
def test_main_grads_take_three_microbatches_in_the_order_of_a_pipeline(device, aligned):
    """Expert 2 gets tokens in the second microbatch alone, and its sum survives the third."""
    tensors, dy = make_tensors(device, torch.float32 if INTERPRETED else LOW, bias=True)
    batches = [torch.where((ids := make_routes(seed)) == 2, -1, ids) for seed in range(3)]
    batches[1] = make_routes(1)
    batches = [ids.to(device) for ids in batches]
    stacks = ("w_gate_up", "w_down")
    buffers = tuple(torch.zeros_like(tensors[name], dtype=torch.float32) for name in stacks)
    if not aligned:
        buffers = tuple(at_offset_one(buffer) for buffer in buffers)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}

    def forward(ids):
        return layer_of(ids, main_grads=buffers)(*leaves.values())

    parts = [gradients_of(layer_of(ids), tensors, dy) for ids in batches]
    for _ in range(2):
        first, second = forward(batches[0]), forward(batches[1])
        first.backward(dy)
        third = forward(batches[2])
        second.backward(dy)
        alone = [buffer[2].clone() for buffer in buffers]
        third.backward(dy)
        for buffer, name, kept in zip(buffers, stacks, alone, strict=True):
            assert leaves[name].grad is None
            want = sum(part[name].double() for part in parts)
            error = (buffer.double() - want).abs().max() / want.abs().max()
            assert error < (1e-6 if INTERPRETED else 0.01), name
            assert torch.equal(buffer[2], kept)
            assert (kept != 0).any()
            buffer.zero_()
        for name in set(leaves) - set(stacks):
            want = parts[0][name] + parts[1][name] + parts[2][name]
            torch.testing.assert_close(leaves[name].grad, want, rtol=0.02, atol=0.02)
            leaves[name].grad = None


def test_main_grads_and_frozen_stacks(device):
    ids = make_routes().to(device)
    tensors, dy = make_tensors(device, LOW)
    buffers = tuple(
        torch.ones_like(tensors[name], dtype=torch.float32) for name in ("w_gate_up", "w_down")
    )
    leaves = {name: t.detach().requires_grad_(name != "w_down") for name, t in tensors.items()}
    layer_of(ids, main_grads=buffers)(*leaves.values()).backward(dy)
    assert (buffers[1] == 1).all()
    assert (buffers[0] != 1).any()


@pytest.mark.parametrize("missing", [0, 1])
def test_one_main_grad_alone_is_refused(device, missing):
    tensors, _ = make_tensors(device, LOW)
    buffers = [
        torch.zeros_like(tensors[name], dtype=torch.float32) for name in ("w_gate_up", "w_down")
    ]
    buffers[missing] = None
    with pytest.raises(TypeError, match=r"`main_grads` must be two tensors, .* got a NoneType"):
        layer_of(make_routes().to(device), main_grads=buffers)(*tensors.values())


@pytest.mark.parametrize("which", [0, 1])
def test_backward_looks_at_the_buffers_again(device, which):
    tensors, dy = make_tensors(device, LOW)
    buffers = tuple(
        torch.zeros_like(tensors[name], dtype=torch.float32) for name in ("w_gate_up", "w_down")
    )
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    y = layer_of(make_routes().to(device), main_grads=buffers)(*leaves)
    buffers[which].resize_(1, 2, 3)
    with pytest.raises(ValueError, match=rf"`main_grads\[{which}\]` must be .* shape \(1, 2, 3\)"):
        y.backward(dy)


class _Packer:
    def __init__(self, wide=torch.float64):
        self.shapes, self.unpacked, self.wide = [], 0, wide

    def pack(self, tensor):
        self.shapes.append(tuple(tensor.shape))
        assert not tensor.requires_grad
        return tensor.to(self.wide), tensor.dtype

    def unpack(self, packed):
        self.unpacked += 1
        return packed[0].to(packed[1])


def test_a_packer_is_given_the_tokens_and_the_hidden_layer_alone(oracle, device):
    ids = make_routes().to(device)
    tensors, dy = make_tensors(device, LOW, bias=True)
    want = gradients_of(layer_of(ids), tensors, dy)
    packer = _Packer()
    assert_bits(gradients_of(layer_of(ids, pack=packer), tensors, dy), want)
    assert packer.shapes == [(T, D), (T * K, 2 * H)]
    assert packer.unpacked == 2
    tensors["weights"] = tensors["weights"][:, 0]
    offsets, packer = oracle.ends([T // E] * E, device), _Packer()
    want = gradients_of(rows_of(offsets), tensors, dy)
    assert_bits(gradients_of(rows_of(offsets, pack=packer), tensors, dy), want)
    assert packer.shapes == [(T, D), (T, 2 * H)]
    with torch.no_grad():
        layer_of(ids, pack=packer)(*make_tensors(device, LOW)[0].values())
    assert len(packer.shapes) == 2


@pytest.mark.parametrize("changed", ["w_gate_up", "w_down", "weights", "maps"])
def test_a_kept_tensor_that_changes_before_backward_is_an_error(oracle, device, changed):
    tensors, dy = make_tensors(device, LOW)
    tensors["weights"] = tensors["weights"][:, 0].float()
    for options in ({}, {"pack": _Packer()}):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        leaves["maps"] = oracle.ends([2] * E, device)
        y = rows_of(leaves["maps"], **options)(*list(leaves.values())[:-1])
        with torch.no_grad():
            leaves[changed].mul_(1)
        with pytest.raises(RuntimeError, match=r"by an inplace operation.*; expected version 0"):
            y.backward(dy)


def test_a_packed_tensor_is_told_from_a_stack_in_the_same_memory(oracle, device):
    tensors, dy = make_tensors(device, LOW)
    offsets = oracle.ends([2] * E, device)
    tensors["weights"] = tensors["weights"][:, 0]
    want = gradients_of(rows_of(offsets), tensors, dy)
    flat = torch.cat([tensors["x"].flatten(), tensors["w_down"].flatten()])
    parts = flat.split([tensors["x"].numel(), tensors["w_down"].numel()])
    for name, part in zip(("x", "w_down"), parts, strict=True):
        tensors[name] = part.view_as(tensors[name])
    packer = _Packer()
    assert_bits(gradients_of(rows_of(offsets, pack=packer), tensors, dy), want)
    assert packer.shapes == [(T, D), (T, 2 * H)]


def test_a_hidden_layer_without_a_gate_is_packed_once(device):
    tensors, dy = make_tensors(device, LOW, "relu_squared")
    packer = _Packer()
    gradients_of(layer_of(make_routes().to(device), "relu_squared", pack=packer), tensors, dy)
    assert packer.shapes == [(T, D), (T * K, H)]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_call_refuses_a_packer(device, fullgraph):
    tensors, _ = make_tensors(device, LOW)
    call = layer_of(make_routes().to(device), pack=_Packer())
    compiled = torch.compile(call, backend="aot_eager", fullgraph=fullgraph)
    with pytest.raises(RuntimeError, match=r"`pack` must stay None under `torch.compile`"):
        compiled(*tensors.values())


def test_what_is_held_for_backward_is_what_the_docstring_says(device):
    ids = make_routes().to(device)
    tensors, _ = make_tensors(device, LOW)
    tensors["weights"] = tensors["weights"].float()
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer_of(ids)(*leaves)
    for leaf in leaves[1:]:
        held.pop(leaf.untyped_storage().data_ptr())
    R = T * K
    assert sum(held.values()) == 2 * (T * D + 2 * R * H) + 4 * (2 * R + E)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_give_the_same_bits(device, reentrant):
    from torch.utils.checkpoint import checkpoint

    ids = make_routes().to(device)
    tensors, dy = make_tensors(device, LOW)
    want = gradients_of(layer_of(ids), tensors, dy)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    y = checkpoint(layer_of(ids), *leaves.values(), use_reentrant=reentrant)
    y.backward(dy)
    got = {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}
    assert_bits(got, want)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, of jvp
@pytest.mark.parametrize("function", ["layer", "rows"])
def test_second_and_forward_mode_derivatives_are_refused(oracle, device, function):
    tensors, _ = make_tensors(device, LOW)
    if function == "layer":
        call = layer_of(make_routes().to(device))
    else:
        tensors["weights"] = tensors["weights"][:, 0]
        call = rows_of(oracle.ends([2] * E, device))
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    gradients = torch.autograd.grad(call(*leaves).sum(), leaves, create_graph=True)
    for gradient in gradients:
        with pytest.raises(RuntimeError, match=r"differentiated once at most.*impl='torch'"):
            gradient.sum().backward(retain_graph=True)
    plain = [leaf.detach() for leaf in leaves]
    for place, tensor in enumerate(plain):

        def one(value, place=place):
            return call(*plain[:place], value, *plain[place + 1 :])

        with pytest.raises(NotImplementedError, match="Forward-mode derivatives"):
            torch.func.jvp(one, (tensor,), (tensor,))
        with pytest.raises(RuntimeError, match="functorch transforms"):
            torch.func.grad(lambda value, one=one: one(value).sum())(tensor)


def test_create_graph_with_main_grads_is_refused(device):
    tensors, _ = make_tensors(device, LOW)
    buffers = tuple(
        torch.zeros_like(tensors[name], dtype=torch.float32) for name in ("w_gate_up", "w_down")
    )
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    y = layer_of(make_routes().to(device), main_grads=buffers)(*leaves)
    with pytest.raises(RuntimeError, match="`create_graph=True` must not meet a `main_grad`"):
        torch.autograd.grad(y.sum(), leaves[:2], create_graph=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of the routes
@pytest.mark.parametrize("asked", ["", "x", "w_down", "x weights w_gate_up w_down"])
def test_vmap_runs_one_call_after_another(device, asked):
    tensors, dy = make_tensors(device, LOW)
    call = layer_of(make_routes().to(device))
    x, *others = (tensor.requires_grad_(name in asked) for name, tensor in tensors.items())
    batch = torch.stack([x, -x])
    got = torch.func.vmap(lambda value: call(value, *others))(batch)
    nested = torch.func.vmap(torch.func.vmap(lambda value: call(value, *others)))(batch[:, None])
    want = torch.stack([call(x, *others), call(-x, *others)])
    assert torch.equal(got, want)
    assert torch.equal(nested[:, 0], want)
    leaves = [leaf for leaf in (x, *others) if leaf.requires_grad]
    assert got.requires_grad == bool(leaves)
    if leaves:
        for y in (got, nested[:, 0]):
            results = [
                torch.autograd.grad((v * dy).sum(), leaves, retain_graph=True) for v in (y, want)
            ]
            for a, b in zip(*results, strict=True):
                # Each is a sum of two calls' bfloat16 gradients that nearly cancel.
                assert float((a - b).norm()) < 0.02 * float(b.norm())


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_over_stacks_gives_each_its_own_gradient(device):
    tensors, dy = make_tensors(device, LOW)
    x, weights, up, down = tensors.values()
    call = layer_of(make_routes().to(device))
    downs = torch.stack([down, -2 * down], 1).requires_grad_()
    y = torch.func.vmap(lambda down: call(x, weights, up, down), in_dims=1)(downs)
    (got,) = torch.autograd.grad(y, downs, torch.stack([dy, dy]))
    for number in range(2):
        one = downs[:, number].detach().requires_grad_()
        (want,) = torch.autograd.grad(call(x, weights, up, one), one, dy)
        assert torch.equal(got[:, number], want)


def test_operators_keep_the_rules_of_torch(oracle, device):
    from olmo_experts_gemm import _fused_mlp

    ids = make_routes(dropped=0.0, empty=E).to(device)  # a row without a route is unwritten memory
    tensors, dy = make_tensors(device, LOW, bias=True)
    tensors["weights"] = tensors["weights"].float()
    x, weights, w_gate_up, w_down, b_gate_up, b_down = (
        t.requires_grad_() for t in tensors.values()
    )
    maps = _fused_mlp.sort_routes_op(ids, E)
    torch.library.opcheck(_fused_mlp.sort_routes_op, (ids, E))
    stacks = (w_gate_up, w_down, b_gate_up, b_down)
    buffers = tuple(torch.zeros_like(w, dtype=torch.float32) for w in (w_gate_up, w_down))
    options = (K, "swiglu", True)
    torch.library.opcheck(
        _fused_mlp.expert_mlp_op, (x, *stacks, weights, None, None, *maps, *options)
    )
    ready = (oracle.ends([T, *[0] * (E - 1)], device), None, None)
    two = [buffer.detach() for buffer in buffers]
    torch.library.opcheck(
        _fused_mlp.expert_mlp_op, (x, w_gate_up, w_down, None, None, None, *two, *ready, *options)
    )
    with torch.no_grad():
        _, hidden = _fused_mlp.expert_mlp_op(x, *stacks, weights, None, None, *maps, *options)
    saved = [t.detach() for t in (x, hidden, w_gate_up, w_down, b_down, weights)]
    arguments = (dy, *saved, *maps, K, "swiglu", [True, True, True, True, True, True])
    torch.library.opcheck(_fused_mlp.expert_mlp_backward_op, arguments)
    torch.library.opcheck(
        _fused_mlp.expert_mlp_backward_main_grad_op, (*copy.deepcopy(buffers), *arguments)
    )


BACKENDS = ["aot_eager"] if INTERPRETED else ["aot_eager", "inductor"]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_into_one_graph(device, backend):
    ids = make_routes().to(device)
    tensors, dy = make_tensors(device, LOW, bias=True)
    want = gradients_of(layer_of(ids), tensors, dy)
    compiled = torch.compile(layer_of(ids), backend=backend, fullgraph=True)
    assert_bits(gradients_of(compiled, tensors, dy), want)
    with torch.no_grad():
        assert torch.equal(compiled(*tensors.values()), want["y"])


def test_one_graph_serves_any_number_of_tokens(device):
    tensors, dy = make_tensors(device, LOW)
    x, weights, *stacks = tensors.values()
    ids = make_routes().to(device)

    def run(ids, x, weights, *stacks):
        return moe_mlp(x, ids, weights, *stacks, impl="triton")

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (T, 7):
        leaves = [t.detach().requires_grad_() for t in (x[:tokens], weights[:tokens], *stacks)]
        results = [
            torch.autograd.grad(function(ids[:tokens], *leaves), leaves, dy[:tokens])
            for function in (compiled, run)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compiled_main_grads_are_right_or_refused(device):
    ids = make_routes().to(device)
    tensors, dy = make_tensors(device, LOW)
    stacks = ("w_gate_up", "w_down")
    buffers = tuple(torch.zeros_like(tensors[name], dtype=torch.float32) for name in stacks)
    want = copy.deepcopy(buffers)
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]

    def run(x, weights, w_gate_up, w_down, into):
        return moe_mlp(x, ids, weights, w_gate_up, w_down, main_grads=into, impl="triton")

    for _ in range(4):
        run(*leaves, want).backward(dy)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        compiled(*leaves, buffers).backward(dy)
    first, second = (compiled(*leaves, tuple(b.data for b in buffers)) for _ in range(2))
    first.backward(dy)
    second.backward(dy)
    for got, exact in zip(buffers, want, strict=True):
        assert torch.equal(got, exact)
    first, second = compiled(*leaves, buffers), compiled(*leaves, buffers)
    first.backward(dy)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward(dy)
