"""The learning rate of each update: linear warm-up, then what the schedule says.

With p from 0 at the first update after the warm-up (of `wsd`: just before the decay) to 1 at the
last update of the run, f the final fraction, and a peak of 1:

    cosine          f + (1 - f) (1 + cos(pi p)) / 2
    linear, wsd     f + (1 - f) (1 - p)
    square_root     f + (1 - f) (1 - sqrt(p))            (Haegele et al., arXiv 2405.18392, eq. 3)
"""

import math

from olmo_trainer.config import CosineSchedule, TrainerConfig, WSDSchedule


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Return the rate of the update number `step`, from 0: a function of these two alone.

    The first update uses the first step of the warm-up, never zero; the last one of the run uses
    `final_fraction` of the peak.
    """
    schedule, peak, last = config.schedule, config.optimizer.learning_rate, config.steps - 1
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    start = schedule.warmup_steps
    if isinstance(schedule, WSDSchedule):
        start = max(start - 1, last - max(1, round(schedule.decay_fraction * config.steps)))
    passed = min(1.0, max(0, step - start) / max(1, last - start))
    if isinstance(schedule, CosineSchedule):
        height = 0.5 * (1 + math.cos(math.pi * passed))
    elif isinstance(schedule, WSDSchedule) and schedule.decay == "square_root":
        height = 1 - math.sqrt(passed)
    else:
        height = 1 - passed
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * height)


def describe_bend(before: TrainerConfig, config: TrainerConfig, step: int) -> list[str]:
    """Return a line if a run that goes on after `step` steps gets another rate than it had."""
    was, rate = learning_rate(before, step), learning_rate(config, step)
    if math.isclose(was, rate, rel_tol=0.01):
        return []
    return [
        f"learning rate {rate:.3g} at the next step, {was:.3g} as it was going: the schedule is of "
        f"all steps, {config.steps} (before: {before.steps})"
    ]
