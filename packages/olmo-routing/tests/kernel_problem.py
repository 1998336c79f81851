"""Inputs and calls that the tests of the kernels share, for a GPU and for the interpreter.

Shapes: T tokens, K experts a token, E experts.
"""

import math
import os
from dataclasses import dataclass, fields

import pytest
import torch
from olmo_routing._route import GateOptions, compute_routing

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NEEDS_GPU_OR_INTERPRETER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
    # numpy on the interpreter, which computes the branch that a `where` leaves out as well.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide) .*:RuntimeWarning"),
]
SCALE = 2.5


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_logits(T, E, seed=0):
    """A third of the rows ordinary, a third full of ties, and the first nine hard."""
    logits = 2 * normal(T, E, seed=seed)
    # Not below zero: the sigmoids of x and -x sum to that of 0 twice, a tie that rounding breaks.
    logits[::3] = (logits[::3].abs() * 2).round() / 2
    hard = logits[: min(9, T)]
    hard[0:1, :1] = math.nan
    hard[1:2] = math.nan
    hard[1:2, ::2] = -torch.tensor(math.nan)
    hard[2:3, 1:2] = math.inf
    hard[3:4, 1::2] = math.inf
    hard[4:5] = -math.inf
    hard[5:6, ::2] = -math.inf
    hard[6:7], hard[6:7, ::2] = 0.0, -0.0
    hard[7:8], hard[7:8, 1:] = 100.0, -100.0
    hard[8:9, :1], hard[8:9, 1:2] = math.inf, math.nan
    return logits


@dataclass(frozen=True)
class Problem:
    """One call of the router: its logits, what goes with them, and two incoming gradients."""

    options: GateOptions
    logits_TE: torch.Tensor
    bias_E: torch.Tensor | None
    mask_T: torch.Tensor | None
    g_weights_TK: torch.Tensor
    g_scores_TE: torch.Tensor

    def route(self, logits_TE, impl, given_TK=None):
        def here(tensor):
            return None if tensor is None else tensor.to(logits_TE.device)

        return compute_routing(
            logits_TE,
            self.options,
            bias_E=here(self.bias_E),
            mask_T=here(self.mask_T),
            expert_ids_TK=here(given_TK),
            impl=impl,
        )

    def run(self, impl, device="cpu", dtype=torch.float32, given_TK=None, asked="weights scores"):
        """Every tensor of the result by name, and the gradient of the logits, on the CPU."""
        leaf = self.logits_TE.to(device, dtype).requires_grad_()
        routing = self.route(leaf, impl, given_TK)
        pairs = {
            "weights": (routing.weights_TK, self.g_weights_TK),
            "scores": (routing.scores_TE, self.g_scores_TE),
        }
        outputs, gradients = zip(*(pairs[name] for name in asked.split()), strict=True)
        gradients = [gradient.to(device, outputs[0].dtype) for gradient in gradients]
        (d_logits,) = torch.autograd.grad(outputs, leaf, gradients)
        made = {field.name: getattr(routing, field.name) for field in fields(routing)}
        return {name: t.detach().cpu() for name, t in {**made, "gradient": d_logits}.items()}


def make_problem(
    T,
    E,
    K,
    *,
    gate="softmax",
    renormalize=True,
    groups=(1, 1),
    biased=False,
    masked=False,
    logits=None,
):
    options = GateOptions(
        num_experts=E,
        top_k=K,
        gate=gate,
        renormalize=renormalize,
        route_scale=SCALE,
        num_groups=groups[0],
        topk_groups=groups[1],
    )
    return Problem(
        options=options,
        logits_TE=make_logits(T, E) if logits is None else logits,
        bias_E=0.3 * normal(E, seed=1) if biased else None,
        mask_T=normal(T, seed=2) < 0.7 if masked else None,
        g_weights_TK=normal(T, K, seed=3),
        g_scores_TE=normal(T, E, seed=4),
    )


def assert_as_good_as_the_reference(problem, device, given_TK=None, asked="weights scores"):
    """Ids and counts are equal; the rest at most twice as far from float64 as plain torch is."""
    plain = problem.run("reference", given_TK=given_TK, asked=asked)
    ids = plain["expert_ids_TK"]
    exact = problem.run("reference", dtype=torch.float64, given_TK=ids, asked=asked)
    got = problem.run("triton", device, given_TK=given_TK, asked=asked)
    assert got.keys() == plain.keys()
    for name, value in plain.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
        if name in ("expert_ids_TK", "counts_E", "bad_tokens"):
            assert torch.equal(got[name], value), name
        elif name != "logits_TE" and value.numel():
            error, allowed = ((r[name] - exact[name]).abs().max() for r in (got, plain))
            # A product of three float32 numbers of the size of the scale.
            bound = 2 * allowed + 2e-6 * exact[name].abs().max()
            assert error <= bound, f"{name}: error {error.item()}, allowed {bound.item()}"
    return got
