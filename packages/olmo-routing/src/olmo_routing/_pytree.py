"""Results are trees of tensors, and torch is told so.

FSDP2 looks for the tensors that a module returns, to hook its backward there; `torch.func.vmap` and
`torch.export` take results apart and put them together again. None of them looks into a dataclass
that is not registered, and FSDP2 does not even complain: the module is never trained.
"""

from typing import TypeVar

import torch.export

_Result = TypeVar("_Result")


def tensor_tree(cls: type[_Result]) -> type[_Result]:
    """Register a dataclass of tensors as a tree whose leaves are its fields."""
    torch.export.register_dataclass(cls, serialized_type_name=f"olmo_routing.{cls.__name__}")
    return cls
