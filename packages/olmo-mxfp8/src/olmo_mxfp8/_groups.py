"""Where the rows of each expert end."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """Where the rows of each expert end, also as integers where the reference needs them."""

    ends: list[int] | None
    offsets_E: Tensor
