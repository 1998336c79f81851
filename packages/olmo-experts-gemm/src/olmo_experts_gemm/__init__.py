"""Grouped matrix products and expert MLPs for mixture-of-experts layers.

The rows of a batch lie sorted by expert, `offsets_E` says where the rows of each expert end, and
every expert multiplies its own rows by its own weights:

- `grouped_mm` is that product, with both gradients;
- `swiglu_experts` is the MLP of every expert on its rows;
- `moe_mlp` goes from tokens and their expert ids to tokens;
- `Experts` is the module that holds the weights;
- `GroupedMatmul` is what a product must look like to take the place of `grouped_mm`;
- `Defer` is what says that weight gradients may be computed later than the rest of a backward;
- `SavedActivationPacker` is what keeps saved activations in another form;
- `experts_from_hugging_face` and `experts_to_hugging_face` convert expert weights, and
  `hugging_face_experts_forward` runs the experts of a `transformers` model.
"""

from ._deferral import Defer as Defer
from ._expert_mlp import GroupedMatmul as GroupedMatmul
from ._expert_mlp import swiglu_experts as swiglu_experts
from ._experts import Experts as Experts
from ._grouped_mm import grouped_mm as grouped_mm
from ._hugging_face import experts_from_hugging_face as experts_from_hugging_face
from ._hugging_face import experts_to_hugging_face as experts_to_hugging_face
from ._hugging_face import hugging_face_experts_forward as hugging_face_experts_forward
from ._moe import moe_mlp as moe_mlp
from ._packing import SavedActivationPacker as SavedActivationPacker

__all__ = [
    "Defer",
    "Experts",
    "GroupedMatmul",
    "SavedActivationPacker",
    "experts_from_hugging_face",
    "experts_to_hugging_face",
    "grouped_mm",
    "hugging_face_experts_forward",
    "moe_mlp",
    "swiglu_experts",
]
