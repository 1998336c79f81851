"""Rules that the reducer, the optimizers and the norm share about lists of parameters."""

from collections.abc import Iterable

import torch
from torch import nn

from ._partition import Range


def trainable(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that require a gradient, in the order given.

    A frozen parameter is left out: it has no main gradient, no optimizer state and no part in the
    norm. A parameter has one name: a tied weight is listed once, as `nn.Module.named_parameters`
    does.

    Raises:
        ValueError: a name or a parameter comes twice, or a parameter is not contiguous.
    """
    names: set[str] = set()
    first_name: dict[nn.Parameter, str] = {}
    parameters: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named_parameters:
        if name in names:
            raise ValueError(f"Each name must be listed once, got `{name}` twice.")
        if parameter in first_name:
            raise ValueError(
                f"Each parameter must be listed once, got the same one as "
                f"`{first_name[parameter]}` and `{name}`; list a tied weight under one name."
            )
        names.add(name)
        first_name[parameter] = name
        if not parameter.requires_grad:
            continue
        if not parameter.is_contiguous():
            raise ValueError(
                f"Parameter `{name}` must be contiguous, got shape {tuple(parameter.shape)} with "
                f"strides {parameter.stride()}; make it from `tensor.contiguous()`."
            )
        parameters.append((name, parameter))
    return parameters


def main_grad(name: str, parameter: nn.Parameter) -> torch.Tensor:
    """Return `parameter.main_grad`, the gradient summed over microbatches (and replicas).

    Raises:
        ValueError: there is none, or it has not the parameter's shape.
    """
    gradient = vars(parameter).get("main_grad")
    if gradient is None:
        raise ValueError(
            f"Parameter `{name}` must have a `main_grad`; build a `GradientReducer` over it first."
        )
    if gradient.shape != parameter.shape:
        raise ValueError(
            f"`main_grad` of `{name}` must have the parameter's shape {tuple(parameter.shape)}, "
            f"got {tuple(gradient.shape)}."
        )
    return gradient


def scattered_range(parameter: nn.Parameter) -> Range | None:
    """Return the only elements of `main_grad` that are summed over the replicas, or None for all.

    A reduce-scatter leaves its sum on each replica in that replica's range alone; the rest is
    scratch. The reducer says so in the attribute `main_grad_range`.
    """
    return vars(parameter).get("main_grad_range")
