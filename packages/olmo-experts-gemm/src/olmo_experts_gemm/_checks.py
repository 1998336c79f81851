"""What the public functions ask of their tensors, and the words in which they refuse them.

Dtypes, shapes and devices are checked always. Values (offsets, expert ids) are checked on CPU
tensors only: on a GPU the check itself would make the host wait for the device. A compiler that
traces a call has no values to look at, so a compiled call checks none, on CPU neither.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
IDS = (torch.int32, torch.int64)


def name_of(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def check_rows(name: str, x: Tensor) -> None:
    """Rows are a matrix of floats."""
    if x.dtype not in FLOATS:
        raise TypeError(
            f"`{name}` must be float16, bfloat16, float32 or float64, got {name_of(x.dtype)}."
        )
    if x.ndim != 2:
        hint = "; flatten batch and sequence into tokens" if x.ndim > 2 else ""
        raise ValueError(f"`{name}` must have 2 dimensions, got shape {tuple(x.shape)}{hint}.")


def check_weights(name: str, w: Tensor, x_name: str, x: Tensor, shape: str, fits: bool) -> None:
    """A stack of weights has the dtype and device of the rows, a known shape, and an expert."""
    if w.dtype != x.dtype:
        raise TypeError(
            f"`{name}` must have the dtype of `{x_name}`, {name_of(x.dtype)}, "
            f"got {name_of(w.dtype)}; cast one of them."
        )
    check_device(name, w, x_name, x)
    if not fits or w.shape[0] == 0:
        raise ValueError(
            f"`{name}` must have shape {shape} with at least one expert, got {tuple(w.shape)} "
            f"for `{x_name}` of shape {tuple(x.shape)}."
        )


def check_experts(
    w_gate_up_E2HD: Tensor, w_down_EDH: Tensor, gated: bool, x_name: str, x: Tensor
) -> tuple[int, int, int]:
    """The two stacks of an expert MLP fit the rows and one another; return E, D and H."""
    D = x.shape[1]
    fits = w_down_EDH.ndim == 3 and w_down_EDH.shape[1] == D
    check_weights("w_down_EDH", w_down_EDH, x_name, x, f"(E, D={D}, H)", fits)
    E, _, H = w_down_EDH.shape
    shape = (E, 2 * H if gated else H, D)
    fits = w_gate_up_E2HD.shape == shape
    letters = "(E, 2H, D)" if gated else "(E, H, D), without a gate,"
    check_weights("w_gate_up_E2HD", w_gate_up_E2HD, x_name, x, f"{letters} = {shape}", fits)
    return E, D, H


def check_bias(name: str, bias: Tensor | None, w_name: str, w: Tensor) -> None:
    """A bias has one number for each output of each expert, in the dtype of the weights."""
    if bias is None:
        return
    if bias.dtype != w.dtype:
        raise TypeError(
            f"`{name}` must have the dtype of `{w_name}`, {name_of(w.dtype)}, "
            f"got {name_of(bias.dtype)}; cast one of them."
        )
    check_device(name, bias, w_name, w)
    if bias.shape != w.shape[:2]:
        raise ValueError(
            f"`{name}` must have shape {tuple(w.shape[:2])}, one number an output of an expert, "
            f"got {tuple(bias.shape)}."
        )


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Without a rule for tangents an operator drops them, and torch says no word.

    What a compiler traces has no tangents to look at: a compiled call is not checked.
    """
    if torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "Forward-mode derivatives (jvp, jacfwd) must not pass through this package, got "
                "a dual tensor; use backward, or write the layer in plain torch."
            )


def check_device(name: str, tensor: Tensor, x_name: str, x: Tensor) -> None:
    """Everything lies where the rows lie."""
    if tensor.device != x.device:
        raise ValueError(
            f"`{name}` must be on the device of `{x_name}`, {x.device}, got {tensor.device}."
        )


def check_offsets(offsets_E: Tensor, num_experts: int, x_name: str, x: Tensor) -> None:
    """One int32 end an expert, in order, none past the rows."""
    if offsets_E.dtype != torch.int32:
        raise TypeError(
            f"`offsets_E` must be int32, got {name_of(offsets_E.dtype)}; call `.to(torch.int32)`."
        )
    check_device("offsets_E", offsets_E, x_name, x)
    if offsets_E.shape != (num_experts,):
        raise ValueError(
            f"`offsets_E` must have shape ({num_experts},), one end an expert, "
            f"got {tuple(offsets_E.shape)}."
        )
    if not _can_read(offsets_E):
        return
    for start, end in pairwise([0, *offsets_E.tolist()]):
        if not start <= end <= x.shape[0]:
            raise ValueError(
                f"`offsets_E` must not decrease, from 0 to at most the {x.shape[0]} rows of "
                f"`{x_name}`, got {end} after {start}; pass inclusive ends, the running sum of "
                "the rows an expert."
            )


def check_routes(expert_ids_TK: Tensor, weights_TK: Tensor, num_experts: int, x_TD: Tensor) -> None:
    """Each token names K experts, none twice, or -1; each route has a weight."""
    if expert_ids_TK.dtype not in IDS:
        raise TypeError(
            f"`expert_ids_TK` must be int64 or int32, got {name_of(expert_ids_TK.dtype)}."
        )
    if weights_TK.dtype not in FLOATS:
        raise TypeError(f"`weights_TK` must be floats, got {name_of(weights_TK.dtype)}.")
    for name, tensor in (("expert_ids_TK", expert_ids_TK), ("weights_TK", weights_TK)):
        check_device(name, tensor, "x_TD", x_TD)
        shape = tuple(tensor.shape)
        if tensor.ndim != 2 or shape[0] != x_TD.shape[0] or shape[1] == 0:
            raise ValueError(
                f"`{name}` must have shape ({x_TD.shape[0]}, K) with K at least 1, "
                f"a row a token of `x_TD`, got {shape}."
            )
    if expert_ids_TK.shape != weights_TK.shape:
        raise ValueError(
            f"`weights_TK` must have the shape of `expert_ids_TK`, {tuple(expert_ids_TK.shape)}, "
            f"got {tuple(weights_TK.shape)}."
        )
    if _can_read(expert_ids_TK) and expert_ids_TK.numel():
        _check_ids(expert_ids_TK, num_experts)


def _check_ids(expert_ids_TK: Tensor, num_experts: int) -> None:
    low, high = (int(value) for value in expert_ids_TK.aminmax())
    if low < -1 or high >= num_experts:
        raise ValueError(
            f"`expert_ids_TK` must be in [0, E={num_experts}), or -1 for no route, "
            f"got ids from {low} to {high}."
        )
    ids_TK = expert_ids_TK.sort(dim=1).values
    twice_T = ((ids_TK[:, 1:] == ids_TK[:, :-1]) & (ids_TK[:, 1:] >= 0)).any(dim=1)
    if twice_T.any():
        raise ValueError(
            "`expert_ids_TK` must not name an expert twice in one token, "
            f"got that in {int(twice_T.sum())} of {len(ids_TK)} tokens; add the weights of the "
            "two routes and set one id to -1."
        )


def _can_read(tensor: Tensor) -> bool:
    # A compiled graph has no values to read while it is traced.
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
