"""Forward mode, torch.func, and tensors without values: every derivative, or a clear error."""

import contextlib

import pytest
import torch
from olmo_routing import (
    Router,
    SelectionBias,
    admit,
    balance_loss,
    keep_routes,
    margin_balance_loss,
    measure_balance,
    measure_load,
    plan_rows,
    plan_tiles,
    route,
    route_fractions,
    router_z_loss,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

T, D, E, K = 5, 3, 4, 2
GENERATOR = torch.Generator().manual_seed(0)
X, V = torch.randn(2, T, D, dtype=torch.float64, generator=GENERATOR)
WEIGHT, DIRECTION = torch.randn(2, E, D, dtype=torch.float64, generator=GENERATOR)
MASK = torch.arange(T) != 2
MASKS = [None, MASK]
ROUTER = Router(D, E, K).double()
ROUTER_OF_LOGITS = Router(E, E, K)

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch's own, in jvp
    pytest.mark.filterwarnings("ignore:torch.searchsorted.*non-contiguous"),
]


def of_router(x, weight, mask=None, field="weights_TK"):
    return getattr(functional_call(ROUTER, {"weight_ED": weight}, (x,), {"mask_T": mask}), field)


def of_plain_torch(x, weight, mask=None, field="weights_TK"):
    """The same by torch's own operators alone."""
    if mask is not None:
        x = torch.where(mask[:, None], x, 0.0)
    return getattr(route(F.linear(x, weight), K, mask_T=mask, impl="reference"), field)


FIELDS = ["weights_TK", "scores_TE", "logits_TE"]


def dual(f):
    with forward_ad.dual_level():
        out = f(forward_ad.make_dual(X, V), forward_ad.make_dual(WEIGHT, DIRECTION))
        return forward_ad.unpack_dual(out).tangent


DERIVATIVES = {
    "jvp": lambda f: jvp(f, (X, WEIGHT), (V, DIRECTION))[1],
    "jacfwd": lambda f: jacfwd(f, argnums=(0, 1))(X, WEIGHT),
    "jacrev": lambda f: jacrev(f, argnums=(0, 1))(X, WEIGHT),
    "grad": lambda f: grad(lambda *a: f(*a).sin().sum(), argnums=(0, 1))(X, WEIGHT),
    "hessian": lambda f: hessian(lambda *a: f(*a).sin().sum(), argnums=(0, 1))(X, WEIGHT),
    "reverse over forward": lambda f: jacrev(jacfwd(f), argnums=1)(X, WEIGHT),
    "forward over reverse": lambda f: jacfwd(jacrev(f, argnums=1))(X, WEIGHT),
    "vmap of grad": lambda f: vmap(grad(lambda w, x: f(x, w).sin().sum()), (None, 0))(
        WEIGHT, torch.stack([X, V])
    ),
    "reverse twice": lambda f: torch.autograd.functional.hessian(
        lambda *a: f(*a).sin().sum(), (X, WEIGHT)
    ),
    "dual": dual,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_router_has_every_derivative(derivative, field, mask):
    of = DERIVATIVES[derivative]
    got = of(lambda x, w: of_router(x, w, mask, field))
    expected = of(lambda x, w: of_plain_torch(x, w, mask, field))
    torch.testing.assert_close(got, expected)
    leaves = torch.utils._pytree.tree_leaves(expected)
    assert any(leaf.abs().max() > 1e-3 for leaf in leaves)  # the zero of a missing rule would fail


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward_mode_of_a_model_in_low_precision_under_autocast(dtype):
    module = Router(D, E, K, dtype=dtype)
    x, v = X.to(dtype), V.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, tangent = jvp(lambda x: module(x).logits_TE, (x,), (v,))
    assert tangent.dtype == torch.float32
    assert torch.equal(logits, module(x).logits_TE)
    torch.testing.assert_close(tangent, v.float() @ module.weight_ED.float().T)


def test_a_bad_token_stays_alone_in_forward_mode_and_under_grad():
    x = X.clone()
    x[1, 0] = torch.nan

    def loss(weight):
        return of_router(x, weight).sin().sum()

    good = torch.arange(T) != 1
    expected = grad(lambda w: of_router(x[good], w).sin().sum())(WEIGHT)
    torch.testing.assert_close(grad(loss)(WEIGHT), expected)
    along = jvp(loss, (WEIGHT,), (DIRECTION,))[1]
    torch.testing.assert_close(along, (expected * DIRECTION).sum())


def test_an_ensemble_of_routers():
    routers = [Router(D, E, K).double() for _ in range(3)]
    xs = torch.stack([X, V, X + V])
    parameters, buffers = stack_module_state(routers)
    assert not buffers

    def weights(parameters, x):
        return functional_call(routers[0], parameters, (x,)).weights_TK

    got = vmap(weights)(parameters, xs)
    torch.testing.assert_close(
        got, torch.stack([r(x).weights_TK for r, x in zip(routers, xs, strict=True)])
    )
    got.sin().sum().backward()
    for r, x in zip(routers, xs, strict=True):
        r(x).weights_TK.sin().sum().backward()
    stacked = torch.stack([r.weight_ED.grad for r in routers])
    torch.testing.assert_close(parameters["weight_ED"].grad, stacked)


LOGITS = torch.randn(3, T, E, generator=GENERATOR)
SCORES = LOGITS.softmax(-1)
IDS = LOGITS.topk(K).indices
COUNTS = torch.arange(3 * 2 * 2 * 4).view(3, 2, 2, 4)
BATCHED = {
    "route": (lambda z: route(z, K, num_groups=2, topk_groups=1), (LOGITS,)),
    "Router": (
        lambda x, w: functional_call(ROUTER_OF_LOGITS, {"weight_ED": w}, (x,)),
        (LOGITS, SCORES[:, :E]),
    ),
    "plan_rows": (lambda ids: plan_rows(ids, E, align=4), (IDS,)),
    "keep_routes": (keep_routes, (IDS, COUNTS[:, 0, 0] % 3)),
    "plan_tiles": (lambda ends: plan_tiles(ends, 999, 4), (COUNTS[:, 0, 0].cumsum(1).int(),)),
    "admit": (lambda counts: admit(counts, 7), (COUNTS,)),
    "balance_loss": (balance_loss, (SCORES, IDS)),
    "margin_balance_loss": (margin_balance_loss, (SCORES, IDS)),
    "route_fractions": (lambda ids: route_fractions(ids, E), (IDS,)),
    "router_z_loss": (router_z_loss, (LOGITS,)),
    "measure_balance": (
        lambda s, ids: measure_balance(s, ids, kept_ids_TK=ids, weights_TK=s[:, :K]),
        (SCORES, IDS),
    ),
    "measure_load": (measure_load, (COUNTS[:, 0, 0], SCORES[:, 0])),
}


@pytest.mark.parametrize("name", BATCHED)
def test_vmap_gives_each_element_what_it_gets_alone(name):
    function, inputs = BATCHED[name]
    torch.manual_seed(0)
    got = vmap(function, randomness="same")(*inputs)
    for index in range(3):
        torch.manual_seed(0)
        alone = function(*(x[index] for x in inputs))
        mine = torch.utils._pytree.tree_map(lambda x, index=index: x[index], got)
        pairs = zip(
            torch.utils._pytree.tree_leaves(mine),
            torch.utils._pytree.tree_leaves(alone),
            strict=True,
        )
        for have, want in pairs:
            torch.testing.assert_close(have, want)


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("kind", ["fake", "meta", "symbolic"])
def test_tensors_without_values_have_the_shapes_of_those_with(name, kind):
    function, inputs = BATCHED[name]
    inputs = tuple(x[0] for x in inputs)
    shapes = [(x.shape, x.dtype) for x in torch.utils._pytree.tree_leaves(function(*inputs))]
    if kind == "symbolic":

        def leaves(*inputs):
            return torch.utils._pytree.tree_leaves(function(*inputs))

        got = make_fx(leaves, tracing_mode="symbolic")(*inputs)(*inputs)
    elif kind == "meta":
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
            got = function(*(x.to("meta") for x in inputs))
    else:
        with FakeTensorMode() as mode:
            got = function(*(mode.from_tensor(x) for x in inputs))
    got = torch.utils._pytree.tree_leaves(got)
    assert [(x.shape, x.dtype) for x in got] == shapes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_router_needs_no_autocast_of_its_device(device):
    module = Router(D, E, K, selection_bias=SelectionBias(E, 0.1)).to(device)
    x = torch.ones(T, D, device=device, requires_grad=True)
    routing = module(x)
    routing.weights_TK.sum().backward()
    assert routing.logits_TE.dtype == torch.float32
    assert module.weight_ED.grad.shape == (E, D)


@pytest.mark.parametrize("inside", ["vmap", "dual"])
def test_kernels_asked_for_by_name_refuse_what_they_cannot_differentiate(inside):
    def call(z):
        return route(z, K, impl="triton").weights_TK

    context = forward_ad.dual_level() if inside == "dual" else contextlib.nullcontext()
    message = r"cannot run: its kernels have no forward mode and no rules for torch\.func; use impl"
    with context, pytest.raises(ValueError, match=message):
        vmap(call)(LOGITS) if inside == "vmap" else call(LOGITS[0])
