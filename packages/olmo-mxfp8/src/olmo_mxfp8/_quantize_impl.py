"""Which implementation quantises: plain torch or Triton, and whether Triton runs at all."""

import importlib.util
from functools import cache
from typing import Literal, get_args

import torch

Impl = Literal["auto", "reference", "triton"]


def pick(impl: Impl, device: torch.device, reason: str | None = None) -> bool:
    """Return whether the kernel runs.

    Args:
        impl: What the caller asked for.
        device: Where the tensors are.
        reason: Why the kernels cannot take these arguments, or None when they can.

    Raises:
        ValueError: `impl` is unknown, or is "triton" where that cannot run.

    Note:
        "auto" is "triton" on CUDA where the kernel can take the arguments, else "reference".
    """
    if impl not in get_args(Impl):
        raise ValueError(f"`impl` must be one of {get_args(Impl)}, got {impl!r}.")
    if impl == "reference":
        return False
    if impl == "auto" and device.type != "cuda":
        return False
    reason = why_no_kernel(device.type, device.index) or reason
    if reason and impl == "triton":
        raise ValueError(
            f"`impl='triton'` cannot run: {reason}; use impl='reference' or impl='auto'."
        )
    return reason is None


def why_no_kernel(device: str, index: int | None) -> str | None:
    """Say why Triton's kernels cannot run on a device, or return None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device == "cuda":
        capability = torch.cuda.get_device_capability(index)
        if torch.version.cuda is None or capability[0] < 8:
            return f"it needs compute capability 8.0 or newer, this device has {capability}"
        return None
    if device == "cpu" and _interpreted():
        return None
    return f"it runs on CUDA, not on {device}"


# What the machine can do is a constant of a compiled graph: a tracer cannot follow `find_spec`.
why_no_kernel._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] # what torch.compiler.assume_constant_result sets, without importing the compiler


@cache
def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
