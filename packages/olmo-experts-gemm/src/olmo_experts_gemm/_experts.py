"""The experts of a layer as a module: two stacks of weights and `swiglu_experts`.

The module knows no router and no ranks. It is given rows that are already sorted by expert, whether
they come from this process or from others, and the number of experts it holds.

Shapes: R rows, E experts held, D model width, H expert hidden width.
"""

import torch
from torch import Tensor, nn

from ._grouped_mm import Impl
from ._swiglu import GroupedMatmul, check_one_product, swiglu_experts


class Experts(nn.Module):
    """`num_experts` SwiGLU MLPs that run on rows sorted by expert.

    Args:
        num_experts: E, at least 1.
        d_model: D, at least 1.
        d_hidden: H, at least 1.
        device: Where the parameters are made.
        dtype: Their dtype; torch's default when `None`.
        impl: Which grouped product, as for `grouped_mm`.
        matmul: A product to use in place of `grouped_mm`; leave `impl` at `"auto"` with it.

    Attributes:
        w_gate_up_E2HD: Gate rows first, then up rows, (E, 2H, D).
        w_down_EDH: (E, D, H).

    Raises:
        ValueError: A size is below 1, or both `impl` and `matmul` are given.
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_hidden: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: Impl = "auto",
        matmul: GroupedMatmul | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_experts": num_experts, "d_model": d_model, "d_hidden": d_hidden}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"`{name}` must be at least 1, got {size}.")
        check_one_product(impl, matmul)
        self.impl: Impl = impl
        self.matmul = matmul
        self.w_gate_up_E2HD = nn.Parameter(
            torch.empty(num_experts, 2 * d_hidden, d_model, device=device, dtype=dtype)
        )
        self.w_down_EDH = nn.Parameter(
            torch.empty(num_experts, d_model, d_hidden, device=device, dtype=dtype)
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw both stacks uniformly from `(-b, b)`, `b = 1 / sqrt(inner width)`, as `nn.Linear`.

        Args:
            generator: The source of the numbers, on the device of the parameters; torch's default
                one when `None`. `w_gate_up_E2HD` is drawn first.
        """
        for weight in (self.w_gate_up_E2HD, self.w_down_EDH):
            bound = weight.shape[-1] ** -0.5
            weight.uniform_(-bound, bound, generator=generator)

    def forward(
        self, rows_RD: Tensor, offsets_E: Tensor, *, row_weights_R: Tensor | None = None
    ) -> Tensor:
        """Run each expert on its rows; arguments and result are those of `swiglu_experts`."""
        return swiglu_experts(
            rows_RD,
            self.w_gate_up_E2HD,
            self.w_down_EDH,
            offsets_E,
            row_weights_R=row_weights_R,
            impl=self.impl,
            matmul=self.matmul,
        )

    def extra_repr(self) -> str:
        """Sizes for `print`."""
        num_experts, d_model, d_hidden = self.w_down_EDH.shape
        return f"num_experts={num_experts}, d_model={d_model}, d_hidden={d_hidden}"
