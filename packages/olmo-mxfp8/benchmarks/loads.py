"""How rows are split among experts."""

import torch
from torch import Tensor

LOADS = ("uniform", "Dirichlet(1)", "one has half")


def draw_offsets(load: str, num_rows: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Return the ends of the experts' rows, (E,) int32, on the CPU; all rows are somebody's."""
    shares = torch.ones(num_experts)
    if load == "Dirichlet(1)":
        shares = -torch.rand(num_experts, generator=generator).log()
    elif load == "one has half":
        shares[num_experts // 2] = num_experts - 1
    ends = (shares.cumsum(0) / shares.sum() * num_rows).round().to(torch.int32)
    ends[-1] = num_rows
    return ends
