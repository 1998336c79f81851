"""What arguments must be: each rule raises before anything is computed, sent or changed."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch


def require_number(name: str, value: object) -> float:
    """Return a number as a float.

    Raises:
        TypeError: it is none; a tensor is not read, which would wait for its device.
    """
    if not isinstance(value, Real):
        hint = "; give `float(...)` of it" if isinstance(value, torch.Tensor) else ""
        raise TypeError(f"`{name}` must be a number, got {_kind(value)}{hint}.")
    return float(value)


def require_range(name: str, value: object, low: float, high: float) -> float:
    """Return a number as a float, which must be in [low, high).

    Raises:
        TypeError: it is no number.
        ValueError: it is outside.
    """
    number = require_number(name, value)
    if not low <= number < high:
        raise ValueError(f"`{name}` must be in [{low:g}, {high:g}), got {value}.")
    return number


def require_positive(name: str, value: object) -> float:
    """Return a number above 0 as a float; infinity is one, NaN is not.

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0.
    """
    number = require_number(name, value)
    if not number > 0:
        raise ValueError(f"`{name}` must be > 0, got {value}.")
    return number


def require_count(name: str, value: object, least: int) -> None:
    """Raise unless `value` is a whole number of at least `least`.

    Raises:
        TypeError: it is no int.
        ValueError: it is smaller.
    """
    if not isinstance(value, int):
        raise TypeError(f"`{name}` must be a whole number, got {_kind(value)}.")
    if value < least:
        raise ValueError(f"`{name}` must be >= {least}, got {value}.")


def require_rule(name: str, value: object) -> None:
    """Raise unless `value` is None or a function of a parameter's name and the parameter.

    Raises:
        TypeError: it is something else.
    """
    if value is not None and not callable(value):
        raise TypeError(
            f"`{name}` must be a function of (name, parameter), or None, got {_kind(value)}; for "
            f"one answer for all: `lambda name, parameter: {value!r}`."
        )


def require_zero_d(name: str, value: Any) -> None:
    """Raise unless `value` is a 0-d tensor.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has dimensions.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"`{name}` must be a 0-d tensor, got {_kind(value)}; give `torch.tensor(...)` of it."
        )
    if value.ndim != 0:
        raise ValueError(f"`{name}` must be 0-d, got shape {tuple(value.shape)}.")


def require_betas(betas: object) -> tuple[float, float]:
    """Return the decay of two moments.

    Raises:
        TypeError: they are not two numbers.
        ValueError: one is outside [0, 1).
    """
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"`betas` must be two numbers, as (0.9, 0.95), got {betas!r}.")
    first, second = (require_range(f"betas[{i}]", beta, 0.0, 1.0) for i, beta in enumerate(betas))
    return first, second


def is_finite_above_zero(value: float) -> bool:
    """Say whether 0 < value < inf."""
    return 0 < value < math.inf


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
