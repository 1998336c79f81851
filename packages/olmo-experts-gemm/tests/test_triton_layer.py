"""The fused MLP against float64 and against itself, forward and every gradient.

Run on a GPU by bfloat16 and float16; on a CPU `test_interpreter.py` runs this file once in Triton's
interpreter, by float16 and float32, at small sizes.
"""

import copy
import os

import pytest
import torch
from olmo_experts_gemm import Experts, moe_mlp, swiglu_experts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAN = float("nan")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
    # numpy on the interpreter, which also multiplies what lies past an expert's rows.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]
LOW = torch.float16 if INTERPRETED else torch.bfloat16
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
ACTIVATIONS = ["swiglu", "geglu", "relu_squared", "clamped_swiglu"]
T, K, E, D, H = (21, 2, 4, 24, 40) if INTERPRETED else (331, 3, 9, 136, 200)
COUNTS = [9, 0, 12, 3] if INTERPRETED else [0, 63, 0, 0, 300, 1, 129, 0, 64]
NAMES = ("x", "weights", "w_gate_up", "w_down", "b_gate_up", "b_down")


def _routes(seed=0, dropped=0.2, empty=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(T, E, generator=generator).argsort(dim=1)
    ids = torch.where(ids == empty, -1, ids)[:, :K].contiguous()
    ids[torch.rand(T, K, generator=generator) < dropped] = -1
    return ids


def _tensors(device, dtype, activation="swiglu", bias=False, rows=T, weights=(T, K), seed=0):
    """The leaves, their values those of `dtype`, and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    width = H if activation == "relu_squared" else 2 * H

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    # Large enough for the clamps to bite.
    large = 4.0 if activation == "clamped_swiglu" else 1.0
    shapes = [(rows, D), weights, (E, width, D), (E, D, H), (E, width), (E, D)]
    scales = [1.0, 1.0, large * D**-0.5, H**-0.5, 0.5, 0.5]
    tensors = {
        name: normal(*shape, scale=scale)
        for name, shape, scale in zip(NAMES, shapes, scales, strict=True)
        if bias or not name.startswith("b_")
    }
    return tensors, normal(rows, D)


def _layer(ids, activation="swiglu", impl="triton", **options):
    def run(x, weights, w_gate_up, w_down, b_gate_up=None, b_down=None):
        biases = {"b_gate_up_E2H": b_gate_up, "b_down_ED": b_down}
        stacks = (w_gate_up, w_down)
        return moe_mlp(
            x, ids, weights, *stacks, activation=activation, impl=impl, **biases, **options
        )

    return run


def _rows(offsets, activation="swiglu", impl="triton", **options):
    def run(x, weights, w_gate_up, w_down, b_gate_up=None, b_down=None):
        biases = {"b_gate_up_E2H": b_gate_up, "b_down_ED": b_down}
        return swiglu_experts(
            x,
            w_gate_up,
            w_down,
            offsets,
            row_weights_R=weights,
            activation=activation,
            impl=impl,
            **biases,
            **options,
        )

    return run


def _gradients(function, tensors, dy):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors.values()]
    y = function(*leaves)
    names = ("y", *tensors)
    return dict(zip(names, (y.detach(), *torch.autograd.grad(y, leaves, dy)), strict=True))


def _assert_bits(got, want):
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def _plain_mlp(x, activation, w_gate_up, w_down, b_gate_up=0.0, b_down=0.0):
    hidden = x @ w_gate_up.t() + b_gate_up
    gate, up = hidden.chunk(2, -1)
    if activation == "swiglu":
        a = torch.nn.functional.silu(gate) * up
    elif activation == "geglu":
        a = torch.nn.functional.gelu(gate) * up
    elif activation == "relu_squared":
        a = hidden.relu().square()
    else:
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        a = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return a @ w_down.t() + b_down


def _on_cpu(tensors):
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_errs_at_most_twice_as_much_as_plain_torch(
    oracle, run, assert_twice_as_good, device, activation, bias, dtype
):
    ids = _routes()
    tensors, dy = _tensors(device, dtype, activation, bias)

    def plain(x, weights, *stacks):
        y = torch.zeros_like(x)
        for expert in range(E):
            token, slot = (ids.to(device) == expert).nonzero(as_tuple=True)
            out = _plain_mlp(x[token], activation, *(stack[expert] for stack in stacks))
            y = y.index_add(0, token, out * weights[token, slot][:, None])
        return y

    exact = run(
        lambda x, weights, *stacks: oracle.moe(x, ids, weights, *stacks, activation=activation),
        _on_cpu(tensors),
        dy.cpu(),
        torch.float64,
    )
    torch.use_deterministic_algorithms(False)  # the plain layer adds with atomics
    reference = _on_cpu(run(plain, tensors, dy, dtype))
    torch.use_deterministic_algorithms(True)
    tensors["weights"][ids.to(device) < 0] = NAN
    got = _on_cpu(run(_layer(ids.to(device), activation), tensors, dy, dtype))
    assert {value.dtype for value in got.values()} == {dtype}
    assert_twice_as_good(got, reference, exact, largest=4.0)
    assert (got["weights"][ids < 0] == 0).all()
    assert (got["y"][(ids < 0).all(1)] == 0).all()
    for name in set(got) & {"w_gate_up", "w_down", "b_gate_up", "b_down"}:
        assert (got[name][1] == 0).all(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_err_at_most_twice_as_much_whatever_lies_past_the_end(
    oracle, run, assert_twice_as_good, device, activation, bias, dtype
):
    used = sum(COUNTS)
    tensors, dy = _tensors(device, dtype, activation, bias, rows=used + 7, weights=(used + 7,))

    def plain(x, weights, *stacks):
        parts = [
            _plain_mlp(part, activation, *(stack[expert] for stack in stacks))
            for expert, part in enumerate(x[:used].split(COUNTS))
        ]
        y = torch.cat(parts) * weights[:used, None]
        return torch.nn.functional.pad(y, (0, 0, 0, 7))

    exact = run(
        lambda x, weights, up, down, *biases: oracle.swiglu(
            x, up, down, COUNTS, weights, *biases, activation=activation
        ),
        _on_cpu(tensors),
        dy.cpu(),
        torch.float64,
    )
    reference = _on_cpu(run(plain, tensors, dy, dtype))
    for tensor in (tensors["x"], tensors["weights"], dy):
        tensor[used:] = NAN
    got = run(_rows(oracle.ends(COUNTS, device), activation), tensors, dy, dtype)
    got = _on_cpu(got)
    assert_twice_as_good(got, reference, exact, largest=4.0)
    for name in ("y", "x", "weights"):
        assert (got[name][used:] == 0).all(), name
    for expert, count in enumerate(COUNTS):
        for name in set(got) - {"y", "x", "weights"}:
            assert count or (got[name][expert] == 0).all(), (name, expert)


@pytest.mark.parametrize(
    "make_ids",
    [
        lambda: torch.full((T, K), -1),
        lambda: torch.zeros(T, 1, dtype=torch.long),
        lambda: torch.where(torch.arange(K) == 1, 2, -1).expand(T, K).clone(),
        lambda: torch.arange(E).repeat(T, 1).flip(1),
        lambda: _routes()[:1],
        lambda: torch.empty(0, K, dtype=torch.long),
    ],
    ids=["no route", "one expert", "all to one", "K = E", "one token", "no token"],
)
def test_odd_routings_give_what_the_reference_gives(run, assert_same, device, make_ids):
    ids = make_ids()
    tokens, top_k = ids.shape
    tensors, dy = _tensors(device, LOW, "geglu", True, rows=tokens, weights=(tokens, top_k))
    tensors["weights"][ids.to(device) < 0] = NAN
    want = run(_layer(ids, "geglu", "reference"), _on_cpu(tensors), dy.cpu(), torch.float64)
    for kind in (torch.int32, torch.int64):
        got = run(_layer(ids.to(device, kind), "geglu"), tensors, dy, LOW)
        assert_same(_on_cpu(got), want, 0.02)
        assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("tail", [0, 5])
def test_no_row_at_all_gives_zeros(oracle, run, device, tail, weighted):
    tensors, dy = _tensors(device, LOW, bias=True, rows=tail, weights=(tail,))
    tensors["x"][:], tensors["weights"][:], dy[:] = NAN, NAN, NAN
    function = _rows(oracle.ends([0] * E, device))
    if not weighted:
        del tensors["weights"]
        weighted_function = function
        function = lambda x, *stacks: weighted_function(x, None, *stacks)  # noqa: E731
    got = run(function, tensors, dy, LOW)
    assert all((value == 0).all() for value in got.values())
    assert got["y"].shape == (tail, D)


def test_one_expert_without_row_weights_is_its_rows_alone(oracle, run, device):
    tensors, dy = _tensors(device, LOW, rows=T + 5)
    one = {"x": tensors["x"], **{name: tensors[name][:1] for name in ("w_gate_up", "w_down")}}
    one["x"][T:], dy[T:] = NAN, NAN

    def function(x, up, down):
        return swiglu_experts(x, up, down, oracle.ends([T], device), impl="triton")

    padded = run(function, one, dy, LOW)
    exact = run(function, {**one, "x": one["x"][:T]}, dy[:T], LOW)
    for name in ("y", "x"):
        padded[name] = padded[name][:T]
    _assert_bits(padded, exact)


@pytest.mark.parametrize("asked", [*NAMES, "x w_down", "weights b_down", "none"])
def test_a_gradient_that_nobody_asks_for_changes_no_other(device, asked):
    ids = _routes().to(device)
    tensors, dy = _tensors(device, LOW, bias=True)
    want = _gradients(_layer(ids), tensors, dy)
    leaves = {name: tensor.requires_grad_(name in asked) for name, tensor in tensors.items()}
    y = _layer(ids)(*leaves.values())
    assert torch.equal(y, want["y"])
    assert y.requires_grad == (asked != "none")
    if y.requires_grad:
        y.backward(dy)
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in asked.split()), name
        assert leaf.grad is None or torch.equal(leaf.grad, want[name]), name


def _at_offset_one(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view_as(tensor)


def _transposed(tensor):
    return tensor.mT.contiguous().mT


def _with_gaps(tensor):
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


@pytest.mark.parametrize("view", [_at_offset_one, _transposed, _with_gaps])
def test_views_give_the_bits_of_packed_operands(oracle, device, view):
    ids = _routes().to(device)
    tensors, dy = _tensors(device, LOW, bias=True)
    views = {name: view(tensor) for name, tensor in tensors.items()}
    _assert_bits(
        _gradients(_layer(view(ids)), views, view(dy)), _gradients(_layer(ids), tensors, dy)
    )
    offsets = oracle.ends([5, 0, 2], device)
    tensors = {name: t[:3] if t.ndim > 1 and len(t) == E else t for name, t in tensors.items()}
    tensors["weights"] = tensors["weights"][:, 0]
    views = {name: tensor if tensor.ndim == 1 else view(tensor) for name, tensor in tensors.items()}
    expanded = dy[:1].expand_as(dy)
    _assert_bits(
        _gradients(_rows(offsets), views, expanded),
        _gradients(_rows(offsets), tensors, expanded.contiguous()),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_any_dtype_are_used_in_float32(device, dtype):
    ids = _routes().to(device)
    tensors, dy = _tensors(device, LOW)
    tensors["weights"] = tensors["weights"].to(dtype)
    got = _gradients(_layer(ids), tensors, dy)
    want = _gradients(_layer(ids), {**tensors, "weights": tensors["weights"].float()}, dy)
    assert got["weights"].dtype == dtype
    want["weights"] = want["weights"].to(dtype)
    _assert_bits(got, want)


@pytest.mark.parametrize("activation", ["relu_squared", "clamped_swiglu"])
def test_the_module_is_the_function(oracle, device, activation):
    tensors, dy = _tensors(device, LOW, activation, bias=True)
    weights, offsets = tensors.pop("weights")[:, 0], oracle.ends([2] * E, device)
    experts = Experts(
        E, D, H, device=device, dtype=LOW, activation=activation, bias=True, impl="triton"
    )
    x, *values = tensors.values()
    with torch.no_grad():
        for parameter, value in zip(experts.parameters(), values, strict=True):
            parameter.copy_(value)
    experts(x, offsets, row_weights_R=weights).backward(dy)
    function = _rows(offsets, activation)
    want = _gradients(lambda x, *stacks: function(x, weights, *stacks), tensors, dy)
    for parameter, name in zip(experts.parameters(), list(tensors)[1:], strict=True):
        assert torch.equal(parameter.grad, want[name]), name


def test_runs_agree_bit_for_bit(device):
    ids = _routes().to(device)
    tensors, dy = _tensors(device, LOW, bias=True)
    first = _gradients(_layer(ids), tensors, dy)
    for _ in range(2 if INTERPRETED else 100):
        _assert_bits(_gradients(_layer(ids), tensors, dy), first)


def test_a_token_does_not_depend_on_the_others(device):
    """No row shares a sum with another, so the order of the tokens changes no bit of a token."""
    ids = _routes().to(device)
    tensors, dy = _tensors(device, LOW)
    order = torch.randperm(T, generator=torch.Generator().manual_seed(0)).to(device)
    moved = {**tensors, "x": tensors["x"][order], "weights": tensors["weights"][order]}
    want = _gradients(_layer(ids), tensors, dy)
    got = _gradients(_layer(ids[order]), moved, dy[order])
    for name in ("y", "x", "weights"):
        assert torch.equal(got[name], want[name][order]), name


@pytest.mark.parametrize("aligned", [True, False])
def test_main_grads_take_three_microbatches_in_the_order_of_a_pipeline(device, aligned):
    """Expert 2 gets tokens in the second microbatch alone, and its sum survives the third."""
    tensors, dy = _tensors(device, torch.float32 if INTERPRETED else LOW, bias=True)
    batches = [torch.where((ids := _routes(seed)) == 2, -1, ids) for seed in range(3)]
    batches[1] = _routes(1)
    batches = [ids.to(device) for ids in batches]
    stacks = ("w_gate_up", "w_down")
    buffers = tuple(torch.zeros_like(tensors[name], dtype=torch.float32) for name in stacks)
    if not aligned:
        buffers = tuple(_at_offset_one(buffer) for buffer in buffers)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}

    def forward(ids):
        return _layer(ids, main_grads=buffers)(*leaves.values())

    parts = [_gradients(_layer(ids), tensors, dy) for ids in batches]
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
    ids = _routes().to(device)
    tensors, dy = _tensors(device, LOW)
    buffers = tuple(
        torch.ones_like(tensors[name], dtype=torch.float32) for name in ("w_gate_up", "w_down")
    )
    leaves = {name: t.detach().requires_grad_(name != "w_down") for name, t in tensors.items()}
    _layer(ids, main_grads=buffers)(*leaves.values()).backward(dy)
    assert (buffers[1] == 1).all()
    assert (buffers[0] != 1).any()


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
    ids = _routes().to(device)
    tensors, dy = _tensors(device, LOW, bias=True)
    want = _gradients(_layer(ids), tensors, dy)
    packer = _Packer()
    _assert_bits(_gradients(_layer(ids, pack=packer), tensors, dy), want)
    assert packer.shapes == [(T, D), (T * K, 2 * H)]
    assert packer.unpacked == 2
    tensors["weights"] = tensors["weights"][:, 0]
    offsets, packer = oracle.ends([T // E] * E, device), _Packer()
    want = _gradients(_rows(offsets), tensors, dy)
    _assert_bits(_gradients(_rows(offsets, pack=packer), tensors, dy), want)
    assert packer.shapes == [(T, D), (T, 2 * H)]
    with torch.no_grad():
        _layer(ids, pack=packer)(*_tensors(device, LOW)[0].values())
    assert len(packer.shapes) == 2


def test_what_is_held_for_backward_is_what_the_docstring_says(device):
    ids = _routes().to(device)
    tensors, _ = _tensors(device, LOW)
    tensors["weights"] = tensors["weights"].float()
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _layer(ids)(*leaves)
    for leaf in leaves[1:]:
        held.pop(leaf.untyped_storage().data_ptr())
    R = T * K
    assert sum(held.values()) == 2 * (T * D + 2 * R * H) + 4 * (2 * R + E)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_give_the_same_bits(device, reentrant):
    from torch.utils.checkpoint import checkpoint

    ids = _routes().to(device)
    tensors, dy = _tensors(device, LOW)
    want = _gradients(_layer(ids), tensors, dy)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    y = checkpoint(_layer(ids), *leaves.values(), use_reentrant=reentrant)
    y.backward(dy)
    got = {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}
    _assert_bits(got, want)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, of jvp
@pytest.mark.parametrize("function", ["layer", "rows"])
def test_second_and_forward_mode_derivatives_are_refused(oracle, device, function):
    tensors, _ = _tensors(device, LOW)
    if function == "layer":
        call = _layer(_routes().to(device))
    else:
        tensors["weights"] = tensors["weights"][:, 0]
        call = _rows(oracle.ends([2] * E, device))
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
    tensors, _ = _tensors(device, LOW)
    buffers = tuple(
        torch.zeros_like(tensors[name], dtype=torch.float32) for name in ("w_gate_up", "w_down")
    )
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    y = _layer(_routes().to(device), main_grads=buffers)(*leaves)
    with pytest.raises(RuntimeError, match="`create_graph=True` must not meet a `main_grad`"):
        torch.autograd.grad(y.sum(), leaves[:2], create_graph=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_runs_one_call_after_another(device):
    tensors, _ = _tensors(device, LOW)
    x, *others = tensors.values()
    call = _layer(_routes().to(device))
    got = torch.func.vmap(lambda value: call(value, *others))(torch.stack([x, -x]))
    assert torch.equal(got[0], call(x, *others))
    assert torch.equal(got[1], call(-x, *others))


def test_operators_keep_the_rules_of_torch(oracle, device):
    from olmo_experts_gemm import _fused_mlp

    ids = _routes(dropped=0.0, empty=E).to(device)  # a row without a route is unwritten memory
    tensors, dy = _tensors(device, LOW, bias=True)
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
    ids = _routes().to(device)
    tensors, dy = _tensors(device, LOW, bias=True)
    want = _gradients(_layer(ids), tensors, dy)
    compiled = torch.compile(_layer(ids), backend=backend, fullgraph=True)
    _assert_bits(_gradients(compiled, tensors, dy), want)
    with torch.no_grad():
        assert torch.equal(compiled(*tensors.values()), want["y"])


def test_one_graph_serves_any_number_of_tokens(device):
    tensors, dy = _tensors(device, LOW)
    x, weights, *stacks = tensors.values()
    ids = _routes().to(device)

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
    ids = _routes().to(device)
    tensors, dy = _tensors(device, LOW)
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
