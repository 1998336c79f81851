"""A dispatcher by name, for a config."""

from typing import Any

import torch.distributed as dist

from ._all_to_all import AllToAllDispatcher
from ._interface import Dispatcher
from ._local import LocalDispatcher

_BACKENDS = ("local", "all_to_all")


def create_dispatcher(
    backend: str,
    *,
    num_experts: int,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Dispatcher:
    """Return the dispatcher called `backend`.

    Args:
        backend: "local" (every expert in this process) or "all_to_all" (experts spread over
            `group`).
        num_experts: Experts of the whole group.
        group: The ranks that share the experts; for "all_to_all" None is the default group, and
            "local" takes none.
        options: Settings of one backend; neither of these two has any.

    Raises:
        ValueError: If there is no such backend, "local" is given a group, or the backend refuses
            `num_experts` or `group`.
        TypeError: If the backend does not have one of the `options`.
        RuntimeError: If "all_to_all" finds no process group.
    """
    if backend not in _BACKENDS:
        names = ", ".join(f'"{name}"' for name in _BACKENDS)
        raise ValueError(f"`backend` must be one of {names}, got {backend!r}.")
    if options:
        names = ", ".join(f"`{name}`" for name in sorted(options))
        raise TypeError(f'The backend "{backend}" takes no options, got {names}; remove them.')
    if backend == "all_to_all":
        return AllToAllDispatcher(num_experts=num_experts, group=group)
    if group is not None:
        raise ValueError(
            '`group` must be None for the backend "local", which keeps every expert in this '
            'process; use "all_to_all" to spread them over a group.'
        )
    return LocalDispatcher(num_experts=num_experts)
