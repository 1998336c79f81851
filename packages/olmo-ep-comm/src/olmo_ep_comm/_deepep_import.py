"""Import `deep_ep` when it is needed, and say which of its several forms is installed.

Four libraries install under this name. What tells them apart is what they have, not what they call
themselves: DeepEP v2 exports the class `Buffer` of v1 too, and a fork keeps its version string.
Source: https://github.com/deepseek-ai/DeepEP at dd758ca.
"""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

_NEEDS = (
    "DeepEP v2 needs a GPU of compute capability 9.0 or newer, NCCL 2.30.4 or newer (the very file "
    "it was built against), and a CUDA toolkit with nvcc at run time"
)


@dataclass(frozen=True, slots=True)
class DeepEP:
    """An installed DeepEP v2.

    Attributes:
        module: The module `deep_ep`.
        has_cached_expand: Whether a second dispatch along the same routes may be an expanded one:
            since 2.1.
    """

    module: Any
    has_cached_expand: bool


def import_deepep() -> DeepEP:
    """Import DeepEP v2.

    Raises:
        RuntimeError: If it is not installed, refuses to load, or is v1 or the hybrid-ep branch.
    """
    try:
        module = importlib.import_module("deep_ep")
    except ModuleNotFoundError as error:
        if error.name != "deep_ep":
            raise _refusal(error) from error
        raise RuntimeError(
            'The backend "deepep" needs DeepEP v2 and there is no module `deep_ep`; install '
            'https://github.com/deepseek-ai/DeepEP, or use the backend "all_to_all" or "rowwise".'
        ) from error
    except Exception as error:  # a wrong NCCL is an AssertionError there, no CUDA a TypeError
        raise _refusal(error) from error
    if not (hasattr(module, "ElasticBuffer") and hasattr(module, "EPHandle")):
        raise RuntimeError(
            'The backend "deepep" needs DeepEP v2, with its class `ElasticBuffer`, but the '
            f"installed `deep_ep` is {_name_of(module)}; install v2 in its place, both have one "
            "name."
        )
    parameters = inspect.signature(module.ElasticBuffer.dispatch).parameters
    fields = inspect.signature(module.EPHandle.__init__).parameters
    has_cached_expand = (
        "do_zero_padding" in parameters and "num_unaligned_recv_tokens_per_expert" in fields
    )
    return DeepEP(module, has_cached_expand)


def _refusal(error: Exception) -> RuntimeError:
    return RuntimeError(
        f"`deep_ep` is installed and cannot be imported: {type(error).__name__}: {error}. {_NEEDS}."
    )


def _name_of(module: Any) -> str:
    if hasattr(module, "HybridEPBuffer"):
        return "the hybrid-ep branch"
    return "DeepEP v1" if hasattr(module, "Buffer") else "none that is known"
