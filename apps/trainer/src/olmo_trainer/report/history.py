"""A run's records as arrays, and the sums over windows of steps that its pictures show.

Balance honesty of an MoE layer, from its shares of routes `f` and mean gate probability `P` over E
experts, is the slope of `P` on `f`:

    honesty = cov(f, P) / var(f)        1 honest, 0 blind, below 0 gerrymandered

The balance loss `E * sum f P` equals `1 + E^2 cov(f, P)`, so it sees imbalance only as far as the
layer is honest; below 0 it pays for imbalance. Near perfect balance `var(f)` vanishes and the
slope of one step is noise: a curve pools a window of steps, `sum cov / sum var`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from olmo_trainer.metrics import (
    HeldoutRecord,
    RanksRecord,
    Record,
    RunHeader,
    StepRecord,
    record_from_dict,
)

_COUNTS = ("reruns", "over_capacity")
MAX_LAYERS = 6  # drawn; a table lists them all


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The records as arrays: n steps, L MoE layers, E experts a layer; NaN where not finite.

    Of the layers there are k steps, those that wrote their numbers.
    """

    steps: np.ndarray  # (n,)
    values: dict[str, np.ndarray]  # each (n,)
    layer_steps: np.ndarray  # (k,)
    counts: np.ndarray  # (k, L, E)
    imbalance: np.ndarray  # (k, L)
    honesty: np.ndarray  # (k, L)
    entropy_deficit: np.ndarray  # (k, L)
    heldout: np.ndarray  # (m, 2): step, loss
    not_finite: int
    names: list[str]  # of the L layers
    bytes_per_token: float | None = None  # None where a token's bytes are not known
    sources: dict[str, np.ndarray] = field(default_factory=dict)  # (m, 2) each: step, loss
    phases: dict[str, np.ndarray] = field(default_factory=dict)  # seconds, each (n,)
    balance: dict[str, np.ndarray] = field(default_factory=dict)  # each (k, L)
    ranks: RanksRecord | None = None  # the last

    @property
    def loss_unit(self) -> str:
        """What a loss is counted in."""
        return "nats per byte" if self.bytes_per_token == 1 else "nats per token"

    @property
    def end(self) -> slice:
        """The last tenth of the steps, at least one: what "at the end" means in the report."""
        return _last_tenth(self.steps)

    @property
    def layer_end(self) -> slice:
        """The same of the steps that wrote the numbers of layers."""
        return _last_tenth(self.layer_steps)

    @property
    def drawn(self) -> list[int]:
        """The layers in pictures, in depth order: dead experts first, then the worst load."""
        dead = self.dead_at_end
        load = np.nan_to_num(finite_mean(self.imbalance[self.layer_end]))
        return sorted(np.lexsort((-load, -dead))[:MAX_LAYERS].tolist())

    @property
    def dead_at_end(self) -> np.ndarray:
        """Experts a layer that got no route over the last tenth of the steps, (L,)."""
        return (self.counts[self.layer_end].sum(0) == 0).sum(-1)

    def pooled_honesty(self, window: int) -> np.ndarray:
        """Honesty over a window of steps, sum cov / sum var; NaN where the load never varied."""
        share = self.counts / np.maximum(self.counts.sum(-1, keepdims=True), 1)
        variance = np.where(np.isfinite(self.honesty), share.var(-1), 0.0)
        covariance = np.nan_to_num(self.honesty) * variance
        total = _windowed(variance, np.ones(window))
        flat = total <= 1e-18  # one route too many of ten million gives more
        pooled = _windowed(covariance, np.ones(window)) / np.where(flat, 1.0, total)
        return np.where(flat, np.nan, pooled)


def gather_history(
    records: Sequence[Record | Mapping[str, Any]], layer_names: Sequence[str] | None
) -> RunHistory:
    """Turn records, in order of steps, into arrays.

    Raises:
        ValueError: Records differ in layers or experts, or `layer_names` in number from the layers.
    """
    made = [record_from_dict(r) if isinstance(r, Mapping) else r for r in records]
    steps = [record for record in made if isinstance(record, StepRecord)]
    wrote = [record for record in steps if record.expert_counts]
    shapes = {tuple(len(counts) for counts in record.expert_counts) for record in wrote}
    if len(shapes) > 1 or any(len(set(shape)) > 1 for shape in shapes):
        raise ValueError(
            "All records must have the same MoE layers with the same number of experts, "
            f"got expert counts of shapes {sorted(shapes)}."
        )
    shape = shapes.pop() if shapes else ()
    if layer_names is None:
        layer_names = [f"MoE layer {layer + 1}" for layer in range(len(shape))]
    names = list(layer_names)
    if wrote and len(names) != len(shape):
        raise ValueError(
            f"`layer_names` must have one name per MoE layer ({len(shape)}), got {len(names)}."
        )
    heldout = {r.step: r.heldout_loss for r in steps if r.heldout_loss is not None}
    heldout |= {r.step: r.loss for r in made if isinstance(r, HeldoutRecord)}
    curves = ("loss", "learning_rate", "grad_norm", "tokens_per_second")
    values = {name: np.array([getattr(r, name) for r in steps], float) for name in curves}
    extra = {
        name: _optional([getattr(r, name) for r in steps])
        for name in (
            *("flops_per_second", "model_flops_utilization", "capacity_factor"),
            "worst_imbalance",
        )
    }
    extra |= {name: np.array([getattr(r, name) for r in steps], float) for name in _COUNTS}
    extra["dropped_part"] = np.array([r.dropped / max(_routes(r), 1) for r in steps], float)
    layers = {
        name: np.array([getattr(r, name) for r in wrote], float).reshape(len(wrote), len(names))
        for name in ("imbalance", "honesty", "entropy_deficit")
    }
    heldout_rows = np.array(sorted(heldout.items()), float).reshape(-1, 2)
    # Honesty has no value in a perfectly balanced step: that is no fault to count.
    arrays = [*values.values(), layers["imbalance"], layers["entropy_deficit"], heldout_rows]
    return RunHistory(
        steps=np.array([r.step for r in steps], float),
        values={name: _finite(array) for name, array in (values | extra).items()},
        layer_steps=np.array([r.step for r in wrote], float),
        counts=np.array([r.expert_counts for r in wrote], float).reshape(
            len(wrote), len(names), shape[0] if shape else 0
        ),
        imbalance=_finite(layers["imbalance"]),
        honesty=_finite(layers["honesty"]),
        entropy_deficit=_finite(layers["entropy_deficit"]),
        heldout=_finite(heldout_rows),
        not_finite=int(sum(np.sum(~np.isfinite(array)) for array in arrays)),
        names=names,
        **_later(made, steps, len(names)),
    )


def _later(made: Sequence[Record], steps: Sequence[StepRecord], num_layers: int) -> dict[str, Any]:
    """Gather what older logs do not hold; empty where the log has none of it."""
    headers = [record for record in made if isinstance(record, RunHeader)]
    known = headers[-1].info.get("bytes_per_token") if headers else None
    passes = [record for record in made if isinstance(record, HeldoutRecord)]
    sources = {name for each in passes for name in each.source_losses}
    phases = list(dict.fromkeys(name for each in steps for name in each.phase_seconds))
    wrote = [each for each in steps if each.expert_counts]
    numbers = {name for each in wrote for name in each.balance}
    nothing = [np.nan] * num_layers
    ranks = [record for record in made if isinstance(record, RanksRecord)]
    return {
        "bytes_per_token": float(known) if isinstance(known, int | float) else None,
        "sources": {
            name: _finite(
                np.array(
                    [(r.step, r.source_losses[name]) for r in passes if name in r.source_losses],
                    float,
                )
            )
            for name in sorted(sources)
        },
        "phases": {
            name: _finite(np.array([r.phase_seconds.get(name, np.nan) for r in steps], float))
            for name in phases
        },
        "balance": {
            name: _finite(np.array([r.balance.get(name, nothing) for r in wrote], float))
            for name in sorted(numbers)
        },
        "ranks": ranks[-1] if ranks else None,
    }


def _routes(record: StepRecord) -> int:
    """Return how many routes a step requested; an older log tells it by its layers alone."""
    return sum(map(sum, record.expert_counts)) if record.routes is None else record.routes


def _last_tenth(steps: np.ndarray) -> slice:
    return slice(max(len(steps) - max(1, len(steps) // 10), 0), None)


def _optional(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], float)


def _finite(array: np.ndarray) -> np.ndarray:
    """Put NaN for what no axis can show, infinities and magnitudes above 1e30."""
    return np.where(np.abs(array) < 1e30, array, np.nan)


def _windowed(array: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Weighted sum over a window centred on each entry of axis 0, cut off at both ends."""
    return np.apply_along_axis(np.convolve, 0, array, kernel, "same")


def smooth(array: np.ndarray, window: int) -> np.ndarray:
    """Triangular mean along axis 0, `window` wide at half its height; NaN where the entry is."""
    number = np.isfinite(array)
    kernel = np.bartlett(2 * window + 1)[1:-1]
    weight = _windowed(number.astype(float), kernel)
    mean = _windowed(np.where(number, array, 0.0), kernel) / np.where(number, weight, 1.0)
    return np.where(number, mean, np.nan)


def finite_mean(array: np.ndarray) -> np.ndarray:
    """Mean over axis 0 of what is a number; NaN where nothing is."""
    number = np.isfinite(array)
    count = number.sum(0)
    return np.where(count > 0, np.where(number, array, 0.0).sum(0) / np.maximum(count, 1), np.nan)
