"""Checks of what a caller hands in, before any work or communication."""

from numbers import Integral

import torch
from torch import Tensor

from .reference import is_route

PAYLOAD_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
WEIGHT_DTYPES = (torch.float32, torch.float64)
ID_DTYPES = (torch.int64, torch.int32)


def check_positive(name: str, value: int) -> None:
    """Raise unless what is called `name` is a whole number of at least 1."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a whole number, got {value!r}.")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}.")


def check_num_experts(num_experts: int) -> None:
    """Raise unless there is an expert."""
    check_positive("num_experts", num_experts)


def check_fits(
    x_TD: Tensor, expert_ids_TK: Tensor, max_tokens: int, width: int, top_k: int
) -> None:
    """Raise unless the inputs fit into buffers of this size."""
    if x_TD.shape[1] != width or expert_ids_TK.shape[1] != top_k or len(x_TD) > max_tokens:
        raise ValueError(
            f"`dispatch` must get at most `max_tokens`={max_tokens} tokens of `width`={width} "
            f"with `top_k`={top_k} slots, got x {tuple(x_TD.shape)} and ids "
            f"{tuple(expert_ids_TK.shape)}; make the dispatcher with these numbers."
        )


def check_inputs(x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> None:
    """Raise ValueError or TypeError unless shapes, dtypes and devices fit together."""
    given = {"x_TD": x_TD, "expert_ids_TK": expert_ids_TK, "weights_TK": weights_TK}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"`{name}` must be a tensor, got a {type(value).__name__}.")
    if x_TD.ndim != 2:
        raise ValueError(f"`x_TD` must have shape (tokens, width), got {tuple(x_TD.shape)}.")
    num_tokens = x_TD.shape[0]
    ids_shape = tuple(expert_ids_TK.shape)
    if len(ids_shape) != 2 or ids_shape[0] != num_tokens or ids_shape[1] < 1:
        raise ValueError(
            f"`expert_ids_TK` must have shape ({num_tokens}, K), K at least 1, to go with `x_TD` "
            f"of shape {tuple(x_TD.shape)}, got {ids_shape}."
        )
    if tuple(weights_TK.shape) != ids_shape:
        raise ValueError(
            f"`weights_TK` must have the shape of `expert_ids_TK`, {ids_shape}, "
            f"got {tuple(weights_TK.shape)}."
        )
    _check_dtype("x_TD", x_TD, PAYLOAD_DTYPES)
    _check_dtype("expert_ids_TK", expert_ids_TK, ID_DTYPES)
    _check_dtype("weights_TK", weights_TK, WEIGHT_DTYPES)
    for name, tensor in (("expert_ids_TK", expert_ids_TK), ("weights_TK", weights_TK)):
        if tensor.device != x_TD.device:
            raise ValueError(
                f"`{name}` must be on the device of `x_TD`, {x_TD.device}, got {tensor.device}."
            )


def unknown_ids(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """Return bool (T, K): whether the id is neither an expert nor -1."""
    return ~is_route(expert_ids_TK, num_experts) & (expert_ids_TK != -1)


def has_unknown_ids(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """Return a 0-d bool tensor: whether an id is neither an expert nor -1."""
    return unknown_ids(expert_ids_TK, num_experts).any()


def unknown_ids_error(num_experts: int) -> ValueError:
    """Return the error for an id that is neither an expert nor -1."""
    return ValueError(
        f"`expert_ids_TK` must hold ids in [0, `num_experts`={num_experts}), or -1 for no route, "
        f"got an id outside; route over the experts of this dispatcher."
    )


def refused_elsewhere_error(ranks: list[int]) -> ValueError:
    """Return the error on ranks whose own input is valid when that of `ranks` is not."""
    return ValueError(
        f"`dispatch` must get valid inputs on every rank of the group, but its rank(s) "
        f"{ranks} refused theirs; read the error there. No rows were sent."
    )


def check_results(y_RD: Tensor, num_rows: int, width: int, dtype: torch.dtype) -> None:
    """Raise unless `y_RD` has one row of the dispatched form for each dispatched row."""
    if tuple(y_RD.shape) != (num_rows, width):
        raise ValueError(
            f"`y_RD` must have one row for each row of its dispatch, shape ({num_rows}, {width}), "
            f"got {tuple(y_RD.shape)}."
        )
    if y_RD.dtype != dtype:
        raise TypeError(
            f"`y_RD` must have the dtype of the dispatched rows, {dtype}, got {y_RD.dtype}; "
            f"call `.to({dtype})`: every rank must send the same dtype."
        )


def _check_dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"`{name}` must be {names}, got {tensor.dtype}.")
