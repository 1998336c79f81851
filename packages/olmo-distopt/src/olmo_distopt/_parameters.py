"""Rules that the reducer, the optimizers and the norm share about lists of parameters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import GeneratorType

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
        TypeError: what is listed are not pairs of a name and a parameter.
        ValueError: a name or a parameter comes twice, a parameter is not contiguous or not of real
            floating numbers, or a generator has been used up before.
    """
    names: set[str] = set()
    first_name: dict[nn.Parameter, str] = {}
    parameters: list[tuple[str, nn.Parameter]] = []
    for name, parameter in listed_pairs(named_parameters):
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
        if not parameter.is_floating_point():
            raise ValueError(
                f"Parameter `{name}` must be of a real floating dtype, got {parameter.dtype}."
            )
        if not parameter.is_contiguous():
            raise ValueError(
                f"Parameter `{name}` must be contiguous, got shape {tuple(parameter.shape)} with "
                f"strides {parameter.stride()}; make it from `tensor.contiguous()`."
            )
        parameters.append((name, parameter))
    return parameters


def listed_pairs(named_parameters: Iterable[object]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the pairs that are listed, frozen parameters among them.

    Raises:
        TypeError: what is listed are not pairs of a name and a parameter.
        ValueError: it is a generator that has been used up before.
    """
    form = "`named_parameters` must list (name, parameter), as `model.named_parameters()` does"
    if isinstance(named_parameters, Mapping):
        raise TypeError(f"{form}, got a mapping; give its `.items()`.")
    if isinstance(named_parameters, nn.Module) or not isinstance(named_parameters, Iterable):
        raise TypeError(f"{form}, got a {type(named_parameters).__name__}.")
    if isinstance(named_parameters, GeneratorType) and named_parameters.gi_frame is None:
        raise ValueError(
            f"{form}, got a generator that has been used up; call `model.named_parameters()` once "
            "more, or keep a list of it."
        )
    for pair in named_parameters:
        match pair:
            case (str() as name, nn.Parameter() as parameter):
                yield name, parameter
            case _:
                raise TypeError(f"{form}, got {_words(pair)}.")


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_words(each) for each in value)})"
    return f"a {type(value).__name__}"


def require_own_memory(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise unless every parameter is a plain tensor, and no two share memory.

    Raises:
        ValueError: two overlap, or one is a tensor of another kind, such as a `DTensor`, whose
            elements lie elsewhere.
    """
    places: list[tuple[str, int, int, str]] = []
    for name, parameter in parameters:
        if type(parameter.data) is not torch.Tensor:
            raise ValueError(
                f"Parameter `{name}` must be a plain tensor, got a "
                f"{type(parameter.data).__name__}; replicas are told by `ReplicaGroups`, and no "
                "other wrapper shards or replicates the model."
            )
        first = parameter.data_ptr()
        if parameter.numel() and not parameter.is_meta:
            places.append((str(parameter.device), first, first + parameter.nbytes, name))
    places.sort()
    for (device, _, end, name), (other_device, first, _, other) in pairwise(places):
        if device == other_device and first < end:
            raise ValueError(
                f"Each parameter must have memory of its own, but `{name}` and `{other}` overlap; "
                "tie weights by making them one `nn.Parameter`, listed under one name."
            )


def require_values(name: str, parameter: nn.Parameter) -> None:
    """Raise for a parameter on the meta device.

    Raises:
        ValueError: it is there.
    """
    if parameter.is_meta:
        raise ValueError(
            f"Parameter `{name}` must hold values, but it is on the meta device; materialise the "
            "model first, as with `model.to_empty(device=...)` and an initialisation."
        )


def main_grad(name: str, parameter: nn.Parameter) -> torch.Tensor:
    """Return `parameter.main_grad`, the gradient summed over microbatches (and replicas).

    Raises:
        ValueError: there is none, or it has not the parameter's shape.
        RuntimeError: its reducer has not reduced it.
    """
    gradient = vars(parameter).get("main_grad")
    if gradient is None:
        raise ValueError(
            f"Parameter `{name}` must have a `main_grad`; build a `GradientReducer` over it first."
        )
    window = gradient_window(parameter)
    if window is not None:
        window.require_reduced()
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


class GradientWindow:
    """Whether a reducer's gradients are summed, and may be used; one for all of its parameters.

    Attributes:
        is_reduced: False from `GradientReducer.zero()` on, True from `reduce()` on.
    """

    __slots__ = ("is_reduced",)

    def __init__(self) -> None:
        self.is_reduced = False

    def require_reduced(self) -> None:
        """Raise unless the gradients are summed.

        Raises:
            RuntimeError: they are not.
        """
        if not self.is_reduced:
            raise RuntimeError(
                "Gradients must be summed before they are measured, clipped or stepped with: call "
                "`reduce()` of their `GradientReducer` after the backward passes, and `zero()` "
                "only for the next ones."
            )


def gradient_window(parameter: nn.Parameter) -> GradientWindow | None:
    """Return the window of the reducer that made `main_grad`, or None of one made by hand."""
    return vars(parameter).get("main_grad_window")
