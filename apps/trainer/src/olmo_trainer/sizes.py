"""Parameter counts and resident bytes of a configuration, by formula.

The formulas are those of the Olmo-core 3 report, sections 4.3 and 14. No torch: `--dry-run` and
`inspect` answer at once. A test holds the counts equal to the built model.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from olmo_pipeline import split_layers

from olmo_trainer.config import ModelConfig, MuonConfig, OptimizerConfig, TrainerConfig

# Bytes a parameter: gradients and main weights are FP32 always; main weights and moments sharded.
GRADIENT_BYTES = 4
MAIN_WEIGHT_BYTES = 4
CACHE_BYTES = 2 * 33 / 32  # of an element in MXFP8, along rows and along columns
BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by how the ranks hold them."""

    embedding: int
    head: int
    dense: tuple[int, ...]  # of each layer: everything but routed experts
    hidden: tuple[int, ...]  # of those, in matrices between the ends of the model; no routers
    expert: int  # of one expert
    num_experts: int
    top_k: int
    num_moe_layers: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self._always + self.num_moe_layers * self.num_experts * self.expert

    @property
    def active(self) -> int:
        """Parameters that one token meets, embedding and head included."""
        return self._always + self.num_moe_layers * self.top_k * self.expert

    @property
    def _always(self) -> int:
        return self.embedding + self.head + sum(self.dense)


def count_parameters(model: ModelConfig) -> ParameterCounts:
    """Return the counts of the whole model."""
    D, attention, moe = model.d_model, model.attention, model.moe
    query = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    per_head = attention.qk_norm == "head"
    qk_norms = 2 * attention.head_dim if per_head else query + keys
    norms = qk_norms + (4 if model.norms == "peri" else 2) * D
    hidden = tuple(
        2 * D * (query + keys)
        + 3 * D * (moe.shared_hidden if layer in model.moe_layers else model.dense_hidden)
        for layer in range(model.num_layers)
    )
    dense = tuple(
        matrices + norms + (D * moe.num_experts if layer in model.moe_layers else 0)
        for layer, matrices in enumerate(hidden)
    )
    return ParameterCounts(
        embedding=model.vocab_size * D,
        head=model.vocab_size * D + D,
        dense=dense,
        hidden=hidden,
        expert=3 * D * moe.expert_hidden,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        num_moe_layers=len(model.moe_layers),
    )


def count_flops(model: ModelConfig, sequence_length: int) -> float:
    """Return the useful floating-point operations of a token, forward and backward.

    The report's accounting (section 14): 6 for each weight that a token meets in a product, and
    `12 * query width * positions seen` for attention, of which a position sees half of what is
    before it in the mean, or its window. The embedding's look-up, norms, recompute, padding and
    inactive experts count nothing. Where attention is kept within documents, this is the most that
    a token can cost: `count_weight_flops` and `count_attention_flops` tell what it does.
    """
    return (
        count_weight_flops(model) + count_attention_flops(model, sequence_length) / sequence_length
    )


def count_attention_flops(model: ModelConfig, length: int) -> float:
    """Return the operations of attention's mixing over one text of `length` positions.

    Of the causal pairs half of `length ** 2`, as the report counts, or those within windows.
    """
    query = model.attention.num_heads * model.attention.head_dim
    total = 0.0
    for layer in range(model.num_layers):
        window = min(model.attention.window_of(layer) or length, length)
        total += 12 * query * (window * length - window * window / 2)
    return total


def count_document_flops(model: ModelConfig, lengths: Iterable[int]) -> float:
    """Return the operations of attention's mixing within documents of these lengths."""
    times = Counter(lengths)
    return sum(count_attention_flops(model, each) * n for each, n in times.items())


def count_weight_flops(model: ModelConfig) -> float:
    """Return the operations of a token in products with weights, forward and backward."""
    D, attention, moe = model.d_model, model.attention, model.moe
    query = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    routed = D * moe.num_experts + 3 * D * (moe.top_k * moe.expert_hidden + moe.shared_hidden)
    total = 6.0 * D * model.vocab_size
    for layer in range(model.num_layers):
        weights = 2 * D * (query + keys)
        weights += routed if layer in model.moe_layers else 3 * D * model.dense_hidden
        total += 6 * weights
    return total


def head_cost_in_layers(model: ModelConfig) -> float:
    """Return the head's products over those of an average layer, to divide layers by."""
    counts = count_parameters(model)
    layers = sum(counts.dense) + counts.num_moe_layers * counts.top_k * counts.expert
    return counts.head / (layers / model.num_layers)


def state_bytes(optimizer: OptimizerConfig) -> tuple[int, int]:
    """Return the bytes of main weight and moments of an element: of hidden matrices, of the rest.

    AdamW keeps two moments, Muon one momentum for the matrices that are its own.
    """
    moment = BYTES[optimizer.moments]
    adamw = MAIN_WEIGHT_BYTES + 2 * moment
    return (MAIN_WEIGHT_BYTES + moment if isinstance(optimizer, MuonConfig) else adamw), adamw


def bytes_per_rank(config: TrainerConfig, *, weights: str) -> float:
    """Return the resident bytes of the fullest rank, for weights in `weights` ("fp32" or "bf16").

    Dense parameters cost `weight + 4 + 12/D` bytes, experts `(weight + 4)/M_E + 12/D`: in BF16 the
    report's `6 + 12/D` and `6/M_E + 12/D`, where D is data ranks times context ranks. Other
    optimizers have another number than 12; a Muon matrix stays whole with one of D ranks, and is
    counted as their mean. What is multiplied in MXFP8 is kept in it too, both ways round.
    Activations are not counted, nor the buffers of a dispatcher: see `dispatcher.buffer_bytes`.
    """
    counts, layout = count_parameters(config.model), config.layout
    replicas = (layout.data or 1) * layout.context
    resident = BYTES[weights] + GRADIENT_BYTES
    of_matrix, of_rest = (resident + each / replicas for each in state_bytes(config.optimizer))
    expert = of_matrix - resident + resident / layout.expert
    experts = counts.num_experts * counts.expert
    layers = [
        matrices * of_matrix
        + (dense - matrices) * of_rest
        + (experts * expert if index in config.model.moe_layers else 0.0)
        + CACHE_BYTES * _quantised(config, index)
        for index, (dense, matrices) in enumerate(zip(counts.dense, counts.hidden, strict=True))
    ]
    ranks = [
        sum(layers[index] for part in parts for index in part) for parts in layers_of_ranks(config)
    ]
    ranks[layout.rank_of_stage(0)] += counts.embedding * of_rest
    ranks[layout.rank_of_stage(layout.num_stages - 1)] += counts.head * of_rest
    return max(ranks)


def _quantised(config: TrainerConfig, layer: int) -> float:
    """Return how many parameters of a layer a rank keeps in MXFP8 beside their own format."""
    model, words = config.model, config.precision.mxfp8
    attention, moe = model.attention, model.moe
    heads = (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    total = 2.0 * model.d_model * heads if "attention" in words else 0.0
    if layer in model.moe_layers:
        total += 3 * model.d_model * moe.shared_hidden if "shared" in words else 0
        held = moe.num_experts / config.layout.expert
        total += held * 3 * model.d_model * moe.expert_hidden if "experts" in words else 0
    return total


def layers_of_ranks(config: TrainerConfig) -> list[list[range]]:
    """Return, for each pipeline rank, the layer ranges of its virtual stages."""
    ranks: list[list[range]] = [[] for _ in range(config.layout.pipeline)]
    for stage, layers in enumerate(stage_layers(config)):
        ranks[config.layout.rank_of_stage(stage)].append(layers)
    return ranks


def stage_layers(config: TrainerConfig) -> tuple[range, ...]:
    """Return each virtual stage's layers."""
    return split_layers(
        config.model.num_layers,
        config.layout.num_stages,
        last_extra=head_cost_in_layers(config.model),
    )
