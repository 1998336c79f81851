"""The float32 buffers to which backward adds weight gradients, and what they must be.

Forward checks a buffer and backward checks it again: in between it is the caller's to change.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ._checks import check_device, name_of


def main_grad_pair(
    main_grads: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The buffers of the two stacks, both or neither."""
    if main_grads is None:
        return None, None
    if len(main_grads) != 2:
        raise ValueError(
            "`main_grads` must be two buffers, of `w_gate_up_E2HD` and of `w_down_EDH`, "
            f"got {len(main_grads)}."
        )
    first, second = main_grads
    for buffer in (first, second):
        if not isinstance(buffer, Tensor):
            raise TypeError(
                "`main_grads` must be two tensors, of `w_gate_up_E2HD` and of `w_down_EDH`, "
                f"got a {type(buffer).__name__} among them; pass both, or `main_grads=None`."
            )
    return first, second


def check_main_grad(name: str, main_grad: Tensor | None, w_name: str, w: Tensor) -> None:
    """What a weight gradient is added to is a plain float32 buffer of the shape of the weights."""
    if main_grad is None:
        return
    if main_grad.dtype != torch.float32:
        raise TypeError(f"`{name}` must be float32, got {name_of(main_grad.dtype)}.")
    check_device(name, main_grad, w_name, w)
    if main_grad.shape != w.shape or not main_grad.is_contiguous():
        raise ValueError(
            f"`{name}` must be contiguous and have the shape of `{w_name}`, {tuple(w.shape)}, "
            f"got shape {tuple(main_grad.shape)} with strides {main_grad.stride()}."
        )
    if main_grad.requires_grad:
        raise ValueError(f"`{name}` must not require a gradient; pass a plain buffer.")


def check_apart(name: str, main_grad: Tensor | None, others: Mapping[str, Tensor | None]) -> None:
    """A buffer shares no memory with what is read beside it; disjoint parts of a storage may be.

    What a compiler traces has no addresses to compare: a compiled call is not checked.
    """
    if main_grad is None or torch.compiler.is_compiling():
        return
    for other_name, other in others.items():
        if other is not None and _overlap(main_grad, other):
            raise ValueError(
                f"`{name}` must not share memory with `{other_name}`, got overlapping tensors; "
                "pass a buffer of its own."
            )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the spans of two tensors meet; a tensor without an address meets none."""
    (a_start, a_end), (b_start, b_end) = _span(a), _span(b)
    return a.device == b.device and max(a_start, b_start) < min(a_end, b_end)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses from the first to past the last element, gaps included."""
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a fake tensor, or one that `vmap` wraps
        start = 0
    if start == 0 or tensor.numel() == 0:
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def refuse_second_order_main_grad() -> None:
    """A gradient that went into a buffer has no graph behind it."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "`create_graph=True` must not meet a `main_grad` buffer, got both; leave one out."
        )
