"""Whether this machine has what `torch.compile` needs, and how a model is called with it."""

from importlib.util import find_spec

import torch

from olmo_trainer.config import DenseCompile, TrainerConfig
from olmo_trainer.model.regions import EAGER, Regions, compiled


def build_regions(config: TrainerConfig) -> Regions:
    """Return the dense stretches of a model as the configuration wants them called."""
    chosen = config.compile
    if not isinstance(chosen, DenseCompile):
        return EAGER
    return compiled(chosen.backend, in_mxfp8=config.precision.mxfp8)


def require_compiler(config: TrainerConfig, device: torch.device) -> None:
    """Raise `ValueError` where nothing here makes the code asked for; before any process group."""
    chosen = config.compile
    if not isinstance(chosen, DenseCompile) or chosen.backend != "inductor":
        return
    if device.type == "cuda":
        missing = None if find_spec("triton") is not None else "triton on a GPU"
    else:
        missing = None if _has_cpp_compiler() else "a C++ compiler on a CPU (g++, or CXX names it)"
    if missing is not None:
        raise ValueError(
            f"compile.backend = 'inductor' needs {missing}, and there is none; install it, or set "
            "compile.kind=none"
        )


def _has_cpp_compiler() -> bool:
    # Only who asks for a compiler pays for the import.
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        return False
    return True
