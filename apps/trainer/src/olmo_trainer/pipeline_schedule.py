"""The pipeline schedule that a layout names, and how the products of experts split their backward.

A schedule that splits the backward leaves the weight gradients of linear operations for later. The
executor knows torch's own; the grouped product of the experts is told here.
"""

from collections.abc import Callable
from typing import Any

import olmo_experts_gemm  # noqa: F401 - registers the operators named below
import olmo_routing  # noqa: F401 - likewise
import torch
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
from torch import Tensor

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
_GROUPED_MM = torch.ops.olmo_experts_gemm.grouped_mm.default
_GATE_PRODUCT = torch.ops.olmo_routing.gate_product.default
_GROUPED_OUTER = torch.ops.olmo_experts_gemm.grouped_outer.default


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


def _input_gradient(
    gradient_RF: Tensor, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor, impl: str
) -> Tensor:
    return _GROUPED_MM(gradient_RF, w_EFD.mT, offsets_E, impl)


def _weight_gradients(
    gradient_RF: Tensor, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor, impl: str
) -> tuple[Tensor | None, ...]:
    return (_GROUPED_OUTER(gradient_RF, x_RD, offsets_E, impl),)


SPLIT_RULES: dict[Callable[..., Any], SplitRule | None] = {
    _GROUPED_MM: SplitRule(_input_gradient, _weight_gradients),
    _GATE_PRODUCT: None,
}
"""`dx = dy @ w[e]` at once, `dw[e] = dy_e.T @ x_e` at any later time.

A gate stays whole: its product is small, and both halves need its logits (`olmo_routing`).
"""


def split_rules(config: TrainerConfig) -> dict[Callable[..., Any], SplitRule | None]:
    """Return how backwards split besides those of torch's own linear operations.

    With the rowwise dispatcher the experts' are not split: their rows lie in a receive buffer,
    which is written again once the input gradient is done.
    """
    if isinstance(config.layout.dispatcher, RowwiseDispatcher):
        return dict.fromkeys(SPLIT_RULES)
    return dict(SPLIT_RULES)
