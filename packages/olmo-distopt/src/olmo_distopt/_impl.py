"""Which implementation runs: plain torch, or the Triton kernels."""

from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch

Impl = Literal["auto", "reference", "triton"]


def require_impl(impl: str) -> None:
    """Raise for a word that names no implementation, or for "triton" without triton.

    Raises:
        ValueError: `impl` is unknown.
        RuntimeError: `impl` is "triton" and triton is not installed.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"`impl` must be one of {get_args(Impl)}, got {impl!r}.")
    if impl == "triton" and find_spec("triton") is None:
        raise RuntimeError("`impl='triton'` needs triton; install it or use `impl='reference'`.")


def runs_kernel(impl: Impl, device: torch.device, reason: str | None = None) -> bool:
    """Return whether the Triton kernels run on `device`.

    "auto" is "triton" on CUDA where the kernels can take the tensors, else "reference".

    Args:
        impl: what the caller asked for.
        device: where the tensors are.
        reason: why the kernels cannot take them; None when they can.

    Raises:
        ValueError: `impl` is "triton" where that cannot run.
    """
    if impl == "reference" or (impl == "auto" and device.type != "cuda"):
        return False
    if device.type == "cuda":
        reason = _why_no_kernel(device.index) or reason
    else:
        from triton import knobs

        if device.type != "cpu" or not knobs.runtime.interpret:
            reason = f"must be given CUDA tensors, got {device.type}"
    if reason and impl == "triton":
        raise ValueError(f"`impl='triton'` {reason}; use `impl='reference'` or `impl='auto'`.")
    return reason is None


@cache
def _why_no_kernel(index: int | None) -> str | None:
    """Say why Triton's kernels cannot run on a CUDA device, or return None when they can."""
    if find_spec("triton") is None:
        return "needs triton, which is not installed"
    capability = torch.cuda.get_device_capability(index)
    if torch.version.cuda is None or capability[0] < 8:
        return f"needs compute capability 8.0 or newer, this device has {capability}"
    return None
