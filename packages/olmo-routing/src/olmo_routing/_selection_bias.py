"""Balancing without a loss: a bias on the selection, moved after every step.

    bias_e += rate * sign(mean(counts) - counts_e)

An expert with too few routes is selected a little more easily in the next step. The weights come
from the unbiased scores, so that the bias never disturbs a gradient. Source: DeepSeek-V3 (arXiv
2412.19437) section 2.1.2; Wang et al. (arXiv 2408.15664) algorithm 1. Shapes: E experts.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._checks import check_number, check_positive, check_tensor
from ._float32_buffers import Float32Buffers


class SelectionBias(Float32Buffers):
    """The bias of one layer's router: a float32 buffer that only `update` changes.

    Args:
        num_experts: E.
        rate: how far one update moves an expert, finite and not negative. The attribute may be
            changed later; DeepSeek-V3 sets it to 0 near the end of training.
        device: of the buffer.

    Attributes:
        bias_E: float32, zeros at first, saved with the model. It stays float32 when the model is
            moved to a lower precision, in which steps of 0.001 would be lost, and when a checkpoint
            of another precision is loaded.

    Raises:
        TypeError: `num_experts` is not an int, or `rate` not a number.
        ValueError: an argument is out of range.
    """

    bias_E: Tensor

    def __init__(
        self, num_experts: int, rate: float, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        check_positive("num_experts", num_experts)
        check_number("rate", rate)
        if not 0 <= rate < math.inf:
            raise ValueError(f"`rate` must be finite and at least 0, got {rate}.")
        self.rate = rate
        self.register_buffer("bias_E", torch.empty(num_experts, dtype=torch.float32, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to zero, in place: a start afresh, also after the meta device."""
        nn.init.zeros_(self.bias_E)

    def update(self, counts_E: Tensor, *, group: dist.ProcessGroup | None = None) -> None:
        """Move the bias by one step, in place.

        Call it once an optimizer step, with the counts of all of its microbatches added up. A
        forward, a recomputed one included, never changes the bias.

        Args:
            counts_E: an integer tensor, the requested routes of each expert on this rank.
            group: sum the counts over these ranks first: all that see different tokens of this same
                layer (with a pipeline, the ranks of this stage and not the world). None = this
                rank's counts are already all of them.

        Raises:
            TypeError: the counts are not integers.
            ValueError: the counts do not have one entry an expert.
        """
        check_tensor("counts_E", counts_E)
        if counts_E.is_floating_point() or counts_E.dtype == torch.bool or counts_E.is_complex():
            raise TypeError(f"`counts_E` must be an integer tensor, got {counts_E.dtype}.")
        if counts_E.shape != self.bias_E.shape:
            raise ValueError(
                f"`counts_E` must have shape {tuple(self.bias_E.shape)}, "
                f"got {tuple(counts_E.shape)}."
            )
        counts_E = counts_E.to(torch.int64, copy=True)
        if group is not None:
            dist.all_reduce(counts_E, group=group)
        # E * (mean - counts), in integers: an expert exactly at the mean does not move.
        shortfall_E = counts_E.sum() - counts_E.numel() * counts_E
        # A decorated method would not compile where the module was built in the same graph.
        with torch.no_grad():
            self.bias_E.add_(shortfall_E.sign(), alpha=self.rate)

    def extra_repr(self) -> str:
        """Return what `repr` shows."""
        return f"num_experts={self.bias_E.numel()}, rate={self.rate}"
