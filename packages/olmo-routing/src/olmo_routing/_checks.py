"""What the public functions demand of their arguments, stated once.

Kinds, shapes, dtypes and devices are always checked. Values are read only where that costs nothing:
on the CPU, of tensors that hold their values (not in a graph that is being traced, not under
`torch.func`, not of fake tensors). Elsewhere an id out of range meets the indexing kernel's own
check instead (on a GPU a device assertion), so that no check waits for the device or breaks a
compiled graph.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ._transforms import under_transform

MOST_ROWS = 2**31 - 1
"""The most rows that there can be: their offsets are int32."""

_GATE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_positive(name: str, value: int, *, least: int = 1, most: int | None = None) -> None:
    """Raise unless `value` is an integer of at least `least` and, if given, at most `most`."""
    # The size of a dimension in a graph of dynamic shapes is a SymInt.
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an int, got {type(value).__name__}.")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}.")
    if most is not None and value > most:
        raise ValueError(f"`{name}` must be at most {most}, got {value}.")


def check_number(name: str, value: float) -> None:
    """Raise unless `value` is a number of Python's, which an option of a gate must be."""
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    if not isinstance(value, numbers) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}.")


def check_tensor(name: str, x: Any, hint: str = "") -> None:
    """Raise unless `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, got {type(x).__name__}{hint}.")


def check_dtype(name: str, dtype: torch.dtype, what: str = "tensor") -> None:
    """Raise unless a gate can compute with the dtype: a floating one of 16 bits or more."""
    if dtype not in _GATE_DTYPES:
        raise TypeError(
            f"`{name}` must be a floating-point {what} of 16, 32 or 64 bits, got {dtype}; "
            "take float32."
        )


def check_matrix(name: str, x: Tensor) -> None:
    """Raise unless `x` is a floating-point matrix with at least one column."""
    check_tensor(name, x)
    check_dtype(name, x.dtype)
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(
            f"`{name}` must have two dimensions, the second not empty, got shape {tuple(x.shape)}; "
            "flatten batch and sequence into tokens first."
        )


def check_mask(mask_T: Tensor | None, like: Tensor) -> None:
    """Raise unless `mask_T` holds one bool for each row of `like`."""
    if mask_T is None:
        return
    check_tensor("mask_T", mask_T)
    if mask_T.dtype != torch.bool:
        raise TypeError(
            f"`mask_T` must be bool (True = a real token), got {mask_T.dtype}; call `.bool()`."
        )
    if mask_T.shape != like.shape[:1] or mask_T.device != like.device:
        raise ValueError(
            f"`mask_T` must have shape {(like.shape[0],)} on {like.device}, "
            f"got {tuple(mask_T.shape)} on {mask_T.device}."
        )


def check_bias(bias_E: Tensor, like: Tensor) -> None:
    """Raise unless the bias is floating-point, one number for each column of `like`."""
    check_tensor("bias_E", bias_E)
    if not bias_E.is_floating_point():
        raise TypeError(f"`bias_E` must be a floating-point tensor, got {bias_E.dtype}.")
    if bias_E.shape != like.shape[1:] or bias_E.device != like.device:
        raise ValueError(
            f"`bias_E` must have shape {(like.shape[1],)} on {like.device}, "
            f"got {tuple(bias_E.shape)} on {bias_E.device}."
        )


def check_ids_dtype(name: str, ids: Tensor) -> None:
    """Raise unless the ids are an int64 tensor."""
    check_tensor(name, ids, "; give a routing's `expert_ids_TK`")
    if ids.dtype != torch.int64:
        no_ids = ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
        hint = "give the ids themselves, -1 for no route" if no_ids else "call `.long()`"
        raise TypeError(f"`{name}` must be int64, got {ids.dtype}; {hint}.")


def check_expert_ids(expert_ids_TK: Tensor, num_experts: int) -> None:
    """Raise unless the ids are an int64 matrix over [-1, `num_experts`)."""
    check_ids_dtype("expert_ids_TK", expert_ids_TK)
    if expert_ids_TK.ndim != 2 or expert_ids_TK.shape[1] == 0:
        raise ValueError(
            "`expert_ids_TK` must have shape (tokens, experts a token), "
            f"got {tuple(expert_ids_TK.shape)}."
        )
    if can_read(expert_ids_TK) and expert_ids_TK.numel() > 0:
        low, high = (int(bound) for bound in expert_ids_TK.aminmax())
        if low < -1 or high >= num_experts:
            raise ValueError(
                f"`expert_ids_TK` must be in [-1, {num_experts}), with -1 for no route, "
                f"got ids from {low} to {high}."
            )


def can_read(*tensors: Tensor) -> bool:
    """Return whether reading the values waits for nothing and breaks no graph."""
    if torch.compiler.is_compiling() or under_transform():
        return False
    # A subclass may be a fake tensor, which has no values.
    return all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in tensors)


def check_routed_tokens(like_name: str, like: Tensor, expert_ids_TK: Tensor) -> None:
    """Raise unless a matrix over (tokens, experts) and the ids speak of the same tokens."""
    check_matrix(like_name, like)
    check_expert_ids(expert_ids_TK, like.shape[1])
    if expert_ids_TK.shape[0] != like.shape[0] or expert_ids_TK.shape[1] > like.shape[1]:
        raise ValueError(
            f"`expert_ids_TK` must have one row a token of `{like_name}` and at most one column an "
            f"expert, got {tuple(expert_ids_TK.shape)} beside {tuple(like.shape)}."
        )
    check_same_device("expert_ids_TK", expert_ids_TK, like_name, like)


def check_same_device(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    """Raise unless both tensors are on one device."""
    if x.device != like.device:
        raise ValueError(
            f"`{name}` must be on {like.device} as `{like_name}`, got {x.device}; "
            "move it there with `.to(device)`."
        )
