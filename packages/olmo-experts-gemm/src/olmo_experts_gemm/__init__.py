"""Grouped matrix products and expert MLPs for mixture-of-experts layers.

The rows of a batch lie sorted by expert, `offsets_E` says where the rows of each expert end, and
every expert multiplies its own rows by its own weights:

- `grouped_mm` is that product, with both gradients;
- `swiglu_experts` is the SwiGLU MLP of every expert on its rows;
- `moe_mlp` goes from tokens and their expert ids to tokens;
- `Experts` is the module that holds the weights;
- `GroupedMatmul` is what a product must look like to take the place of `grouped_mm`.
"""

from ._experts import Experts as Experts
from ._grouped_mm import grouped_mm as grouped_mm
from ._moe import moe_mlp as moe_mlp
from ._swiglu import GroupedMatmul as GroupedMatmul
from ._swiglu import swiglu_experts as swiglu_experts

__all__ = ["Experts", "GroupedMatmul", "grouped_mm", "moe_mlp", "swiglu_experts"]
