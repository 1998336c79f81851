"""Mixture-of-experts language models trained with olmo-trainer, for `transformers`.

Blocks with norms around their sublayers (`peri`) or before them (`pre`), grouped-query attention
with q/k norm and rotary positions, full or sliding by layer, dense SwiGLU layers first, then routed
ones with one shared expert. Loaded with `trust_remote_code=True`; needs torch and `transformers`.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OlmoTrainerConfig(PretrainedConfig):
    """The fields of `config.json`.

    `window` is how many positions a sliding layer sees (0: all), `full_every` says that every n-th
    layer sees all. `route_weights` are those of a token's experts: the plain `scores`, renormalised
    to `sum_one`, or to `mean_one`. A width of 0 is no shared expert.
    """

    model_type = "olmo_trainer"

    def __init__(
        self,
        *,
        vocab_size: int = 257,
        hidden_size: int = 128,
        num_hidden_layers: int = 4,
        num_dense_layers: int = 1,
        dense_intermediate_size: int = 384,
        moe_intermediate_size: int = 128,
        shared_intermediate_size: int = 128,
        num_experts: int = 8,
        num_experts_per_tok: int = 2,
        gate: str = "softmax",
        route_weights: str = "mean_one",
        has_selection_bias: bool = False,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        head_dim: int = 32,
        qk_norm: str = "head",
        rope_theta: float = 10_000.0,
        window: int = 0,
        full_every: int = 0,
        norms: str = "peri",
        rms_norm_eps: float = 1e-6,
        max_position_embeddings: int = 4096,
        initializer_range: float = 0.02,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_dense_layers = num_dense_layers
        self.dense_intermediate_size = dense_intermediate_size
        self.moe_intermediate_size = moe_intermediate_size
        self.shared_intermediate_size = shared_intermediate_size
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.gate = gate
        self.route_weights = route_weights
        self.has_selection_bias = has_selection_bias
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.qk_norm = qk_norm
        self.rope_theta = rope_theta
        self.window = window
        self.full_every = full_every
        self.norms = norms
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        super().__init__(**kwargs)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn the channel pairs (c, c + C/2) of (B, heads, S, C) by (B, 1, S, C/2), in float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; its keys and values go through the cache, if there is one."""

    def __init__(self, config: OlmoTrainerConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.per_head = config.qk_norm == "head"
        is_full = config.full_every and (layer + 1) % config.full_every == 0
        self.window = 0 if is_full else config.window
        query = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        widths = (config.head_dim, config.head_dim) if self.per_head else (query, keys)
        self.q_norm, self.k_norm = (nn.RMSNorm(width, eps=config.rms_norm_eps) for width in widths)

    def forward(
        self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor | None, cache: Any
    ) -> torch.Tensor:
        """Attend each of (B, S, D) to itself and to what came before, the cache's included."""
        query = rotate(self._heads(self.q_proj(x), self.q_norm), angles)
        key = rotate(self._heads(self.k_proj(x), self.k_norm), angles)
        value = self._heads(self.v_proj(x), None)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=visible(query.shape[2], key.shape[2], self.window, mask, x.device),
            enable_gqa=True,
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        if norm is not None and not self.per_head:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.per_head:
            x = norm(x)
        return x.transpose(1, 2)


def visible(
    num_queries: int, num_keys: int, window: int, mask: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Return which keys each of the last `num_queries` positions sees, bool (B or 1, 1, Q, K)."""
    keys = torch.arange(num_keys, device=device)
    back = keys[num_keys - num_queries :, None] - keys
    seen = (back >= 0) & (back < (window or num_keys))
    if mask is None:
        return seen[None, None]
    # Padding sees itself: a softmax over nothing would be NaN, and reach others through the values.
    return (seen & mask.bool()[:, None, None, :]) | (back == 0)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to every position."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """The gate, in float32: the bias decides which experts, the plain scores how much of each."""

    e_score_correction_bias: torch.Tensor

    def __init__(self, config: OlmoTrainerConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        if config.has_selection_bias:
            self.register_buffer(
                "e_score_correction_bias", torch.zeros(config.num_experts, dtype=torch.float32)
            )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's experts, int64 (T, K), and their weights, float32 (T, K)."""
        logits = F.linear(x.float(), self.weight.float())
        softmax = self.config.gate == "softmax"
        scores = logits.softmax(-1) if softmax else logits.sigmoid()
        bias = self.e_score_correction_bias.float() if self.config.has_selection_bias else 0.0
        top_k = self.config.num_experts_per_tok
        experts = (scores + bias).topk(top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.config.route_weights != "scores":
            weights = weights / weights.sum(-1, keepdim=True)
        if self.config.route_weights == "mean_one":
            weights = weights * top_k
        return experts, weights


class Experts(nn.Module):
    """The routed experts: gate rows before up rows in one stack."""

    def __init__(self, config: OlmoTrainerConfig) -> None:
        super().__init__()
        width, hidden = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, width, hidden))

    def forward(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum over the experts of each of (T, D), by their weights."""
        out = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            token, place = torch.where(experts == expert)
            gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            rows = F.linear(F.silu(gate) * up, self.down_proj[expert])
            out = out.index_add(0, token, rows * weights[token, place, None].to(rows.dtype))
        return out


class MoE(nn.Module):
    """Routed experts and a shared one."""

    def __init__(self, config: OlmoTrainerConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        shared = config.shared_intermediate_size
        self.shared_expert = MLP(config.hidden_size, shared) if shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to every position of (B, S, D)."""
        flat = x.flatten(0, 1)
        out = self.experts(flat, *self.gate(flat)).view_as(x)
        return out if self.shared_expert is None else out + self.shared_expert(x)


class DecoderLayer(nn.Module):
    """`x + norm(attention(norm(x)))`, then the same around the feed-forward layer."""

    def __init__(self, config: OlmoTrainerConfig, layer: int) -> None:
        super().__init__()

        def norm() -> nn.Module:
            return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

        is_dense = layer < config.num_dense_layers
        self.is_peri = config.norms == "peri"
        self.self_attn = Attention(config, layer)
        self.mlp = (
            MLP(config.hidden_size, config.dense_intermediate_size) if is_dense else MoE(config)
        )
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        if self.is_peri:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()

    def forward(
        self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor | None, cache: Any
    ) -> torch.Tensor:
        """Apply both sublayers to (B, S, D)."""
        attended = self.self_attn(self.input_layernorm(x), angles, mask, cache)
        if not self.is_peri:
            x = x + attended
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Decoder(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(self, config: OlmoTrainerConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class OlmoTrainerForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model; `generate` keeps keys and values in the cache of `transformers`."""

    config_class = OlmoTrainerConfig
    base_model_prefix = "model"
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: OlmoTrainerConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Router | Experts):
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, std=self.config.initializer_range)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutput:
        """Return logits (B, S, V), and with labels the mean cross entropy of the next tokens.

        Older releases of `transformers` call the cache `past_key_values`; either is taken.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of them")
        cache = past_key_values if cache is None else cache
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]
        channels = torch.arange(0, self.config.head_dim, 2, device=x.device).float()
        rates = self.config.rope_theta ** (-channels / self.config.head_dim)
        angles = position_ids[:, None, :, None].float() * rates
        for layer in self.model.layers:
            x = layer(x, angles, attention_mask, cache)
        logits = self.lm_head(self.model.norm(x)[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
