"""Which implementation runs: plain torch, or the Triton kernels."""

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


def runs_kernel(impl: Impl, device: torch.device) -> bool:
    """Return whether the Triton kernels run on `device`.

    "auto" is "reference" everywhere, which has the bits of torch's own optimizers.

    Raises:
        ValueError: `impl` is "triton" and the device cannot run it.
    """
    if impl != "triton":
        return False
    from triton import knobs

    if device.type == "cuda" or (device.type == "cpu" and knobs.runtime.interpret):
        return True
    raise ValueError(
        f"`impl='triton'` must be given CUDA tensors, got {device.type}; use `impl='reference'`."
    )
