"""The fused MLP against float64 and against itself: numbers, odd routings and odd operands.

Run on a GPU by bfloat16 and float16; on a CPU `test_interpreter.py` runs this file once in Triton's
interpreter, by float16 and float32, at small sizes.
"""

import pytest
import torch
from layer_problem import (
    DTYPES,
    INTERPRETED,
    LOW,
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
from olmo_experts_gemm import Experts, swiglu_experts

pytestmark = NEEDS_GPU_OR_INTERPRETER
NAN = float("nan")
ACTIVATIONS = ["swiglu", "geglu", "relu_squared", "clamped_swiglu"]
COUNTS = [9, 0, 12, 3] if INTERPRETED else [0, 63, 0, 0, 300, 1, 129, 0, 64]


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
@pytest.mark.parametrize("copied", [False, True], ids=["gathered", "copied"])
def test_a_layer_errs_at_most_twice_as_much_as_plain_torch(
    oracle, run, assert_twice_as_good, device, copied, activation, bias, dtype, monkeypatch
):
    monkeypatch.setattr("olmo_experts_gemm._triton.tiling.copies_rows", lambda x, H: copied)
    ids = make_routes()
    tensors, dy = make_tensors(device, dtype, activation, bias)

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
    got = _on_cpu(run(layer_of(ids.to(device), activation), tensors, dy, dtype))
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
    tensors, dy = make_tensors(device, dtype, activation, bias, rows=used + 7, weights=(used + 7,))

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
    got = run(rows_of(oracle.ends(COUNTS, device), activation), tensors, dy, dtype)
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
        lambda: make_routes()[:1],
        lambda: torch.empty(0, K, dtype=torch.long),
    ],
    ids=["no route", "one expert", "all to one", "K = E", "one token", "no token"],
)
def test_odd_routings_give_what_the_reference_gives(run, assert_same, device, make_ids):
    ids = make_ids()
    tokens, top_k = ids.shape
    tensors, dy = make_tensors(device, LOW, "geglu", True, rows=tokens, weights=(tokens, top_k))
    tensors["weights"][ids.to(device) < 0] = NAN
    want = run(layer_of(ids, "geglu", "reference"), _on_cpu(tensors), dy.cpu(), torch.float64)
    for kind in (torch.int32, torch.int64):
        got = run(layer_of(ids.to(device, kind), "geglu"), tensors, dy, LOW)
        assert_same(_on_cpu(got), want, 0.02)
        assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("tail", [0, 5])
def test_no_row_at_all_gives_zeros(oracle, run, device, tail, weighted):
    tensors, dy = make_tensors(device, LOW, bias=True, rows=tail, weights=(tail,))
    tensors["x"][:], tensors["weights"][:], dy[:] = NAN, NAN, NAN
    function = rows_of(oracle.ends([0] * E, device))
    if not weighted:
        del tensors["weights"]
        weighted_function = function
        function = lambda x, *stacks: weighted_function(x, None, *stacks)  # noqa: E731
    got = run(function, tensors, dy, LOW)
    assert all((value == 0).all() for value in got.values())
    assert got["y"].shape == (tail, D)


def test_one_expert_without_row_weights_is_its_rows_alone(oracle, run, device):
    tensors, dy = make_tensors(device, LOW, rows=T + 5)
    one = {"x": tensors["x"], **{name: tensors[name][:1] for name in ("w_gate_up", "w_down")}}
    one["x"][T:], dy[T:] = NAN, NAN

    def function(x, up, down):
        return swiglu_experts(x, up, down, oracle.ends([T], device), impl="triton")

    padded = run(function, one, dy, LOW)
    exact = run(function, {**one, "x": one["x"][:T]}, dy[:T], LOW)
    for name in ("y", "x"):
        padded[name] = padded[name][:T]
    assert_bits(padded, exact)


def _transposed(tensor):
    return tensor.mT.contiguous().mT


def _with_gaps(tensor):
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


@pytest.mark.parametrize("view", [at_offset_one, _transposed, _with_gaps])
def test_views_give_the_bits_of_dense_operands(oracle, device, view):
    ids = make_routes().to(device)
    tensors, dy = make_tensors(device, LOW, bias=True)
    views = {name: view(tensor) for name, tensor in tensors.items()}
    assert_bits(
        gradients_of(layer_of(view(ids)), views, view(dy)), gradients_of(layer_of(ids), tensors, dy)
    )
    offsets = oracle.ends([5, 0, 2], device)
    tensors = {name: t[:3] if t.ndim > 1 and len(t) == E else t for name, t in tensors.items()}
    tensors["weights"] = tensors["weights"][:, 0]
    views = {name: tensor if tensor.ndim == 1 else view(tensor) for name, tensor in tensors.items()}
    expanded = dy[:1].expand_as(dy)
    assert_bits(
        gradients_of(rows_of(offsets), views, expanded),
        gradients_of(rows_of(offsets), tensors, expanded.contiguous()),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_any_dtype_are_used_in_float32(device, dtype):
    ids = make_routes().to(device)
    tensors, dy = make_tensors(device, LOW)
    tensors["weights"] = tensors["weights"].to(dtype)
    got = gradients_of(layer_of(ids), tensors, dy)
    want = gradients_of(layer_of(ids), {**tensors, "weights": tensors["weights"].float()}, dy)
    assert got["weights"].dtype == dtype
    want["weights"] = want["weights"].to(dtype)
    assert_bits(got, want)


@pytest.mark.parametrize("activation", ["relu_squared", "clamped_swiglu"])
def test_the_module_is_the_function(oracle, device, activation):
    tensors, dy = make_tensors(device, LOW, activation, bias=True)
    weights, offsets = tensors.pop("weights")[:, 0], oracle.ends([2] * E, device)
    experts = Experts(
        E, D, H, device=device, dtype=LOW, activation=activation, bias=True, impl="triton"
    )
    x, *values = tensors.values()
    with torch.no_grad():
        for parameter, value in zip(experts.parameters(), values, strict=True):
            parameter.copy_(value)
    experts(x, offsets, row_weights_R=weights).backward(dy)
    function = rows_of(offsets, activation)
    want = gradients_of(lambda x, *stacks: function(x, weights, *stacks), tensors, dy)
    for parameter, name in zip(experts.parameters(), list(tensors)[1:], strict=True):
        assert torch.equal(parameter.grad, want[name]), name


def test_runs_agree_bit_for_bit(device):
    ids = make_routes().to(device)
    tensors, dy = make_tensors(device, LOW, bias=True)
    first = gradients_of(layer_of(ids), tensors, dy)
    for _ in range(2 if INTERPRETED else 100):
        assert_bits(gradients_of(layer_of(ids), tensors, dy), first)


def test_a_token_does_not_depend_on_the_others(device):
    """No row shares a sum with another, so the order of the tokens changes no bit of a token."""
    ids = make_routes().to(device)
    tensors, dy = make_tensors(device, LOW)
    order = torch.randperm(T, generator=torch.Generator().manual_seed(0)).to(device)
    moved = {**tensors, "x": tensors["x"][order], "weights": tensors["weights"][order]}
    want = gradients_of(layer_of(ids), tensors, dy)
    got = gradients_of(layer_of(ids[order]), moved, dy[order])
    for name in ("y", "x", "weights"):
        assert torch.equal(got[name], want[name][order]), name
