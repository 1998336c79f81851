"""What is measured: the shapes, how loads and routers are drawn, and the goals.

Shapes: R rows, D inner width, F outer width, E experts; T tokens, H hidden width, K experts a
token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_STD = 0.02


@dataclass(frozen=True)
class ProductShape:
    """One grouped product, and its gradients, of R rows."""

    R: int
    D: int
    F: int
    E: int

    @property
    def name(self) -> str:
        """The name on the command line and in reports."""
        return f"{self.R}x{self.D}x{self.F}x{self.E}"

    @property
    def flops(self) -> float:
        """Of one product."""
        return 2.0 * self.R * self.D * self.F


@dataclass(frozen=True)
class LayerShape:
    """One layer from tokens to tokens."""

    T: int
    D: int
    H: int
    E: int
    K: int

    @property
    def name(self) -> str:
        """The name on the command line and in reports."""
        return f"{self.T}x{self.D}x{self.H}x{self.E}x{self.K}"

    @property
    def flops(self) -> float:
        """Of the expert products of a forward pass; three times as many with the backward pass."""
        return 6.0 * self.T * self.K * self.D * self.H


PRODUCTS = (
    ProductShape(65536, 4096, 4096, 16),
    ProductShape(16384, 4096, 4096, 16),
    ProductShape(262144, 2048, 1024, 64),
    ProductShape(131072, 2048, 2048, 64),
    ProductShape(131072, 4096, 1536, 128),
)
LAYERS = (
    LayerShape(32768, 4096, 1024, 128, 8),
    LayerShape(32768, 2048, 1024, 64, 8),
    LayerShape(16384, 4096, 2560, 32, 4),
    LayerShape(32768, 2048, 1536, 64, 4),
    LayerShape(16384, 4096, 4096, 32, 4),
)
FINE = (LayerShape(24576, 1536, 256, 128, 8), LayerShape(32768, 2048, 512, 256, 8))

# Small enough for a CPU; widths that torch's own product takes.
TINY_PRODUCTS = (ProductShape(96, 32, 48, 4), ProductShape(40, 16, 16, 8))
TINY_LAYERS = (LayerShape(64, 32, 48, 8, 2), LayerShape(32, 16, 32, 8, 4))
TINY_FINE = (LayerShape(48, 32, 16, 16, 4),)

LOADS = ("uniform", "dirichlet", "zipf")
ROUTINGS = ("learned-like", "skewed")

# (topic, what) -> least geometric mean, least worst cell, aimed geometric mean; beside the peer
# named. Ratios are speed over speed, but for memory, where they are bytes over bytes.
GOALS = {
    ("product", "all", "torch"): "geomean >= 1.00, worst >= 0.95; aim 1.08, worst >= 1.00",
    ("layer", "forward+backward", "sonicmoe"): "geomean >= 1.00; aim 1.10",
    ("layer", "forward+backward", "Olmo-core 3.0.0 (recorded)"): "geomean >= 1.06; aim 1.17",
    ("fine", "forward+backward", "sonicmoe"): "geomean >= 1.00; aim 1.10",
    ("memory", "held", "sonicmoe"): "at most 1.00",
}

# TFLOP/s, forward and backward, learned-like routing, compiled, on one H200 with torch 2.11.
# It needs more than this benchmark may ask for, so it does not run here.
OLMO_CORE = dict(zip((s.name for s in LAYERS), (514.0, 510.0, 570.0, 502.0, 575.0), strict=True))


def draw_counts(load: str, R: int, E: int, generator: torch.Generator) -> Tensor:
    """Rows of each expert, (E,) int64 on the CPU; they sum to R.

    Args:
        load: `"uniform"`; `"dirichlet"`, shares drawn from Dirichlet(1); `"zipf"`, the expert of
            rank r gets a share of 1/r, and the ranks are shuffled.
        R: Rows.
        E: Experts.
        generator: On the CPU.
    """
    if load == "uniform":
        shares_E = torch.ones(E, dtype=torch.float64)
    elif load == "dirichlet":
        # Independent exponential variables over their sum are Dirichlet(1).
        shares_E = -torch.rand(E, generator=generator, dtype=torch.float64).clamp_min(1e-300).log()
    else:
        ranks_E = torch.randperm(E, generator=generator).double()
        shares_E = 1.0 / (1.0 + ranks_E)
    counts_E = (shares_E / shares_E.sum() * R).floor().long()
    left = R - int(counts_E.sum())
    counts_E[torch.randperm(E, generator=generator)[:left]] += 1
    return counts_E


def draw_tokens_and_router(
    shape: LayerShape, routing: str, device: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Tokens (T, D) and a router (E, D), both bfloat16.

    The logits `x @ wg.T` of a random router are nearly independent, as a balanced router's are:
    the busiest expert gets about 1.1 times the mean. For `"skewed"` the first column of the tokens
    is 1, so that the first column of the router is a bias: half a standard deviation of the logits
    times the normal quantile of the expert's shuffled rank, which gives the busiest of 128 experts
    about five times the mean, and the least busy a fiftieth of it.

    In bfloat16 the K-th and the next logit of a token are often equal, and then two right
    implementations choose different experts. Such tokens are drawn again, so that results compare.
    """
    T, D, E = shape.T, shape.D, shape.E
    wg_ED = (torch.randn(E, D, device=device) * WEIGHT_STD).bfloat16()
    if routing == "skewed":
        ranks_E = torch.randperm(E, generator=generator).double()
        quantiles_E = torch.special.ndtri((ranks_E + 0.5) / E)
        wg_ED[:, 0] = (0.5 * WEIGHT_STD * D**0.5 * quantiles_E).to(wg_ED)

    def draw(count: int) -> Tensor:
        x = torch.randn(count, D, device=device).bfloat16()
        if routing == "skewed":
            x[:, 0] = 1.0
        return x

    x_TD = draw(T)
    for _ in range(50 if shape.K < E else 0):
        best = torch.nn.functional.linear(x_TD, wg_ED).topk(shape.K + 1, dim=-1).values
        tied_T = best[:, -1] == best[:, -2]
        count = int(tied_T.sum())
        if count == 0:
            break
        x_TD[tied_T] = draw(count)
    else:
        if shape.K < E:
            raise RuntimeError(
                f"Tokens of {shape.name} still tie after 50 draws; draw wider logits."
            )
    return x_TD, wg_ED
