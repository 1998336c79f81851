"""Which implementation runs: the plain-torch reference, or the Triton kernels, within limits."""

from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

from ._transforms import under_transform

Impl = Literal["auto", "reference", "triton"]

MAX_EXPERTS = 1024
"""Experts that one program of any kernel holds: `_triton/` keeps a row of them in registers."""
MAX_TOP_K = 64
"""Experts a token that the gate's kernel selects, one after the other."""


def check_impl(impl: Impl) -> None:
    """Raise ValueError unless the name is one of those that `impl` takes."""
    if impl not in get_args(Impl):
        raise ValueError(f"`impl` must be one of {get_args(Impl)}, got {impl!r}.")


def too_many_experts(num_experts: int) -> str | None:
    """Say why the kernels cannot take so many experts, or return None when they can."""
    if num_experts > MAX_EXPERTS:
        return f"its kernels take up to {MAX_EXPERTS} experts, got {num_experts}"
    return None


def pick(impl: Impl, device: torch.device, reason: str | None) -> bool:
    """Return whether the kernels run.

    Args:
        impl: What the caller asked for.
        device: Where the tensors are.
        reason: Why the kernels cannot take these arguments, or None when they can.

    Raises:
        ValueError: `impl` is unknown, or is "triton" where that cannot run.
    """
    check_impl(impl)
    if impl == "reference" or (impl == "auto" and device.type != "cuda"):
        return False
    if under_transform():
        reason = "its kernels have no forward mode and no rules for torch.func"
    reason = reason or _why_no_kernel(device.type, device.index)
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
