"""What holds for every backend whatever the routes, forward and backward, in one process."""

from collections.abc import Callable

import pytest
import torch
from olmo_ep_comm import Dispatched, LocalDispatcher, VirtualRowwise
from olmo_ep_comm._rowwise import moves
from rowwise_problem import Inputs, Problem, expert_results, loss_of
from torch import Tensor

KINDS = ["local", "put", "get"]
E, D = 8, 8
CASE = Problem(tokens=(5, 0, 7, 3), num_experts=E, top_k=3, width=D)
Experts = Callable[[Dispatched, range], Tensor]


def make_virtual(kind: str, parts: list[Inputs], **options) -> VirtualRowwise:
    return VirtualRowwise(
        num_ranks=len(parts),
        num_experts=E,
        max_tokens=max(len(x_TD) for x_TD, _, _ in parts),
        width=D,
        top_k=parts[0][1].shape[1],
        dtype=parts[0][0].dtype,
        capacity=200,
        admit=lambda requested, capacity: requested,
        combine_by=kind,
        **options,
    )


def layer(kind: str, parts: list[Inputs], experts: Experts = expert_results) -> list[Tensor]:
    """Return the results of each rank; "local" holds the tokens of all of them."""
    if kind == "local":
        dispatcher = LocalDispatcher(num_experts=E)
        x_TD, ids, weights_TK = (torch.cat(list(part)) for part in zip(*parts, strict=True))
        sent = dispatcher.dispatch(x_TD, ids, weights_TK)
        y_TD = dispatcher.combine(experts(sent, range(E)), sent.handle)
        return list(y_TD.split([len(x_TD) for x_TD, _, _ in parts]))
    ranks = make_virtual(kind, parts)
    sents = ranks.dispatch(*map(list, zip(*parts, strict=True)))
    results = [experts(one, ranks.local_experts(rank)) for rank, one in enumerate(sents)]
    return ranks.combine(results, sents[0].handle)


def run(kind: str, parts: list[Inputs]) -> list[list[Tensor]]:
    """Return results, gradients of tokens and gradients of weights, of each rank."""
    parts = [(x.detach().requires_grad_(), i, w.detach().requires_grad_()) for x, i, w in parts]
    sums = layer(kind, parts)
    leaves = [leaf for x, _, w in parts for leaf in (x, w)]
    grads = torch.autograd.grad(loss_of(sums), leaves)
    return [[value.detach() for value in sums], list(grads[::2]), list(grads[1::2])]


def inputs(case: Problem = CASE) -> list[Inputs]:
    return [case.inputs(rank) for rank in range(len(case.tokens))]


def weigh(sent: Dispatched, local: range) -> Tensor:
    """Experts that return their rows."""
    return sent.rows_RD * sent.row_weights_R[:, None].to(sent.rows_RD.dtype)


def experts_of(parameter_E: Tensor, is_bias: bool) -> Experts:
    """Experts that scale rows, or forget them and return a bias; rows without one become NaN."""

    def experts(sent: Dispatched, local: range) -> Tensor:
        counts_L = sent.offsets_E.diff(prepend=sent.offsets_E.new_zeros(1))
        own_N1 = parameter_E[local.start : local.stop].repeat_interleave(counts_L)[:, None]
        end = len(own_N1)
        y_ND = own_N1.expand(-1, D) if is_bias else sent.rows_RD[:end] * own_N1
        undefined = torch.full_like(sent.rows_RD[end:], float("nan"))
        return torch.cat([y_ND * sent.row_weights_R[:end, None], undefined])

    return experts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_add_up_to_one_bring_every_token_home(kind, top_k, dtype):
    case = Problem(tokens=(5, 0, 7, 3), num_experts=E, top_k=top_k, width=D, dtype=dtype, seed=1)
    parts = []
    for x_TD, ids, _ in inputs(case):
        ids[:1] = -1
        share_T1 = 1 / (ids >= 0).sum(1, keepdim=True).clamp(min=1)
        parts.append((x_TD.requires_grad_(), ids, share_T1.expand(ids.shape)))
    results = layer(kind, parts, weigh)
    loss_of(results).backward()
    # In bfloat16 the weight is rounded, and so are the product, a rank's sum and the whole sum.
    rounding = 4 * 2.0**-9 if dtype == torch.bfloat16 else 2 * top_k * 2.0**-24
    for y_TD, (x_TD, ids, _) in zip(results, parts, strict=True):
        is_out_T1 = (ids < 0).all(1, keepdim=True)
        want = x_TD.detach().masked_fill(is_out_T1, 0).float()
        error = (y_TD.detach().float() - want).abs()
        assert y_TD.dtype == dtype
        assert (error <= want.abs() * (0 if top_k == 1 else rounding)).all()
        assert x_TD.grad is not None
        assert (x_TD.grad == 0).all(1).tolist() == is_out_T1[:, 0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_tokens_is_that_of_the_results(kind):
    parts = inputs()
    orders = [torch.randperm(len(x_TD)) for x_TD, _, _ in parts]
    mixed = [
        (x[order], ids[order], w[order]) for (x, ids, w), order in zip(parts, orders, strict=True)
    ]
    for got, want in zip(run(kind, mixed), run(kind, parts), strict=True):
        ordered = [value[order] for value, order in zip(want, orders, strict=True)]
        assert all(map(torch.equal, got, ordered))


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_slots_is_that_of_the_sum_alone(kind):
    order = torch.tensor([2, 0, 1])
    got = run(kind, [(x, ids[:, order], w[:, order]) for x, ids, w in inputs()])
    want = run(kind, inputs())
    want[2] = [value[:, order] for value in want[2]]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_gets_the_same_on_every_rank(kind):
    whole = [torch.cat(list(part)) for part in zip(*inputs(), strict=True)]
    seen = []
    for sizes in ([5, 0, 7, 3], [0, 15, 0, 0], [3, 4, 4, 4]):
        x, ids, weights = (part.split(sizes) for part in whole)
        moved = run(kind, list(zip(x, ids, weights, strict=True)))
        seen.append([torch.cat(values) for values in moved])
    assert all(map(torch.equal, seen[0], seen[1]))
    assert all(map(torch.equal, seen[0], seen[2]))


@pytest.mark.parametrize("kind", ["put", "get"])
def test_combine_is_the_backward_of_dispatch(kind):
    parts = [(x.requires_grad_(), ids, w) for x, ids, w in inputs()]
    ranks = make_virtual(kind, parts)
    sents = ranks.dispatch(*map(list, zip(*parts, strict=True)))
    u = [torch.randn_like(one.rows_RD) for one in sents]
    home = ranks.combine(u, sents[0].handle)
    torch.autograd.backward([one.rows_RD for one in sents], u)
    assert all(torch.equal(x.grad, y_TD) for (x, _, _), y_TD in zip(parts, home, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_does_not_depend_on_what_else_needs_one(kind):
    """Tokens alone, weights alone, or the experts alone."""

    def gradients(names: set[str]) -> dict[str, list[Tensor]]:
        scale_E = torch.linspace(1, 2, E).requires_grad_("experts" in names)
        parts = [
            (x.requires_grad_("x" in names), ids, w.requires_grad_("weights" in names))
            for x, ids, w in inputs()
        ]
        loss_of(layer(kind, parts, experts_of(scale_E, is_bias=False))).backward()
        every = {"experts": [scale_E], "x": [p[0] for p in parts], "weights": [p[2] for p in parts]}
        found = {name: [leaf.grad for leaf in every[name]] for name in names}
        assert all(leaf.grad is None for name in every.keys() - names for leaf in every[name])
        return {name: [v for v in values if v is not None] for name, values in found.items()}

    want = gradients({"experts", "x", "weights"})
    for name, values in want.items():
        alone = gradients({name})[name]
        assert len(alone) == len(values) == (1 if name == "experts" else 4)
        assert all(map(torch.equal, alone, values)), name
        assert torch.cat([value.flatten() for value in values]).abs().sum() > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [(9,), (5, 4), (3, 0, 4, 2)])
def test_the_bias_of_an_expert_counts_once(kind, tokens):
    parts = inputs(Problem(tokens=tokens, num_experts=E, top_k=3, width=D))
    bias_E = torch.ones(E, requires_grad=True)
    results = layer(kind, parts, experts_of(bias_E, is_bias=True))
    counted_E = torch.zeros(E)
    for y_TD, (_, ids, weights_TK) in zip(results, parts, strict=True):
        routed_TK = weights_TK.masked_fill(ids < 0, 0)
        torch.testing.assert_close(y_TD, routed_TK.sum(1, keepdim=True).expand(y_TD.shape))
        counted_E.index_add_(0, ids.clamp(min=0).flatten(), routed_TK.flatten())
    torch.stack([y_TD.sum() for y_TD in results]).sum().backward()
    torch.testing.assert_close(bias_E.grad, D * counted_E)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_zero_keeps_its_gradient(kind):
    parts = [(x, ids, torch.zeros_like(w).requires_grad_()) for x, ids, w in inputs()]
    layer(kind, parts, weigh)[0].sum().backward()
    x_TD, ids, weights_TK = parts[0]
    torch.testing.assert_close(weights_TK.grad, x_TD.sum(1, keepdim=True) * (ids >= 0))


def strided(value: Tensor) -> Tensor:
    return value.T.contiguous().T


def sliced(value: Tensor) -> Tensor:
    """The same values in a memory that starts one number after a whole word."""
    return torch.cat([value.new_zeros(1), value.flatten()])[1:].view(value.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [strided, sliced])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_values_lie_in_memory_does_not_matter(kind, form, dtype):
    """Tokens, ids and weights, results, and the gradients of both ways."""
    case = Problem(tokens=(5, 0, 7, 3), num_experts=E, top_k=3, width=D, dtype=dtype)
    seen = []
    for lie in (form, torch.clone):
        leaves = [x.requires_grad_() for x, _, _ in inputs(case)]
        for_weights = [w.requires_grad_() for _, _, w in inputs(case)]
        parts = [
            (lie(x), lie(ids.int()), lie(w))
            for x, (_, ids, _), w in zip(leaves, inputs(case), for_weights, strict=True)
        ]

        def experts(sent: Dispatched, local: range, lie=lie) -> Tensor:
            sent.rows_RD.register_hook(lie)
            return lie(expert_results(sent, local))

        results = layer(kind, parts, experts)
        torch.autograd.backward(results, [lie(y_TD.detach().cos()) for y_TD in results])
        seen.append([*results, *(leaf.grad for leaf in (*leaves, *for_weights))])
    assert all(map(torch.equal, *seen))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_a_gradient_is_refused(kind):
    parts = [(x.requires_grad_(), ids, w) for x, ids, w in inputs()]
    loss = loss_of(layer(kind, parts))
    (grad,) = torch.autograd.grad(loss, [parts[0][0]], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


class Unseen:
    """The moves as kernels and other ranks make them: autograd does not see what they write."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers = tuple(buffers)

    def __getattr__(self, name):
        def unseen(*arguments):
            with torch.autograd._unsafe_preserve_version_counter(self.buffers):
                return getattr(moves, name)(*arguments)

        return unseen


def test_rows_that_outlive_their_lease_are_an_error_and_not_other_rows():
    parts = [(x.requires_grad_(), ids, w) for x, ids, w in inputs()]
    ranks = make_virtual("get", parts)
    received = ranks._buffers.rows.buffers[0].own
    object.__setattr__(ranks._buffers.settings, "moves", Unseen(received))
    factor = torch.ones((), requires_grad=True)
    sents = ranks.dispatch(*map(list, zip(*parts, strict=True)))
    late = [one.rows_RD.detach() * factor for one in sents]  # as a delayed gradient of weights
    results = [expert_results(one, ranks.local_experts(r)) for r, one in enumerate(sents)]
    loss_of(ranks.combine(results, sents[0].handle)).backward()  # in time
    assert torch.autograd.grad(late[0][0].sum(), factor, retain_graph=True)[0] != 0
    others = [(1 - x.detach(), ids, w) for x, ids, w in parts]
    with torch.no_grad():
        ranks.dispatch(*map(list, zip(*others, strict=True)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late[0][0].sum().backward()
