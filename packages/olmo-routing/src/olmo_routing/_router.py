"""The router of one layer: a linear gate, and the routing of its logits.

    z_t = W x_t,   routing = route(z)

computed in float32 whatever the precision of the model: a gate decides by differences between
logits that bfloat16 cannot hold. Shapes: T tokens, K experts a token, E experts, D model width.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ._checks import (
    check_dtype,
    check_expert_ids,
    check_mask,
    check_matrix,
    check_number,
    check_positive,
    check_same_device,
)
from ._gate_product import gate_product, without_autocast
from ._impl import Impl, check_impl
from ._route import Gate, GateOptions, Routing, compute_routing
from ._selection_bias import SelectionBias

Force = Literal["uniform", "random"]


class Router(nn.Module):
    """Route tokens by a linear gate.

    Args:
        d_model: D, the width of a token.
        num_experts: E.
        top_k: K, experts a token.
        gate: as in `route`; so are the next four.
        renormalize: see `route`.
        route_scale: see `route`.
        num_groups: see `route`.
        topk_groups: see `route`.
        selection_bias: added to the scores for the selection; becomes a submodule, with the values
            that it has. Its `update` is the caller's to call.
        jitter: in training, every input element is multiplied by a random number from
            [1 - jitter, 1 + jitter]; in [0, 1).
        impl: see `route`.
        device: of the weight.
        dtype: of the weight, floating of 16 bits or more.

    Attributes:
        weight_ED: the gate's weight, at first uniform in +-1/sqrt(D) as that of `nn.Linear`.

    Raises:
        TypeError: a size is not an int, an option not a number, `selection_bias` not a
            `SelectionBias`, or `dtype` not as above.
        ValueError: an argument is out of range, or the bias is of another number of experts.

    Note:
        Backward keeps the input as it came and converts it to float32 again; with `jitter` it keeps
        the noise and the float32 product, 8 T D bytes. Derivatives of any order and kind, as
        `route` has them; in forward mode and under `torch.func` a float32 copy is kept. A token
        with a NaN or infinity in it is in `bad_tokens` or has logits of -inf alone, weighs 0 or
        shares its weights evenly, and gets and gives gradients of 0: the others' gradients are
        those of a step in which its loss is constant. On NVIDIA GPUs float32 means what
        `torch.set_float32_matmul_precision` says; "highest", torch's default, is true float32.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        *,
        gate: Gate = "softmax",
        renormalize: bool = True,
        route_scale: float = 1.0,
        num_groups: int = 1,
        topk_groups: int = 1,
        selection_bias: SelectionBias | None = None,
        jitter: float = 0.0,
        impl: Impl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("d_model", d_model)
        self.options = GateOptions(
            num_experts=num_experts,
            top_k=top_k,
            gate=gate,
            renormalize=renormalize,
            route_scale=route_scale,
            num_groups=num_groups,
            topk_groups=topk_groups,
        )
        check_impl(impl)
        check_number("jitter", jitter)
        if dtype is not None:
            check_dtype("dtype", dtype, "dtype")
        if selection_bias is not None and not isinstance(selection_bias, SelectionBias):
            raise TypeError(
                "`selection_bias` must be a `SelectionBias`, "
                f"got {type(selection_bias).__name__}; `route` takes a tensor, as `bias_E`."
            )
        if selection_bias is not None and selection_bias.bias_E.numel() != num_experts:
            raise ValueError(
                f"`selection_bias` must be of `num_experts`={num_experts} experts, "
                f"got {selection_bias.bias_E.numel()}."
            )
        if not 0 <= jitter < 1:
            raise ValueError(f"`jitter` must be in [0, 1), got {jitter}.")
        self.jitter = jitter
        self.impl: Impl = impl
        self.selection_bias = selection_bias
        self.weight_ED = nn.Parameter(torch.empty(num_experts, d_model, device=device, dtype=dtype))
        self._draw_weight()

    def reset_parameters(self) -> None:
        """Draw the weight anew and set the selection bias, if there is one, to zero."""
        self._draw_weight()
        if self.selection_bias is not None:
            self.selection_bias.reset_parameters()

    def _draw_weight(self) -> None:
        bound = self.weight_ED.shape[1] ** -0.5
        nn.init.uniform_(self.weight_ED, -bound, bound)

    def forward(
        self,
        x_TD: Tensor,
        *,
        mask_T: Tensor | None = None,
        expert_ids_TK: Tensor | None = None,
        force: Force | None = None,
        generator: torch.Generator | None = None,
    ) -> Routing:
        """Route every token.

        Args:
            x_TD: the tokens, any floating dtype.
            mask_T: bool, False = padding: routed nowhere, counted nowhere; it may hold anything,
                NaN included, and adds nothing to the weight's gradient.
            expert_ids_TK: int64, the `expert_ids_TK` that an earlier forward of these same tokens
                returned. They are used as they are; weights, scores and gradients are computed
                anew. Give them to a recomputed forward (activation checkpointing): rounding could
                otherwise flip a near tie and send a token elsewhere than in the first one.
            force: for benchmarks, ignore what the gate would choose. "uniform" gives the real
                tokens' routes to the experts in turn, so that counts differ by at most 1; "random"
                draws K distinct experts a token. The weights are those that the gate gives to the
                forced experts.
            generator: source of the jitter and of "random"; None = torch's default one, which
                activation checkpointing restores for a recomputed forward. A graph of
                `torch.compile` cannot take one: leave it None there and seed torch's own.

        Returns:
            The `Routing`; float32, or float64 when the input or the weight is.

        Raises:
            TypeError: a dtype is not as above.
            ValueError: a shape, range or device is not as above, or both `expert_ids_TK` and
                `force` are given.
        """
        self._check(x_TD, mask_T, expert_ids_TK, force)
        with without_autocast(x_TD.device.type):
            logits_TE = self._logits(x_TD, mask_T, generator)
            if force is not None:
                expert_ids_TK = _forced_experts(logits_TE, self.options, force, mask_T, generator)
            bias_E = None if self.selection_bias is None else self.selection_bias.bias_E
            return compute_routing(
                logits_TE,
                self.options,
                bias_E=bias_E,
                mask_T=mask_T,
                expert_ids_TK=expert_ids_TK,
                impl=self.impl,
            )

    def _logits(
        self, x_TD: Tensor, mask_T: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        if self.training and self.jitter > 0:
            dtype = torch.promote_types(x_TD.dtype, torch.float32)
            noise_TD = torch.empty_like(x_TD, dtype=dtype)
            _draw_uniform(noise_TD, 1 - self.jitter, 1 + self.jitter, generator)
            x_TD = x_TD.to(dtype) * noise_TD
        return gate_product(x_TD, self.weight_ED, mask_T)

    def _check(
        self,
        x_TD: Tensor,
        mask_T: Tensor | None,
        expert_ids_TK: Tensor | None,
        force: Force | None,
    ) -> None:
        check_matrix("x_TD", x_TD)
        if x_TD.shape[1] != self.weight_ED.shape[1]:
            raise ValueError(
                f"`x_TD` must be of width `d_model`={self.weight_ED.shape[1]}, "
                f"got shape {tuple(x_TD.shape)}."
            )
        bias_E = None if self.selection_bias is None else self.selection_bias.bias_E
        for name, tensor in (("the router", self.weight_ED), ("`selection_bias`", bias_E)):
            if tensor is not None and tensor.device != x_TD.device:
                raise ValueError(
                    f"{name} must be on the device of `x_TD`, {x_TD.device}, got {tensor.device}; "
                    "move the router there with `router.to(device)`."
                )
        check_mask(mask_T, x_TD)
        if force is not None and force not in get_args(Force):
            raise ValueError(f"`force` must be None or one of {get_args(Force)}, got {force!r}.")
        if expert_ids_TK is None:
            return
        if force is not None:
            raise ValueError("`force` must be None when `expert_ids_TK` is given, got both.")
        check_expert_ids(expert_ids_TK, self.options.num_experts)
        check_same_device("expert_ids_TK", expert_ids_TK, "x_TD", x_TD)
        expected = (x_TD.shape[0], self.options.top_k)
        if expert_ids_TK.shape != expected:
            raise ValueError(
                f"`expert_ids_TK` must have shape {expected}, got {tuple(expert_ids_TK.shape)}; "
                "give the ids that an earlier forward of the same tokens returned."
            )

    def extra_repr(self) -> str:
        """Return what `repr` shows."""
        num_experts, d_model = self.weight_ED.shape
        options = self.options
        return (
            f"d_model={d_model}, num_experts={num_experts}, top_k={options.top_k}, "
            f"gate={options.gate!r}, renormalize={options.renormalize}, "
            f"route_scale={options.route_scale}, jitter={self.jitter}"
        )


def _forced_experts(
    logits_TE: Tensor,
    options: GateOptions,
    force: Force,
    mask_T: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Return K distinct experts a token, in turn or at random."""
    num_tokens, num_experts = logits_TE.shape
    device = logits_TE.device
    if force == "random":
        # In a default dtype of bfloat16 many draws would tie, and low ids win.
        draws_TE = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=device)
        _draw_uniform(draws_TE, 0.0, 1.0, generator)
        return draws_TE.argsort(dim=1)[:, : options.top_k]
    real_T = torch.ones(num_tokens, dtype=torch.bool, device=device) if mask_T is None else mask_T
    index_T = real_T.cumsum(0) - 1
    slots_K = torch.arange(options.top_k, device=device)
    return (index_T[:, None] * options.top_k + slots_K) % num_experts


def _draw_uniform(x: Tensor, low: float, high: float, generator: torch.Generator | None) -> None:
    """Fill a tensor in place."""
    if generator is None:  # a graph of dynamic shapes does not take the None itself
        x.uniform_(low, high)
    else:
        x.uniform_(low, high, generator=generator)
