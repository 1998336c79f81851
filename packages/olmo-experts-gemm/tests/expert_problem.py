"""A small expert layer with poisoned edges, and what its kernels must give, in float64.

The rows of the buffer past the last offset, the routes in them, and the weights of routes that go
nowhere hold NaN or an index far outside.

Shapes: T tokens, K experts a token, R = T*K rows of which n are routed, E experts, D, H widths.
"""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

# Numpy warns of the NaN that the tests plant, and of how the interpreter reads a loop's bounds.
INTERPRETED = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
FAR = 2**31 - 1
"""An index that no tensor here has."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Tokens, routes, weights, and the gradient of the tokens that come out."""

    activation: str
    offsets_E: Tensor
    route_R: Tensor
    """(R,) int32, `FAR` past the last offset."""
    row_TK: Tensor
    """(T, K) int32, -1 for no route."""
    x_TD: Tensor
    w_up: Tensor
    """(E, 2H, D), or (E, H, D) without a gate."""
    bias: Tensor
    w_down: Tensor
    weights: Tensor
    """(R,) float32, one a route; NaN where the route goes nowhere."""
    dy_TD: Tensor

    @property
    def top_k(self) -> int:
        return self.row_TK.shape[1]

    @property
    def rows(self) -> int:
        """How many rows are routed."""
        return int(self.offsets_E[-1])

    @property
    def routes_n(self) -> Tensor:
        return self.route_R[: self.rows].long()

    @property
    def tokens_n(self) -> Tensor:
        return self.routes_n // self.top_k

    @property
    def experts_n(self) -> Tensor:
        rows = torch.arange(self.rows)
        return torch.searchsorted(self.offsets_E, rows, right=True)

    def rows_of(self, tokens: Tensor) -> Tensor:
        """The tokens of every row, (R, width), NaN past the last offset."""
        rows = torch.full((len(self.route_R), tokens.shape[1]), torch.nan, dtype=tokens.dtype)
        rows[: self.rows] = tokens[self.tokens_n]
        return rows

    def weights_of_rows(self) -> Tensor:
        """(R,), NaN past the last offset."""
        weights_R = torch.full((len(self.route_R),), torch.nan)
        weights_R[: self.rows] = self.weights[self.routes_n]
        return weights_R


def make_problem(
    *,
    T: int = 23,
    K: int = 2,
    E: int = 5,
    D: int = 56,
    H: int = 40,
    activation: str = "swiglu",
    dtype: torch.dtype = torch.float32,
    empty: tuple[int, ...] = (1,),
    seed: int = 0,
) -> Problem:
    """A layer where the experts in `empty` get nothing, about one route in seven is none, and the
    tokens without a route, the first among them, are NaN.
    """
    draw = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(T, E, generator=draw).argsort(1)[:, :K]
    gone = torch.rand(T, K, generator=draw) < 1 / 7
    gone |= torch.isin(ids_TK, torch.tensor(empty, dtype=torch.long))
    gone[0] = True
    ids_N = ids_TK.masked_fill(gone, -1).flatten()

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=draw)).to(dtype)

    def tokens() -> Tensor:
        return normal(T, D).masked_fill(gone.all(1, keepdim=True), torch.nan)

    F = H if activation == "relu_squared" else 2 * H
    weights = torch.rand(T * K, generator=draw) + 0.1
    offsets_E, route_R, row_N = sorted_routes(ids_N, E)
    return Problem(
        activation=activation,
        offsets_E=offsets_E,
        route_R=route_R,
        row_TK=row_N.view(T, K),
        x_TD=tokens(),
        w_up=normal(E, F, D, scale=D**-0.5),
        bias=normal(E, F, scale=0.5),
        w_down=normal(E, D, H, scale=H**-0.5),
        weights=torch.where(ids_N < 0, torch.nan, weights),
        dy_TD=tokens(),
    )


def sorted_routes(ids_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`offsets_E`, `route_R` and `row_N` by torch's stable sort; `FAR` past the last row."""
    keys = torch.where(ids_N < 0, num_experts, ids_N)
    counts = torch.bincount(keys, minlength=num_experts + 1)[:num_experts]
    n = int(counts.sum())
    route_R = torch.full((len(ids_N),), FAR, dtype=torch.int32)
    route_R[:n] = keys.sort(stable=True).indices[:n]
    row_N = torch.full((len(ids_N),), -1, dtype=torch.int32)
    row_N[route_R[:n].long()] = torch.arange(n, dtype=torch.int32)
    return counts.cumsum(0).int(), route_R, row_N


def activated(hidden: Tensor, activation: str) -> Tensor:
    """The activation, by plain torch."""
    if activation == "relu_squared":
        return torch.relu(hidden) ** 2
    gate, up = hidden.chunk(2, dim=-1)
    if activation == "swiglu":
        return torch.nn.functional.silu(gate) * up
    if activation == "geglu":
        return torch.nn.functional.gelu(gate) * up
    assert activation == "clamped_swiglu", activation
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


def row_products(rows_nD: Tensor, w_EFD: Tensor, experts_n: Tensor) -> Tensor:
    """`w[e] @ row` of every row, in float64."""
    return torch.einsum("rd,rfd->rf", rows_nD.double(), w_EFD.double()[experts_n])


def outer_products(left_nF: Tensor, right_nD: Tensor, offsets_E: Tensor) -> Tensor:
    """`left_e.T @ right_e` of every expert, in float64."""
    ends = [0, *offsets_E.tolist()]
    return torch.stack(
        [left_nF[a:b].double().T @ right_nD[a:b].double() for a, b in pairwise(ends)]
    )


def down_gradients(problem: Problem, hidden_n: Tensor, weights_n: Tensor) -> tuple[Tensor, ...]:
    """`d hidden`, the weighted layer, and the terms (n, H) whose row sums are `ds`, by autograd."""
    hidden = hidden_n.double().requires_grad_()
    layer = activated(hidden, problem.activation)
    dy_nD = problem.dy_TD[problem.tokens_n].double()
    w_n = problem.w_down.double()[problem.experts_n]
    g = torch.einsum("rd,rdh->rh", dy_nD, w_n)
    weighted = layer * weights_n.double()[:, None]
    (weighted * g).sum().backward()
    assert hidden.grad is not None
    return hidden.grad, weighted.detach(), (g * layer).detach()


def assert_near(got: Tensor, want: Tensor, what: str, dtype: torch.dtype = torch.float32) -> None:
    assert got.shape == want.shape, what
    scale = want.abs().max().item() if want.numel() else 0.0
    error = (got.double() - want).abs().max().item() if want.numel() else 0.0
    assert error <= TOLERANCE[dtype] * scale, f"{what}: error {error}, scale {scale}"
