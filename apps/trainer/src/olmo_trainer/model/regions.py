"""The dense stretches of a model, each one function that `torch.compile` can make one of.

    enter | attention mixes | leave | dense feed-forward | enter | ... | logits | sums
                                    | router, dispatcher, experts | add shared | join |

Attention's mixing, the exchange of context ranks, routing, dispatch and the experts' products are
operations of their own. Between them lie norms, projections, rotary positions, activations,
residuals and the loss: many small passes over the same numbers. A stretch takes modules and tensors
and gives tensors, so one compiled form serves every layer: weights are arguments.

Shapes: B sequences, S positions, D width, A query heads, G key/value heads, C channels a head,
T tokens, V vocabulary.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from olmo_trainer.model.attention import Attention, turn


def enter_attention(
    norm: nn.Module, attention: Attention, x_BSD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what attention mixes: query (B, A, S, C), key and value (B, G, S, C)."""
    return attention.enter(norm(x_BSD))


def leave_attention(
    attention: Attention, out_norm: nn.Module, next_norm: nn.Module, x_BSD: Tensor, mixed: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the hidden states after attention, and their norm for the feed-forward layer.

    `mixed` is (B, A, S, C).
    """
    h_BSD = x_BSD + out_norm(attention.leave(mixed))
    return h_BSD, next_norm(h_BSD)


def dense_feed_forward(
    feed_forward: nn.Module, out_norm: nn.Module, h_BSD: Tensor, normed_BSD: Tensor
) -> Tensor:
    """Return the hidden states after a dense feed-forward layer."""
    return h_BSD + out_norm(feed_forward(normed_BSD))


def add_shared(shared: nn.Module, x_TD: Tensor, y_TD: Tensor) -> Tensor:
    """Add the shared expert to what the routed ones gave."""
    return y_TD + shared(x_TD)


def join(out_norm: nn.Module, h_BSD: Tensor, y_BSD: Tensor) -> Tensor:
    """Return the hidden states after a routed layer that gave `y_BSD`."""
    return h_BSD + out_norm(y_BSD)


def logits(norm: nn.Module, head: nn.Module, h_BSD: Tensor) -> Tensor:
    """Return the logits (B, S, V) of the last hidden states."""
    return head(norm(h_BSD))


def token_sums(
    logits_BSV: Tensor, targets_BS: Tensor, squares: bool
) -> tuple[Tensor, Tensor | None]:
    """Return, summed over the tokens that have a target (>= 0), the cross entropy in float32.

    And with `squares` the squares of the log-sum-exps of their logits.
    """
    logits_TV, targets_T = logits_BSV.float().flatten(0, 1), targets_BS.flatten()
    total = F.cross_entropy(logits_TV, targets_T, reduction="sum")
    if not squares:
        return total, None
    squares_T = torch.logsumexp(logits_TV, dim=-1).square()
    return total, torch.where(targets_T >= 0, squares_T, 0.0).sum()


@dataclass(frozen=True)
class Regions:
    """The stretches as a model calls them: as they stand here, or compiled."""

    enter_attention: Callable[..., tuple[Tensor, Tensor, Tensor]] = enter_attention
    turn: Callable[..., tuple[Tensor, Tensor]] = turn
    leave_attention: Callable[..., tuple[Tensor, Tensor]] = leave_attention
    dense_feed_forward: Callable[..., Tensor] = dense_feed_forward
    add_shared: Callable[..., Tensor] = add_shared
    join: Callable[..., Tensor] = join
    logits: Callable[..., Tensor] = logits
    token_sums: Callable[..., tuple[Tensor, Tensor | None]] = token_sums


EAGER = Regions()
_OF_LAYERS = {"attention": ("enter_attention", "leave_attention"), "shared": ("add_shared",)}


def compiled(backend: str, *, in_mxfp8: Collection[str] = ()) -> Regions:
    """Return the stretches compiled, each at its first call with arguments of a kind.

    A stretch is one graph, or an error says what of it cannot be.

    Args:
        backend: Of `torch.compile`.
        in_mxfp8: Layers that multiply in MXFP8, of `attention` and `shared`: their products are
            operations of their own, so the stretches that hold them stay as they are.
    """
    kept = {name for layer in in_mxfp8 for name in _OF_LAYERS.get(layer, ())}
    made: dict[str, Any] = {
        each.name: _compiled(getattr(EAGER, each.name), backend)
        for each in fields(Regions)
        if each.name not in kept
    }
    return Regions(**made)


def _compiled(stretch: Callable[..., Any], backend: str) -> Callable[..., Any]:
    run = torch.compile(stretch, backend=backend, fullgraph=True)

    def call(*arguments: Any) -> Any:
        # A split backward watches the calls of torch by a mode, which a graph would have to trace;
        # weights of a graph cannot wait for their gradients in any case.
        with torch._C.DisableTorchFunction():
            return run(*arguments)

    return call
