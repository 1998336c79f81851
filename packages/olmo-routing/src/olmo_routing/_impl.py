"""Which implementation runs: the plain-torch reference, or the Triton kernels."""

from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

Impl = Literal["auto", "reference", "triton"]


def pick(impl: Impl, device: torch.device, reason: str | None) -> bool:
    """Return whether the kernels run.

    Args:
        impl: What the caller asked for.
        device: Where the tensors are.
        reason: Why the kernels cannot take these arguments, or None when they can.

    Raises:
        ValueError: `impl` is unknown, or is "triton" where that cannot run.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"`impl` must be one of {get_args(Impl)}, got {impl!r}.")
    if impl == "reference" or (impl == "auto" and device.type != "cuda"):
        return False
    reason = _why_no_kernel(device.type, device.index) or reason
    if reason and impl == "triton":
        raise ValueError(
            f"`impl='triton'` cannot run: {reason}; use impl='reference' or impl='auto'."
        )
    return reason is None


def _why_no_kernel(device: str, index: int | None) -> str | None:
    """Say why no Triton kernel runs on a device, or return None."""
    if device not in ("cpu", "cuda"):
        return f"it runs on CUDA, not on {device}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if device == "cuda":
        capability = torch.cuda.get_device_capability(index)
        if torch.version.cuda is None or capability[0] < 8:
            return f"it needs compute capability 8.0 or newer, this device has {capability}"
        return None
    from triton import knobs

    return None if knobs.runtime.interpret else "it runs on CUDA, not on cpu"


# What the machine can do is a constant of a compiled graph: a tracer cannot follow `find_spec`.
_why_no_kernel._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] # what torch.compiler.assume_constant_result sets, without importing the compiler


def launching_on(tensor: Tensor) -> torch.cuda.device | torch.cuda.device_of:
    """Make the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device_of(tensor)
