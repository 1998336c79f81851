"""Which implementation runs: the plain-torch reference, or the Triton kernels."""

import importlib.util
from functools import cache
from typing import Literal, get_args

import torch

Impl = Literal["auto", "reference", "triton"]


def pick(impl: Impl, device: torch.device, reason: str | None = None) -> bool:
    """Return whether the kernels run.

    Args:
        impl: What the caller asked for.
        device: Where the tensors are.
        reason: Why the kernels cannot take these arguments, or None when they can.

    Raises:
        ValueError: `impl` is unknown, or is "triton" where that cannot run.

    Note:
        "auto" is "reference" on every device.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"`impl` must be one of {get_args(Impl)}, got {impl!r}.")
    # The kernels have not run on a GPU yet: nobody gets them without asking for them.
    if impl != "triton":
        return False
    reason = _why_no_kernel(device) or reason
    if reason and impl == "triton":
        raise ValueError(
            f"`impl='triton'` cannot run: {reason}; use impl='reference' or impl='auto'."
        )
    return reason is None


def _why_no_kernel(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if torch.version.cuda is None or capability[0] < 8:
            return f"it needs compute capability 8.0 or newer, this device has {capability}"
        return None
    if device.type == "cpu" and _interpreted():
        return None
    return f"it runs on CUDA, not on {device.type}"


@cache
def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
