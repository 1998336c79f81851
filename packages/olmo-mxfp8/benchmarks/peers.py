"""The peers, each imported when it is asked for: what is missing names itself in the report."""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def olmo_core() -> Any:
    """The MXFP8 kernels of Olmo-core 3, of which this imports the one module.

    Its packages import what the kernels do not need (`cached_path`), so their `__init__` is left
    out.
    """
    if "olmo_core.kernels.mxfp8_utils" in sys.modules:
        return sys.modules["olmo_core.kernels.mxfp8_utils"]
    spec = importlib.util.find_spec("olmo_core")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("ai2-olmo-core is not installed (its wheel alone is enough)")
    folder = next(iter(spec.submodule_search_locations))
    for name, path in (("olmo_core", folder), ("olmo_core.kernels", f"{folder}/kernels")):
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [path]
            sys.modules[name] = package
    return importlib.import_module("olmo_core.kernels.mxfp8_utils")


def torchao() -> Any:
    """The MXFP8 kernels of torchao, which raise unless the device is one they are for."""
    return importlib.import_module("torchao.prototype.mx_formats.kernels")


def experts_gemm() -> Any:
    """`olmo_experts_gemm`, the BF16 experts of this repository."""
    return importlib.import_module("olmo_experts_gemm")


def torch_grouped_mm() -> Callable[..., Tensor]:
    """Torch's own grouped product, which became public in torch 2.10."""
    return getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
