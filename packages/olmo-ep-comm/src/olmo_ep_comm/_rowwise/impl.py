"""Which moves run: plain torch, or the Triton kernels."""

from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch

from . import moves as reference_moves

Impl = Literal["auto", "reference", "triton"]


def pick_moves(impl: Impl, device: torch.device) -> Any:
    """Return the module of moves for buffers on `device`.

    Raises:
        ValueError: If `impl` is unknown, or is "triton" where that cannot run.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"`impl` must be one of {get_args(Impl)}, got {impl!r}.")
    if impl == "reference" or (impl == "auto" and device.type != "cuda"):
        return reference_moves
    reason = _why_no_kernel(device)
    if reason:
        raise ValueError(f"`impl={impl!r}` cannot run: {reason}; use impl='reference'.")
    from olmo_ep_comm._triton import moves as kernel_moves

    return kernel_moves


def _why_no_kernel(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda":
        return None
    from triton import knobs

    return None if knobs.runtime.interpret else f"it runs on CUDA, not on {device.type}"
