"""What the public functions demand of their arguments, stated once.

Shapes, dtypes and devices are always checked. Values are read only where that costs nothing: ids on
the CPU, outside of `torch.compile`. Elsewhere an id out of range meets the indexing kernel's own
check instead (on a GPU a device assertion), so that no check waits for the device or breaks a
compiled graph.
"""

import torch
from torch import Tensor


def check_positive(name: str, value: int, *, least: int = 1) -> None:
    """Raise unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an int, got {type(value).__name__}.")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}.")


def check_matrix(name: str, x: Tensor) -> None:
    """Raise unless `x` is a floating-point matrix with at least one column."""
    if not x.is_floating_point():
        raise TypeError(f"`{name}` must be a floating-point tensor, got {x.dtype}.")
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(
            f"`{name}` must have two dimensions, the second not empty, got shape {tuple(x.shape)}; "
            "flatten batch and sequence into tokens first."
        )


def check_mask(mask_T: Tensor | None, like: Tensor) -> None:
    """Raise unless `mask_T` holds one bool for each row of `like`."""
    if mask_T is None:
        return
    if mask_T.dtype != torch.bool:
        raise TypeError(
            f"`mask_T` must be bool (True = a real token), got {mask_T.dtype}; call `.bool()`."
        )
    if mask_T.shape != like.shape[:1] or mask_T.device != like.device:
        raise ValueError(
            f"`mask_T` must have shape {(like.shape[0],)} on {like.device}, "
            f"got {tuple(mask_T.shape)} on {mask_T.device}."
        )


def check_expert_ids(expert_ids_TK: Tensor, num_experts: int) -> None:
    """Raise unless the ids are an int64 matrix over [-1, `num_experts`)."""
    if expert_ids_TK.dtype != torch.int64:
        raise TypeError(f"`expert_ids_TK` must be int64, got {expert_ids_TK.dtype}.")
    if expert_ids_TK.ndim != 2 or expert_ids_TK.shape[1] == 0:
        raise ValueError(
            "`expert_ids_TK` must have shape (tokens, experts a token), "
            f"got {tuple(expert_ids_TK.shape)}."
        )
    if _can_read(expert_ids_TK) and expert_ids_TK.numel() > 0:
        low, high = (int(bound) for bound in expert_ids_TK.aminmax())
        if low < -1 or high >= num_experts:
            raise ValueError(
                f"`expert_ids_TK` must be in [-1, {num_experts}), with -1 for no route, "
                f"got ids from {low} to {high}."
            )


def _can_read(tensor: Tensor) -> bool:
    # A compiled graph has no values to read while it is traced.
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check_routed_tokens(like_name: str, like: Tensor, expert_ids_TK: Tensor) -> None:
    """Raise unless a matrix over (tokens, experts) and the ids speak of the same tokens."""
    check_matrix(like_name, like)
    check_expert_ids(expert_ids_TK, like.shape[1])
    if expert_ids_TK.shape[0] != like.shape[0] or expert_ids_TK.shape[1] > like.shape[1]:
        raise ValueError(
            f"`expert_ids_TK` must have one row a token of `{like_name}` and at most one column an "
            f"expert, got {tuple(expert_ids_TK.shape)} beside {tuple(like.shape)}."
        )
    if expert_ids_TK.device != like.device:
        raise ValueError(
            f"`expert_ids_TK` must be on {like.device} as `{like_name}`, "
            f"got {expert_ids_TK.device}."
        )
