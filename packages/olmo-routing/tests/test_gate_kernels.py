"""The kernels of the gate against the reference, in values and gradients.

They run on a GPU, and on a CPU in the process of Triton's interpreter that `test_interpreter.py`
starts.
"""

import math

import pytest
import torch
from kernel_problem import (
    INTERPRETED,
    NEEDS_GPU_OR_INTERPRETER,
    assert_as_good_as_the_reference,
    make_logits,
    make_problem,
    normal,
)
from olmo_routing import Router, SelectionBias, _gate, route

pytestmark = NEEDS_GPU_OR_INTERPRETER

# T, E, K and the groups. A program holds 2048 / E tokens, E rounded up to a power of two: 300
# experts make six blocks of 4 tokens, the last one not full.
SHAPES = {
    "few": (37, 8, 2, (1, 1)),
    "all": (19, 8, 8, (1, 1)),
    "best": (19, 8, 1, (1, 1)),
    "one expert": (11, 1, 1, (1, 1)),
    "one token": (1, 5, 2, (1, 1)),
    "odd": (19, 12, 5, (1, 1)),
    "blocks": (21, 300, 3, (1, 1)),
    "groups": (31, 16, 4, (4, 2)),
    "groups of one": (19, 8, 3, (8, 4)),
    "groups of two": (19, 8, 2, (4, 1)),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("extras", [False, True])
def test_as_good_as_the_reference(device, shape, gate, renormalize, extras):
    T, E, K, groups = SHAPES[shape]
    problem = make_problem(
        T,
        E,
        K,
        gate=gate,
        renormalize=renormalize,
        groups=groups,
        biased=extras,
        masked=extras,
    )
    got = assert_as_good_as_the_reference(problem, device)
    ids, real = got["expert_ids_TK"], problem.mask_T
    for row, valid in zip(ids.tolist(), [True] * T if real is None else real.tolist(), strict=True):
        assert row == [-1] * K if not valid else len(set(row)) == K
        assert not valid or all(0 <= expert < E for expert in row)
    assert all(value.isfinite().all() for name, value in got.items() if name != "logits_TE")


@pytest.mark.parametrize("biased", [True, False])
def test_a_bias_or_a_mask_alone(device, biased):
    for shape in ("few", "groups"):
        T, E, K, groups = SHAPES[shape]
        problem = make_problem(T, E, K, groups=groups, biased=biased, masked=not biased)
        assert_as_good_as_the_reference(problem, device)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("E", "K"), [(64, 10), (64, 11), (100, 20), (300, 8)])
def test_more_ids_than_one_integer_holds(device, E, K):
    """A token's ids are found side by side in 64 bits: 10 of 64 experts, 9 of 128, 7 of 512."""
    for gate, renormalize in (("softmax", True), ("softmax", False), ("sigmoid", False)):
        problem = make_problem(5, E, K, gate=gate, renormalize=renormalize, masked=True)
        assert_as_good_as_the_reference(problem, device)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_given_ids_are_weighed_as_they_are(device, gate, renormalize):
    T, E, K = 37, 12, 3
    given = normal(T, E, seed=9).argsort(dim=1)[:, :K].contiguous()
    given[::5, 1] = -1
    given[3] = -1
    for masked in (False, True):
        problem = make_problem(T, E, K, gate=gate, renormalize=renormalize, masked=masked)
        got = assert_as_good_as_the_reference(problem, device, given_TK=given)
        real = torch.ones(T, dtype=torch.bool) if problem.mask_T is None else problem.mask_T
        assert torch.equal(got["expert_ids_TK"], torch.where(real[:, None], given, -1))
        # Its own ids, given back, give the same bits.
        first = problem.run("triton", device)
        again = problem.run("triton", device, given_TK=first["expert_ids_TK"])
        for name, value in first.items():
            assert torch.equal(again[name], value) or name == "logits_TE", name


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("asked", ["weights", "scores"])
@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_a_gradient_of_one_output_alone(device, gate, asked):
    for renormalize in (True, False):
        problem = make_problem(37, 12, 3, gate=gate, renormalize=renormalize, masked=True)
        got = assert_as_good_as_the_reference(problem, device, asked=asked)
        assert got["gradient"].abs().max() > 0


def test_no_gradient_where_nobody_asks(device):
    problem = make_problem(9, 8, 2)
    with torch.no_grad():
        assert not problem.route(problem.logits_TE.to(device), "triton").weights_TK.requires_grad
    leaf = problem.logits_TE.to(device).requires_grad_()
    routing = problem.route(leaf, "triton")
    for name in ("expert_ids_TK", "counts_E", "bad_tokens"):
        assert not getattr(routing, name).requires_grad, name
    (gradient,) = torch.autograd.grad(routing.logits_TE.nan_to_num(0, 0, 0).sum(), leaf)
    assert torch.equal(gradient, leaf.detach().isfinite().float())


def test_softmax_topk_is_the_softmax_kernel(device):
    problem = make_problem(19, 8, 3)
    named = make_problem(19, 8, 3, gate="softmax_topk")
    got, want = named.run("triton", device), problem.run("triton", device)
    for name, value in want.items():
        assert torch.equal(got[name], value) or name == "logits_TE", name


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_hard_rows_by_hand(device, gate):
    """The order of a row of everything: +inf, numbers, -0 as 0 by id, -inf, NaN of both signs."""
    nan, inf = math.nan, math.inf
    row = torch.tensor([[nan, -0.0, -inf, 0.0, 3.0, -nan, inf, -3.0]], device=device)
    routing = route(row, 8, gate=gate, impl="triton")
    assert routing.expert_ids_TK.tolist() == [[6, 4, 1, 3, 7, 2, 0, 5]]
    everywhere_nan = torch.full((3, 8), nan, device=device)
    routing = route(everywhere_nan, 3, gate=gate, impl="triton")
    assert routing.expert_ids_TK.tolist() == [[0, 1, 2]] * 3
    assert routing.weights_TK.tolist() == [[0.0] * 3] * 3
    # Saturated scores keep the order of the logits, with a bias of zero as well.
    rising = torch.tensor([[20.0, 40.0, 60.0], [-300.0, -200.0, -250.0]], device=device)
    for bias in (None, torch.zeros(3, device=device)):
        ids = route(rising, 2, gate="sigmoid", bias_E=bias, impl="triton").expert_ids_TK
        assert ids.tolist() == [[2, 1], [1, 2]]


def test_bad_tokens_are_counted_without_padding(device):
    logits = normal(700, 8)
    logits[3, 0], logits[5], logits[600, 7], logits[650, 2] = math.nan, math.nan, math.inf, math.nan
    logits[7] = -math.inf  # not bad
    mask = torch.arange(700) != 650
    for given, want in ((None, 4), (mask, 3)):
        here = None if given is None else given.to(device)
        routing = route(logits.to(device), 2, mask_T=here, impl="triton")
        assert routing.bad_tokens.tolist() == want
        assert (routing.bad_tokens.shape, routing.bad_tokens.dtype) == ((), torch.int32)
        assert routing.counts_E.sum().tolist() == 2 * (700 if given is None else 699)


@pytest.mark.usefixtures("poisoned_memory")
def test_counts_of_many_blocks_add_up(device):
    """131 blocks of 2 tokens."""
    problem = make_problem(261, 520, 2, masked=True)
    got, want = problem.run("triton", device), problem.run("reference")
    assert torch.equal(got["counts_E"], want["counts_E"])
    assert torch.equal(got["bad_tokens"], want["bad_tokens"])


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_no_tokens(device, gate):
    problem = make_problem(0, 8, 2, gate=gate, biased=True, masked=True)
    got = assert_as_good_as_the_reference(problem, device)
    assert got["counts_E"].tolist() == [0] * 8
    assert got["bad_tokens"].tolist() == 0
    assert got["gradient"].shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_routed_in_float32(device, dtype):
    problem = make_problem(37, 8, 2, biased=True)
    low = problem.run("triton", device, dtype)
    logits = problem.logits_TE.to(dtype).float()
    same = make_problem(37, 8, 2, biased=True, logits=logits).run("triton", device)
    for name, value in same.items():
        if name == "gradient":
            assert torch.equal(low[name], value.to(dtype))
        elif name != "logits_TE":
            assert torch.equal(low[name], value), name


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("layout", ["columns", "every other", "a column", "expanded"])
def test_logits_and_gradients_of_any_strides(device, layout):
    T, E, K = 13, 6, 2
    base = make_logits(2 * T, 2 * E).to(device)
    views = {
        "columns": base.T[:E, :T].T,
        "every other": base[::2, ::2],
        "a column": base[:T, 3:4],
        "expanded": base[:1, :E].expand(T, E),
    }
    view = views[layout]
    T, E = view.shape
    K = min(K, E)
    assert not view.is_contiguous()
    g_weights = normal(K, T, seed=3).to(device).T
    results = []
    for logits in (view, view.contiguous()):
        leaf = logits.detach().requires_grad_()
        routing = route(leaf, K, impl="triton")
        outputs = (routing.weights_TK, routing.scores_TE)
        gradients = (g_weights, torch.ones((), device=device).expand(T, E))
        results.append((routing, *torch.autograd.grad(outputs, leaf, gradients)))
    (got, got_gradient), (want, want_gradient) = results
    assert torch.equal(got_gradient, want_gradient)
    for name in ("expert_ids_TK", "weights_TK", "scores_TE", "counts_E"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_a_mask_and_a_bias_of_any_strides(device):
    T, E = 37, 8
    mask, bias = normal(2 * T) < 0.5, normal(3 * E)
    logits = make_logits(T, E).to(device)
    want = route(logits, 2, mask_T=mask[::2].contiguous().to(device), bias_E=bias[::3].to(device))
    got = route(logits, 2, mask_T=mask.to(device)[::2], bias_E=bias.to(device)[::3], impl="triton")
    assert torch.equal(got.expert_ids_TK, want.expert_ids_TK)


def test_repeats_give_the_same_bits(device):
    problem = make_problem(*((64, 24, 4) if INTERPRETED else (5000, 128, 8)), biased=True)
    first = problem.run("triton", device)
    for _ in range(3 if INTERPRETED else 100):
        again = problem.run("triton", device)
        assert all(torch.equal(again[n], v) for n, v in first.items() if n != "logits_TE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_keeps_the_logits_as_given_the_ids_and_the_weights(device, dtype):
    leaf = normal(37, 8).to(device, dtype).requires_grad_()
    saved = []

    def pack(tensor):
        saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        routing = route(leaf, 2, impl="triton")
    owned = (leaf, routing.expert_ids_TK, routing.weights_TK)
    assert saved == [tensor.untyped_storage().data_ptr() for tensor in owned]


def test_a_second_derivative_is_refused(device):
    leaf = normal(9, 8).to(device).requires_grad_()
    weights = route(leaf, 2, impl="triton").weights_TK
    (gradient,) = torch.autograd.grad(weights.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated once at most.*impl='reference'"):
        gradient.sum().backward()


@pytest.mark.parametrize("case", ["plain", "everything", "given"])
def test_operators_keep_the_rules_of_torch(device, case):
    logits = normal(5, 8).to(device)
    ids = torch.tensor([[0, 1]] * 5, device=device)
    mask = torch.arange(5, device=device) < 4
    arguments = {
        "plain": (None, None, None, 2, False, True, 1.0, 1, 1),
        "everything": (normal(8).to(device), mask, None, 2, True, False, 2.0, 4, 2),
        "given": (None, mask, ids, 2, False, True, 1.0, 1, 1),
    }[case]
    # Its test of ahead-of-time autograd adds all outputs onto the first, which are integers here;
    # `test_compiled_equals_eager` is in its place.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_gate.gate, (logits.requires_grad_(), *arguments), test_utils=checks)
    logits = logits.detach()
    ids, weights, scores, _ = _gate.gate(logits, *arguments)
    for g_weights, g_scores in ((weights, scores), (weights, None), (None, scores)):
        torch.library.opcheck(
            _gate.gate_backward,
            (logits, ids, weights, g_weights, g_scores, *arguments[4:7]),
        )


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("backend", ["aot_eager"] if INTERPRETED else ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(device, backend, dynamic):
    bias, impl = normal(8, seed=1).to(device), "triton" if INTERPRETED else "auto"

    def run(logits, mask):
        routing = route(
            logits, 2, gate="sigmoid", bias_E=bias, mask_T=mask, route_scale=2.0, impl=impl
        )
        return routing.weights_TK, routing.scores_TE, routing.expert_ids_TK, routing.counts_E

    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=dynamic)
    for T in (13, 7) if dynamic else (13,):
        results = []
        for function in (compiled, run):
            leaf = make_logits(T, 8).to(device).requires_grad_()
            outputs = function(leaf, torch.arange(T, device=device) < T - 2)
            gradients = [torch.ones_like(output) for output in outputs[:2]]
            results.append((*outputs, *torch.autograd.grad(outputs[:2], leaf, gradients)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_router_takes_the_recorded_ids(device, reentrant):
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    router = Router(16, 8, 2, selection_bias=SelectionBias(8, 0.1), impl="triton").to(device)
    x = normal(37, 16).to(device).requires_grad_()
    seen = []

    def layer(x):
        routing = router(x, expert_ids_TK=seen[0] if seen else None)
        seen.append(routing.expert_ids_TK)
        return routing.weights_TK.square().sum() + routing.scores_TE.square().sum()

    layer(x).backward()
    want = [x.grad, router.weight_ED.grad]
    x.grad = router.weight_ED.grad = None
    seen.clear()
    checkpoint(layer, x, use_reentrant=reentrant).backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    for got, value in zip([x.grad, router.weight_ED.grad], want, strict=True):
        assert torch.equal(got, value)


@pytest.mark.parametrize(
    ("logits", "options", "message"),
    [
        (
            torch.zeros(2, 8).double(),
            {},
            "compute in float32, not in float64; use impl='reference'",
        ),
        (torch.zeros(2, 1025), {}, "up to 1024 experts, got 1025"),
        (torch.zeros(2, 128), {"top_k": 65}, "up to 64 experts a token, got 65"),
        (torch.zeros(2, 12), {"num_groups": 4, "topk_groups": 2}, "powers of two, got 12 and 4"),
        (torch.zeros(2, 24), {"num_groups": 3, "topk_groups": 2}, "powers of two, got 24 and 3"),
    ],
)
def test_what_the_kernels_cannot_route_is_said(device, logits, options, message):
    options = {"top_k": 2, **options}
    logits = logits.to(device)
    with pytest.raises(ValueError, match=message):
        route(logits, **options, impl="triton")
    assert route(logits, **options).expert_ids_TK.shape == (2, options["top_k"])
