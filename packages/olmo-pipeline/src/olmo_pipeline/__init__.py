"""Pipeline schedules as data: build, validate, simulate and execute.

Everything but the executor is plain Python: `import olmo_pipeline` does not import torch. The
names of the executor load it at first use.
"""

from typing import TYPE_CHECKING, Any

from ._one_f_one_b import interleaved_one_f_one_b as interleaved_one_f_one_b
from ._one_f_one_b import one_f_one_b as one_f_one_b
from ._schedule import Action as Action
from ._schedule import Schedule as Schedule
from ._simulate import Span as Span
from ._simulate import Timeline as Timeline
from ._simulate import simulate as simulate
from ._split import split_layers as split_layers
from ._validate import validate as validate

if TYPE_CHECKING:
    from ._executor import PipelineExecutor as PipelineExecutor
    from ._executor import PipelineResult as PipelineResult
    from ._executor import StageFunction as StageFunction

__all__ = [
    "Action",
    "PipelineExecutor",
    "PipelineResult",
    "Schedule",
    "Span",
    "StageFunction",
    "Timeline",
    "interleaved_one_f_one_b",
    "one_f_one_b",
    "simulate",
    "split_layers",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name in ("PipelineExecutor", "PipelineResult", "StageFunction"):
        from . import _executor

        return getattr(_executor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
