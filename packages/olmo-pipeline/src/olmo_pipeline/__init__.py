"""Pipeline schedules as data: build, validate, simulate and execute.

Everything but the executor is plain Python: `import olmo_pipeline` does not import torch. The
names of the executor load it at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._costs import Costs as Costs
from ._dual_pipe_v import dual_pipe_v as dual_pipe_v
from ._files import load_schedule as load_schedule
from ._files import save_schedule as save_schedule
from ._gpipe import gpipe as gpipe
from ._one_f_one_b import interleaved_one_f_one_b as interleaved_one_f_one_b
from ._one_f_one_b import one_f_one_b as one_f_one_b
from ._plot import plot as plot
from ._schedule import Action as Action
from ._schedule import Schedule as Schedule
from ._search import lower_bound as lower_bound
from ._search import search as search
from ._simulate import Span as Span
from ._simulate import Timeline as Timeline
from ._simulate import simulate as simulate
from ._split_layers import split_layers as split_layers
from ._v_shape import v_shape as v_shape
from ._validate import validate as validate
from ._zero_bubble import zero_bubble as zero_bubble

if TYPE_CHECKING:
    from ._executor import LeaseHooks as LeaseHooks
    from ._executor import PipelineExecutor as PipelineExecutor
    from ._executor import PipelineResult as PipelineResult
    from ._executor import SplitRule as SplitRule
    from ._executor import StageFunction as StageFunction
    from ._tied import TiedParameter as TiedParameter

__all__ = [
    "Action",
    "Costs",
    "LeaseHooks",
    "PipelineExecutor",
    "PipelineResult",
    "Schedule",
    "Span",
    "SplitRule",
    "StageFunction",
    "TiedParameter",
    "Timeline",
    "dual_pipe_v",
    "gpipe",
    "interleaved_one_f_one_b",
    "load_schedule",
    "lower_bound",
    "one_f_one_b",
    "plot",
    "save_schedule",
    "search",
    "simulate",
    "split_layers",
    "v_shape",
    "validate",
    "zero_bubble",
]


_WITH_TORCH = {
    "LeaseHooks": "._executor",
    "PipelineExecutor": "._executor",
    "PipelineResult": "._executor",
    "SplitRule": "._executor",
    "StageFunction": "._executor",
    "TiedParameter": "._tied",
}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(_WITH_TORCH[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
