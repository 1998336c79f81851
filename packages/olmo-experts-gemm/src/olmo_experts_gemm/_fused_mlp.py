"""The expert MLP by fused kernels, as torch operators that a compiler does not look into.

Saved for backward are the tokens (or rows), the pre-activations `hidden`, the stacks, the weights
and the int32 maps; nothing as large as tokens times routes times the model width. `_fused_order`
says in which order the kernels run.

The operators are differentiable once: their backward is an operator whose own backward raises.
Where weight gradients wait, an autograd function takes the place of the differentiable operator; it
runs the same kernels.

Shapes: T tokens, K routes a token, R rows, E experts, D model width, H expert hidden width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _fused_order
from ._deferral import Later
from ._fused_order import Gradients, Needs, Rows
from ._main_grad import check_main_grad, refuse_second_order_main_grad

_NAME = "olmo_experts_gemm::"
WEIGHTS = ("w_gate_up", "w_down", "b_gate_up", "b_down")
"""The inputs of the operator whose gradients may wait, in its order."""


@torch.library.custom_op(_NAME + "sort_routes", mutates_args=())
def sort_routes_op(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`offsets_E`, `route_R` and `row_TK` of the routes sorted by (expert, token, slot), int32."""
    return _fused_order.sort_routes(expert_ids_TK, num_experts)


@torch.library.custom_op(_NAME + "expert_mlp", mutates_args=())
def expert_mlp_op(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    weights: Tensor | None,
    main_gate_up: Tensor | None,
    main_down: Tensor | None,
    offsets_E: Tensor,
    route_R: Tensor | None,
    row_TK: Tensor | None,
    top_k: int,
    activation: str,
    save_hidden: bool,
) -> tuple[Tensor, Tensor]:
    """The output, shaped as `x`, and the pre-activations, of no rows unless they are saved.

    `main_gate_up` and `main_down` are for backward alone: both, or neither.
    """
    rows = Rows(offsets_E, weights, route_R, row_TK, top_k, activation)
    return _fused_order.forward(x, w_gate_up, w_down, b_gate_up, b_down, rows, save_hidden)


@torch.library.custom_op(_NAME + "expert_mlp_backward", mutates_args=())
def expert_mlp_backward_op(
    dy: Tensor,
    x: Tensor,
    hidden: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_down: Tensor | None,
    weights: Tensor | None,
    offsets_E: Tensor,
    route_R: Tensor | None,
    row_TK: Tensor | None,
    top_k: int,
    activation: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients in the order of `Gradients`; of no elements where `needs` is False."""
    rows = Rows(offsets_E, weights, route_R, row_TK, top_k, activation)
    stacks = (w_gate_up, w_down, b_down)
    return _plain(_fused_order.backward(dy, x, hidden, *stacks, rows, Needs(*needs), None))


@torch.library.custom_op(
    _NAME + "expert_mlp_backward_main_grad", mutates_args=("main_gate_up", "main_down")
)
def expert_mlp_backward_main_grad_op(
    main_gate_up: Tensor,
    main_down: Tensor,
    dy: Tensor,
    x: Tensor,
    hidden: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_down: Tensor | None,
    weights: Tensor | None,
    offsets_E: Tensor,
    route_R: Tensor | None,
    row_TK: Tensor | None,
    top_k: int,
    activation: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same, with the gradients of the stacks added to the buffers."""
    rows = Rows(offsets_E, weights, route_R, row_TK, top_k, activation)
    stacks, into = (w_gate_up, w_down, b_down), (main_gate_up, main_down)
    return _plain(_fused_order.backward(dy, x, hidden, *stacks, rows, Needs(*needs), into))


@sort_routes_op.register_fake
def _(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((num_experts,), (expert_ids_TK.numel(),), expert_ids_TK.shape)
    offsets_E, route_R, row_TK = (
        expert_ids_TK.new_empty(size, dtype=torch.int32) for size in sizes
    )
    return offsets_E, route_R, row_TK


@expert_mlp_op.register_fake
def _(x: Tensor, w_gate_up: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    route_R, save_hidden = args[7], args[11]
    num_rows = (x if route_R is None else route_R).shape[0]
    hidden = x.new_empty(num_rows if save_hidden else 0, w_gate_up.shape[1])
    return x.new_empty(x.shape), hidden


@expert_mlp_backward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    return _fake_backward(args, into=False)


@expert_mlp_backward_main_grad_op.register_fake
def _(main_gate_up: Tensor, main_down: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _fake_backward(args, into=True)


def _plain(
    gradients: Gradients,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    # An operator may return a tuple, but not one with names.
    x, w_gate_up, w_down, b_gate_up, b_down, weights = gradients
    return x, w_gate_up, w_down, b_gate_up, b_down, weights


def _fake_backward(args: tuple[Any, ...], into: bool) -> tuple[Tensor, ...]:
    _, x, _, w_gate_up, w_down, _, weights, offsets_E, route_R, row_TK, top_k, activation, needs = (
        args
    )
    rows = Rows(offsets_E, weights, route_R, row_TK, top_k, activation)
    return _plain(_fused_order.empty_gradients(x, w_gate_up, w_down, rows, Needs(*needs), into))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w_gate_up, w_down, _, b_down, weights, *buffers = inputs[:8]
    maps, (ctx.top_k, ctx.activation, saved) = inputs[8:11], inputs[11:]
    assert saved, "`save_hidden` must be set where something needs a gradient"
    hidden = output[1]
    ctx.mark_non_differentiable(hidden)
    ctx.set_materialize_grads(False)
    # Not saved as inputs: a buffer may change before backward, and backward wants it changed.
    ctx.buffers = buffers
    ctx.save_for_backward(x, hidden, w_gate_up, w_down, b_down, weights, *maps)


def _backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 14
    needs = list(ctx.needs_input_grad[:6])
    # As one argument list: unpacked into names here, saved tensors would outlive their use.
    arguments = (dy, *ctx.saved_tensors, ctx.top_k, ctx.activation, needs)
    if ctx.buffers[0] is None:
        made = expert_mlp_backward_op(*arguments)
    else:
        refuse_second_order_main_grad()
        _check_buffers(ctx.buffers, arguments[3:5])
        made = expert_mlp_backward_main_grad_op(*ctx.buffers, *arguments)
        needs[1] = needs[2] = False
    gradients = (new if need else None for new, need in zip(made, needs, strict=True))
    return (*gradients, *(None,) * 8)


def _check_buffers(buffers: Sequence[Tensor | None], stacks: Sequence[Any]) -> None:
    for i, name in enumerate(("w_gate_up_E2HD", "w_down_EDH")):
        check_main_grad(f"main_grads[{i}]", buffers[i], name, stacks[i])


def expert_mlp_that_waits(later: Later, *inputs: Any) -> tuple[Tensor, Tensor]:
    """Run `expert_mlp_op` on its inputs, with a backward that leaves weight gradients for later."""
    places = {1 + WEIGHTS.index(name) for name in later.weights}
    others = [None if place in places else value for place, value in enumerate(inputs)]
    return _Waiting.apply(later.anchor, later, *others)


class _Waiting(torch.autograd.Function):
    """The weights that wait are no inputs of its graph, but those of `later`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, later: Later, *others: Any) -> tuple[Tensor, Tensor]:
        inputs = list(others)
        for name, weight in later.weights.items():
            inputs[1 + WEIGHTS.index(name)] = weight
        output = expert_mlp_op(*inputs)
        _save(ctx, tuple(inputs), output)
        ctx.later = later
        return output

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (once_differentiable)
        ctx: Any, dy: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 16
        if dy is None:
            return nothing
        # What is left for later reads some of these and must not keep the graph alive.
        saved: Any = (None if tensor is None else tensor.detach() for tensor in ctx.saved_tensors)
        x, hidden, w_gate_up, w_down, b_down, weights, offsets_E, route_R, row_TK = saved
        rows = Rows(offsets_E, weights, route_R, row_TK, ctx.top_k, ctx.activation)
        asked = dict(zip(Needs._fields, ctx.needs_input_grad[2:8], strict=True))
        needs = Needs(**{name: asked[name] or name in ctx.later.weights for name in asked})
        into = None
        if ctx.buffers[0] is not None:
            _check_buffers(ctx.buffers, (w_gate_up, w_down))
            into = ctx.buffers[0], ctx.buffers[1]
            asked["w_gate_up"] = asked["w_down"] = False
        made = _fused_order.backward(
            dy.detach(), x, hidden, w_gate_up, w_down, b_down, rows, needs, into, ctx.later
        )
        ctx.later.hand_over()
        gradients = (new if asked[name] else None for name, new in made._asdict().items())
        return (None, None, *gradients, *nothing[8:])


def _refuse_second_order(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    raise RuntimeError(
        "The fused expert MLP must be differentiated once at most, got a gradient of its gradient; "
        "use impl='torch' or impl='reference', which go to any order."
    )


def _one_after_another(
    info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Run a batch of `torch.func.vmap` call by call.

    Whether to save `hidden` is asked anew: a batch does not tell what lies under it that it
    requires a gradient.
    """
    made = []
    for number in range(info.batch_size):
        one = [
            arg if dim is None else arg.select(dim, number)
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        made.append(expert_mlp_op(*one[:-1], saves_hidden(one[:6])))
    y, hidden = zip(*made, strict=True)
    return (torch.stack(y), torch.stack(hidden)), (0, 0)


def saves_hidden(inputs: Sequence[Tensor | None]) -> bool:
    """Whether a call of these differentiable inputs will have a backward."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)


expert_mlp_op.register_autograd(_backward, setup_context=_save)
expert_mlp_op.register_vmap(_one_after_another)
expert_mlp_backward_op.register_autograd(_refuse_second_order)
