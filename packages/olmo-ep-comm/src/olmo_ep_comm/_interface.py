"""What every backend offers: one call signature, one result.

Shapes: T tokens of this rank, K slots a token, E experts, R rows held by this rank, D model width.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Dispatched:
    """The rows that this rank's experts work on.

    Rows are ordered by expert, then source rank, then token, then slot, so that they are bitwise
    the same for every backend and group size.

    Attributes:
        rows_RD: One copy of a token for each of its routes, in the dtype of the tokens. Rows past
            `offsets_E[-1]`, if any, are undefined: nobody may read them.
        row_weights_R: Combine weight of each row. Differentiable: its gradient arrives at
            `weights_TK`.
        offsets_E: int32, inclusive ends of the rows of each expert **of this rank**, as torch's
            `grouped_mm` takes them.
        num_dropped: 0-d int64, routes of this rank's tokens that found no room.
        handle: What `combine` needs to send the rows home. It holds its own state: any number of
            dispatches may be alive at once.
        encoded: With a codec, the data (R, D) and scales (R, S) of which `rows_RD` is the decoded
            form, bitwise as they were encoded on the ranks of the tokens; else None.
    """

    rows_RD: Tensor
    row_weights_R: Tensor
    offsets_E: Tensor
    num_dropped: Tensor
    handle: object
    encoded: tuple[Tensor, Tensor] | None = None


@runtime_checkable
class Dispatcher(Protocol):
    """Brings tokens to the ranks of their experts, and the results home.

    Attributes:
        num_experts: Experts of the whole group.
        local_experts: The global ids of this rank's experts, whose rows `dispatch` returns here.
    """

    num_experts: int
    local_experts: range

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Bring each token to the ranks of its experts.

        Args:
            x_TD: Tokens of this rank; float32, bfloat16 or float64. T may be 0 and may differ
                between ranks; D and the dtype may not.
            expert_ids_TK: Global expert id of each slot, int64 or int32, in [0, `num_experts`), or
                -1 for no route. A token that names an expert twice gets two rows; "deepep" refuses
                it, and "rowwise" where its `capacity` is None and has no room for both.
            weights_TK: Combine weights, float32; "local" and "all_to_all" take float64 too. Ignored
                where the id is -1.

        Returns:
            The rows of this rank's experts. Differentiable in `x_TD` and `weights_TK`.
        """
        ...

    def combine(self, y_RD: Tensor, handle: object) -> Tensor:
        """Bring the rows home and add up each token's, in slot order.

        A pure sum: the expert side has already multiplied each row by its weight.

        Args:
            y_RD: One result for each row of the dispatch, in its shape and dtype.
            handle: The `handle` of that dispatch.

        Returns:
            Sums (T, D) for the tokens of this rank, exactly 0 for a token without routes.
            Differentiable in `y_RD`.
        """
        ...
