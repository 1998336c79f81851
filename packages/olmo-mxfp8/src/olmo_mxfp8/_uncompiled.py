"""Functions that `torch.compile` leaves alone."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def uncompiled(*, reason: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a compiled caller break its graph at the decorated function and run it eagerly.

    This is `torch.compiler.disable`, which imports the compiler, seconds of work, at once: here it
    is applied only after someone else has imported it.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        disabled: Callable[_P, _R] | None = None

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            nonlocal disabled
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            if disabled is None:
                disabled = cast(Callable[_P, _R], torch.compiler.disable(function, reason=reason))
            return disabled(*args, **kwargs)

        # As `torch.compiler.disable` marks functions: the first call may be the compiler's, which
        # could not look into the lines above.
        call._torchdynamo_disable = True  # pyright: ignore[reportAttributeAccessIssue]
        call._torchdynamo_disable_msg = reason  # pyright: ignore[reportAttributeAccessIssue]
        return call

    return decorate
