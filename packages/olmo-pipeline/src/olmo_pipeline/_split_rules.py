"""How the backward of a linear operation is cut in two: rules for torch's own, and their form.

For `y = x @ w.T + b` with x (.., D), w (F, D), b (F), and g the gradient of y (.., F),

    input gradient     dx = g @ w                    what the stage before waits for
    weight gradients   dw = g.T @ x,  db = sum(g)    over all leading dims; nobody waits for them

Both need nothing from each other, so the second may be computed at any later time. An operation
whose backward has this form (a grouped product of experts, a quantised linear) is cut by a rule of
its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _always(*arguments: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class SplitRule:
    """The two halves of the backward of `y = op(x, *others)`, where some of `others` are weights.

    Both halves get the gradient of `y` and then the operation's arguments in order, detached, and
    run without autograd.

    Args:
        input_gradient: Returns the gradient of `x`, shaped like it.
        weight_gradients: Returns one entry per argument after `x`: the gradient of a weight, None
            for an argument that is no trainable weight. Entries at the end may be left out.
        applies: Says by the arguments whether this rule holds for a call; others stay whole.
    """

    input_gradient: Callable[..., Tensor]
    weight_gradients: Callable[..., tuple[Tensor | None, ...]]
    applies: Callable[..., bool] = _always

    def __post_init__(self) -> None:
        """Raise TypeError unless all are functions."""
        for name in ("input_gradient", "weight_gradients", "applies"):
            if not callable(getattr(self, name)):
                raise TypeError(f"`{name}` must be a function, got {getattr(self, name)!r}.")


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


# Under autocast a product takes fp32 arguments and makes a low-precision result: the halves
# multiply in the type of its gradient, as autograd does, and return the types of the arguments.
def _linear_input(gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return (gradient @ weight.to(gradient.dtype)).to(x.dtype)


def _linear_weights(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    rows = _rows(gradient)
    of_weight = (rows.mT @ _rows(x).to(gradient.dtype)).to(weight.dtype)
    if bias is None:
        return of_weight, None
    if bias.dim() == 1 and len(bias) == rows.shape[1]:
        return of_weight, rows.sum(0).to(bias.dtype)
    of_bias = gradient.sum_to_size(bias.shape) if bias.dim() else gradient.sum()  # broadcast
    return of_weight, of_bias.to(bias.dtype)


def _matmul_input(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return (gradient @ weight.mT.to(gradient.dtype)).to(x.dtype)


def _matmul_weights(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
    return ((_rows(x).mT.to(gradient.dtype) @ _rows(gradient)).to(weight.dtype),)


def _is_matrix(x: Tensor, weight: Any, *others: Any) -> bool:
    return isinstance(weight, Tensor) and weight.dim() == 2


_MATMUL = SplitRule(_matmul_input, _matmul_weights, _is_matrix)

TORCH_RULES: Mapping[Callable[..., Any], SplitRule] = {
    F.linear: SplitRule(_linear_input, _linear_weights, _is_matrix),
    torch.matmul: _MATMUL,
    torch.mm: _MATMUL,
    torch.Tensor.matmul: _MATMUL,
    torch.Tensor.__matmul__: _MATMUL,
    torch.Tensor.mm: _MATMUL,
}


def positional(
    op: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Return the arguments in order, or None if keywords stand where their place is not known."""
    if op is F.linear:
        return _linear_arguments(*arguments, **keywords)
    return None if keywords else arguments


def _linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    return input, weight, bias
