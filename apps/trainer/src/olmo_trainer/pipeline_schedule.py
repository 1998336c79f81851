"""The pipeline schedule that a layout names, and which layers leave weight gradients for later.

A schedule that splits the backward leaves the weight gradients of linear operations for later. The
executor knows torch's own; layers with a backward of their own ask it, and are told here to.

With the rowwise dispatcher the experts do not ask: their rows lie in a receive buffer, which is
written again once the input gradient is done.
"""

from collections.abc import Callable
from typing import Any

import olmo_routing  # noqa: F401 - registers the operator named below
import torch
from olmo_experts_gemm import Defer, Experts
from olmo_mxfp8 import MXExperts, MXLinear
from olmo_pipeline import (
    Schedule,
    SplitRule,
    dual_pipe_v,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    search,
    v_shape,
    zero_bubble,
)
from torch import nn

from olmo_trainer.config import (
    DualPipeV,
    GPipe,
    InterleavedOneFOneB,
    LayoutConfig,
    OneFOneB,
    RowwiseDispatcher,
    Searched,
    TrainerConfig,
    VShape,
    ZeroBubbleH1,
    ZeroBubbleV,
)

SEARCH_TRIES = 500  # about a second for 4 ranks, ten for 16 ranks and 64 microbatches
_EXPERTS = torch.ops.olmo_experts_gemm
_GATE_PRODUCT = torch.ops.olmo_routing.gate_product.default


def build_schedule(layout: LayoutConfig, num_microbatches: int) -> Schedule:
    """Return the pipeline schedule that `layout` names."""
    ranks = layout.pipeline
    match layout.schedule:
        case GPipe():
            return gpipe(ranks, num_microbatches)
        case OneFOneB():
            return one_f_one_b(ranks, num_microbatches)
        case InterleavedOneFOneB(chunks=chunks):
            return interleaved_one_f_one_b(ranks, num_microbatches, chunks)
        case VShape():
            return v_shape(ranks, num_microbatches)
        case ZeroBubbleH1():
            return zero_bubble(ranks, num_microbatches, "h1")
        case ZeroBubbleV():
            return zero_bubble(ranks, num_microbatches, "v")
        case DualPipeV():
            return dual_pipe_v(ranks, num_microbatches)
        # Bounded by a number of tries, not by time, with fixed seeds: all ranks find the same.
        case Searched(memory_cap=memory_cap, backward=backward):
            return search(
                ranks,
                num_microbatches,
                memory_cap=memory_cap,
                split_backward=backward == "split",
                tries=SEARCH_TRIES,
            )


def split_rules(config: TrainerConfig) -> dict[Callable[..., Any], SplitRule | None]:
    """Return the operations whose backward stays whole on purpose, and so needs no warning.

    A gate's product is small, and both halves of its backward need its logits (`olmo_routing`).
    """
    whole = [_GATE_PRODUCT]
    if not _experts_wait(config):
        whole += [_EXPERTS.grouped_mm.default, _EXPERTS.expert_mlp.default]
    return dict.fromkeys(whole)


def leave_weight_gradients(part: nn.Module, defer: Defer, config: TrainerConfig) -> None:
    """Let the MXFP8 layers and the experts of `part` ask `defer`, as far as they can wait."""
    kinds = (MXLinear, MXExperts, Experts) if _experts_wait(config) else (MXLinear,)
    for layer in part.modules():
        if isinstance(layer, kinds):
            layer.defer = defer


def _experts_wait(config: TrainerConfig) -> bool:
    return not isinstance(config.layout.dispatcher, RowwiseDispatcher)
