"""A small decoder over bytes whose every feed-forward layer is a mixture of experts.

Shapes: B sequences, S positions, T = B S tokens, D width, E experts, K experts a token, H expert
hidden width, I = E H.
"""

from dataclasses import dataclass

import torch
from olmo_routing import Router, Routing
from torch import Tensor, nn
from torch.nn import functional as F

_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the model; `length` is of positions, `renormalize` is that of `route`."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    experts: int = 32
    top_k: int = 4
    hidden: int = 16
    length: int = 64
    renormalize: bool = True


class Experts(nn.Module):
    """SwiGLU experts in plain torch: all of them for every token, weighted by the routing.

    E / K times the work of a sparse layer, but few operations and no sizes to ask the device for:
    at these widths the fastest way on a CPU, and this experiment is about curves, not speed.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        inner = sizes.experts * sizes.hidden
        self.up = nn.Linear(sizes.width, 2 * inner, bias=False)
        self.w_down_ID = nn.Parameter(torch.randn(inner, sizes.width) * sizes.hidden**-0.5)

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of each token's experts, `y_TD`."""
        weights_TE = torch.zeros_like(routing.scores_TE)
        weights_TE = weights_TE.scatter(1, routing.expert_ids_TK, routing.weights_TK)
        gate_TI, up_TI = self.up(x_TD).chunk(2, dim=1)
        hidden_TEH = (F.silu(gate_TI) * up_TI).unflatten(1, (weights_TE.shape[1], -1))
        return (hidden_TEH * weights_TE[:, :, None]).flatten(1) @ self.w_down_ID


class Block(nn.Module):
    """Causal attention, then experts, each on a normalised residual stream."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.before_attention = nn.RMSNorm(sizes.width)
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.before_experts = nn.RMSNorm(sizes.width)
        self.router = Router(
            sizes.width,
            sizes.experts,
            sizes.top_k,
            renormalize=sizes.renormalize,
            # Weights of mean about 1/K at the start, whether or not they are renormalised.
            route_scale=1.0 if sizes.renormalize else sizes.experts / sizes.top_k,
        )
        self.experts = Experts(sizes)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Routing]:
        """Return the new residual stream and where its tokens went."""
        shape = x_BSD.shape
        qkv = self.qkv(self.before_attention(x_BSD)).view(*shape[:2], 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.out(attended.transpose(1, 2).reshape(shape))
        x_TD = self.before_experts(x_BSD).flatten(0, 1)
        routing = self.router(x_TD)
        return x_BSD + self.experts(x_TD, routing).view(shape), routing


class ByteModel(nn.Module):
    """The decoder: bytes to logits of the next byte, and the routing of every layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_BYTES, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, _BYTES, bias=False)

    def forward(self, bytes_BS: Tensor) -> tuple[Tensor, list[Routing]]:
        """Return the logits, (B, S, 256), and a `Routing` a layer."""
        x_BSD = self.embedding(bytes_BS) + self.positions.weight[: bytes_BS.shape[1]]
        routings = []
        for block in self.blocks:
            x_BSD, routing = block(x_BSD)
            routings.append(routing)
        return self.head(self.norm(x_BSD)), routings
