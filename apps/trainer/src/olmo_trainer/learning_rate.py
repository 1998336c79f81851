"""The learning rate of each update: linear warm-up, then a cosine."""

import math

from olmo_trainer.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the rate of the update number `step` (from 0): linear warm-up, then a cosine.

    The first update uses the first step of the warm-up, never zero; the last uses
    `final_fraction` of the peak.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = max(1, num_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    floor = config.final_fraction
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
