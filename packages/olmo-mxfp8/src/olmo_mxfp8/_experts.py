"""`MXExperts`: the experts of a layer as a module, multiplied in MXFP8."""

import torch
from torch import Tensor, nn

from ._cached_module import CachedModule
from ._expert_mlp import mx_swiglu_experts
from ._formats import check_blocks, check_source_dtype
from ._recipe import DEFAULT_RECIPE, MXRecipe, check_recipe


class MXExperts(CachedModule):
    """`num_experts` SwiGLU MLPs that run on rows sorted by expert.

    The parameters are ordinary high-precision ones, and nothing else is in the state dict. Their
    names, shapes and initial values are those of `Experts` of olmo-experts-gemm, so checkpoints go
    both ways.

    Args:
        num_experts: E, at least 1.
        d_model: D, a multiple of the recipe's granularity.
        d_hidden: H, a multiple of it too.
        recipe: How the operands are quantised.
        cached: Keep the weights quantised between steps, in a `WeightCache` each. `refresh` must
            then follow each step of the optimizer and each edit: a forward with a stale copy
            raises.
        device: Of the parameters.
        dtype: Of the parameters: float32, bfloat16 or float16.

    Attributes:
        w_gate_up_E2HD: Gate rows first, then up rows, (E, 2H, D).
        w_down_EDH: (E, D, H).
        defer: As for `mx_swiglu_experts`, None at first; set it when there is something to ask,
            such as `executor.defer` of a pipeline. Copies and pickles of the module have none.

    Raises:
        TypeError: `dtype` is another one, or `recipe` no `MXRecipe`.
        ValueError: `num_experts` is below 1, or a width is not a positive multiple of the
            granularity.
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_hidden: int,
        *,
        recipe: MXRecipe = DEFAULT_RECIPE,
        cached: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"num_experts": num_experts, "d_model": d_model, "d_hidden": d_hidden}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"`{name}` must be at least 1, got {size}.")
        check_recipe(recipe)
        check_source_dtype("dtype", torch.get_default_dtype() if dtype is None else dtype)
        check_blocks("`d_model`", d_model, recipe.granularity)
        check_blocks("`d_hidden`", d_hidden, recipe.granularity)
        super().__init__()
        self.recipe = recipe

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        self.w_gate_up_E2HD = parameter(2 * d_hidden, d_model)
        self.w_down_EDH = parameter(d_model, d_hidden)
        self.reset_parameters()
        self._cache_weights(cached, "w_gate_up_E2HD", "w_down_EDH")

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw both uniformly from `(-b, b)`, `b = 1 / sqrt(inner width)`, as `nn.Linear`.

        Args:
            generator: The source of the numbers, on the device of the parameters; torch's default
                one when None. `w_gate_up_E2HD` is drawn first.
        """
        with torch.no_grad():
            for w in (self.w_gate_up_E2HD, self.w_down_EDH):
                bound = w.shape[-1] ** -0.5
                w.uniform_(-bound, bound, generator=generator)
        self.refresh()

    def forward(
        self, rows_RD: Tensor, offsets_E: Tensor, *, row_weights_R: Tensor | None = None
    ) -> Tensor:
        """Run each expert on its rows; arguments and result are those of `mx_swiglu_experts`."""
        up, down = self.cache_of("w_gate_up_E2HD"), self.cache_of("w_down_EDH")
        return mx_swiglu_experts(
            rows_RD,
            self.w_gate_up_E2HD,
            self.w_down_EDH,
            offsets_E,
            row_weights_R=row_weights_R,
            recipe=self.recipe,
            caches=None if up is None or down is None else (up, down),
            defer=self.defer,
        )

    def extra_repr(self) -> str:
        """Return the sizes and the recipe."""
        E, D, H = self.w_down_EDH.shape
        cached = ", cached=True" if self.caches is not None else ""
        return f"num_experts={E}, d_model={D}, d_hidden={H}, recipe={self.recipe}{cached}"
