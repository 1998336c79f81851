"""The experts of a layer as a module: two stacks of weights, `swiglu_experts` and `moe_mlp`.

The module knows no router and no ranks. Called, it takes rows that are already sorted by expert,
whether they come from this process or from others; `moe` takes tokens and their expert ids.

Shapes: R rows, T tokens, K experts a token, E experts held, D model width, H expert hidden width.
"""

from numbers import Integral
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from ._activation import Activation, check_activation, has_gate
from ._checks import FLOATS, name_of
from ._deferral import Defer
from ._expert_mlp import GroupedMatmul, check_one_product, swiglu_experts
from ._grouped_mm import Impl
from ._moe import moe_mlp
from ._packing import SavedActivationPacker


class _Settings(TypedDict):
    activation: Activation
    b_gate_up_E2H: Tensor | None
    b_down_ED: Tensor | None
    defer: Defer | None
    impl: Impl
    matmul: GroupedMatmul | None


class Experts(nn.Module):
    """`num_experts` MLPs that run on rows sorted by expert.

    Args:
        num_experts: E, at least 1.
        d_model: D, at least 1.
        d_hidden: H, at least 1.
        device: Where the parameters are made.
        dtype: Their dtype, float16, bfloat16, float32 or float64; torch's default when `None`.
        activation: As for `swiglu_experts`.
        bias: Whether both products add a bias.
        impl: Which grouped product, as for `swiglu_experts`.
        matmul: A product to use in place of `grouped_mm`; leave `impl` at `"auto"` with it.

    Attributes:
        w_gate_up_E2HD: Gate rows first, then up rows, (E, 2H, D); (E, H, D) without a gate.
        w_down_EDH: (E, D, H).
        b_gate_up_E2H: (E, 2H), (E, H) without a gate; `None` without biases.
        b_down_ED: (E, D); `None` without biases.
        defer: As for `swiglu_experts`, `None` at first; set it when there is something to ask, such
            as `executor.defer` of a pipeline. Copies and pickles of the module have none.

    Raises:
        TypeError: A size is not an integer, or `dtype` is none of those above.
        ValueError: A size is below 1, `activation` or `impl` is unknown, or both `impl` and
            `matmul` are given.
    """

    defer: Defer | None = None

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_hidden: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        activation: Activation = "swiglu",
        bias: bool = False,
        impl: Impl = "auto",
        matmul: GroupedMatmul | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_experts": num_experts, "d_model": d_model, "d_hidden": d_hidden}
        for name, size in sizes.items():
            if not isinstance(size, Integral):
                raise TypeError(f"`{name}` must be an integer, got {size!r}.")
            if size < 1:
                raise ValueError(f"`{name}` must be at least 1, got {size}.")
        if dtype is not None and dtype not in FLOATS:
            raise TypeError(
                f"`dtype` must be float16, bfloat16, float32 or float64, got {name_of(dtype)}."
            )
        check_activation(activation)
        check_one_product(impl, matmul)
        self.activation: Activation = activation
        self.impl: Impl = impl
        self.matmul = matmul
        width = 2 * d_hidden if has_gate(activation) else d_hidden

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        self.w_gate_up_E2HD = parameter(width, d_model)
        self.w_down_EDH = parameter(d_model, d_hidden)
        self.b_gate_up_E2H = parameter(width) if bias else None
        self.b_down_ED = parameter(d_model) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all uniformly from `(-b, b)`, `b = 1 / sqrt(inner width)`, as `nn.Linear`.

        Args:
            generator: The source of the numbers, on the device of the parameters; torch's default
                one when `None`. `w_gate_up_E2HD` is drawn first, then `w_down_EDH`, then biases.
        """
        stacks = (self.w_gate_up_E2HD, self.w_down_EDH)
        biases = (self.b_gate_up_E2H, self.b_down_ED)
        bounds = [stack.shape[-1] ** -0.5 for stack in stacks]
        for tensor, bound in zip((*stacks, *biases), bounds * 2, strict=True):
            if tensor is not None:
                tensor.uniform_(-bound, bound, generator=generator)

    def forward(
        self,
        rows_RD: Tensor,
        offsets_E: Tensor,
        *,
        row_weights_R: Tensor | None = None,
        main_grads: tuple[Tensor, Tensor] | None = None,
        pack: SavedActivationPacker | None = None,
    ) -> Tensor:
        """Run each expert on its rows; arguments and result are those of `swiglu_experts`."""
        return swiglu_experts(
            rows_RD,
            self.w_gate_up_E2HD,
            self.w_down_EDH,
            offsets_E,
            row_weights_R=row_weights_R,
            main_grads=main_grads,
            pack=pack,
            **self._settings(),
        )

    def moe(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        main_grads: tuple[Tensor, Tensor] | None = None,
        pack: SavedActivationPacker | None = None,
    ) -> Tensor:
        """Send each token to its experts; arguments and result are those of `moe_mlp`.

        Activation, biases and product are those of the module. As with every method but `forward`,
        hooks on the call of the module do not run.
        """
        return moe_mlp(
            x_TD,
            expert_ids_TK,
            weights_TK,
            self.w_gate_up_E2HD,
            self.w_down_EDH,
            main_grads=main_grads,
            pack=pack,
            **self._settings(),
        )

    def _settings(self) -> _Settings:
        return {
            "activation": self.activation,
            "b_gate_up_E2H": self.b_gate_up_E2H,
            "b_down_ED": self.b_down_ED,
            "defer": self.defer,
            "impl": self.impl,
            "matmul": self.matmul,
        }

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `defer`, which may hold on to processes."""
        return {name: value for name, value in vars(self).items() if name != "defer"}

    def extra_repr(self) -> str:
        """Sizes for `print`."""
        num_experts, d_model, d_hidden = self.w_down_EDH.shape
        sizes = f"num_experts={num_experts}, d_model={d_model}, d_hidden={d_hidden}"
        activation = "" if self.activation == "swiglu" else f", activation={self.activation!r}"
        return sizes + activation + (", bias=True" if self.b_down_ED is not None else "")
