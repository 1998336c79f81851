"""A dispatcher by name, for a config."""

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ._all_to_all import AllToAllDispatcher
from ._deepep import DeepEPDispatcher
from ._interface import Dispatcher
from ._local import LocalDispatcher
from ._rowwise.dispatcher import RowwiseDispatcher

_BACKENDS: dict[str, Callable[..., Dispatcher]] = {
    "local": LocalDispatcher,
    "all_to_all": AllToAllDispatcher,
    "rowwise": RowwiseDispatcher,
    "deepep": DeepEPDispatcher,
}


def create_dispatcher(
    backend: str,
    *,
    num_experts: int,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Dispatcher:
    """Return the dispatcher called `backend`.

    Args:
        backend: "local" (every expert in this process), or, for experts spread over `group`,
            "all_to_all", "rowwise" or "deepep".
        num_experts: Experts of the whole group.
        group: The ranks that share the experts; None is the default group, and "local" takes none.
        options: Settings of that backend: the other arguments of its class.

    Raises:
        ValueError: If there is no such backend, "local" is given a group, or the backend refuses
            one of the values.
        TypeError: If the backend does not have one of the `options`, or needs one more.
        RuntimeError: If the backend needs a process group and there is none.
    """
    if backend not in _BACKENDS:
        names = ", ".join(f'"{name}"' for name in _BACKENDS)
        raise ValueError(f"`backend` must be one of {names}, got {backend!r}.")
    if backend == "local" and group is not None:
        raise ValueError(
            '`group` must be None for the backend "local", which keeps every expert in this '
            'process; use "all_to_all" to spread them over a group.'
        )
    make = _BACKENDS[backend]
    _check_options(backend, make, options)
    return make(
        num_experts=num_experts, **({} if backend == "local" else {"group": group}), **options
    )


def _check_options(backend: str, make: Callable[..., Dispatcher], options: dict[str, Any]) -> None:
    parameters = dict(inspect.signature(make).parameters)
    for own in ("num_experts", "group"):
        parameters.pop(own, None)
    unknown = sorted(options.keys() - parameters.keys())
    if unknown:
        raise TypeError(
            f'The backend "{backend}" has the options {_names(parameters)}, got {_names(unknown)}; '
            f"remove what it does not have."
        )
    needed = [name for name, value in parameters.items() if value.default is value.empty]
    missing = [name for name in needed if name not in options]
    if missing:
        raise TypeError(f'The backend "{backend}" needs the options {_names(missing)}; give them.')


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)
