"""Numbers of whole runs, and of runs beside the BF16 run of the same recipe and seed."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cases import BASELINE
from training import Run


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity over seeds."""

    values: tuple[float, ...]

    def words(self, form: str) -> str:
        """Return mean, standard deviation over seeds and range by `form`; nothing of nothing."""
        if not self.values:
            return ""
        mean = f"{statistics.fmean(self.values):{form}}"
        if len(self.values) == 1:
            return mean
        plain = form.replace("+", "")
        deviation = f"{statistics.stdev(self.values):{plain}}"
        least, most = (f"{of(self.values):{form}}" for of in (min, max))
        return f"{mean} ± {deviation} [{least}..{most}]"


@dataclass(frozen=True, slots=True)
class Row:
    """One precision of one recipe over its whole runs; beside BF16 over the seeds that both have.

    Attributes:
        loss: Training loss, the mean over the last tenth of the steps, in nats a token.
        loss_above: That less BF16's.
        heldout: Held-out loss after the last step.
        heldout_above: That less BF16's.
        norm: Gradient norm before clipping, the mean over the last tenth.
        norm_above: That over BF16's, less 1.
        failed: Seeds whose run did not come to its end.
    """

    precision: str
    loss: Spread
    loss_above: Spread
    heldout: Spread
    heldout_above: Spread
    norm: Spread
    norm_above: Spread
    failed: tuple[int, ...]


def last_tenth(values: Sequence[float]) -> float:
    """Return the mean over the last tenth of the steps, at least one."""
    return statistics.fmean(values[-max(1, len(values) // 10) :])


def rows_of(runs: Sequence[Run], recipe: str) -> list[Row]:
    """Return a row for each precision of a recipe, in the order in which they first come."""
    of_recipe = [run for run in runs if run.case.recipe == recipe]
    whole = [run for run in of_recipe if not run.failure]
    beside = {run.case.seed: run for run in whole if run.case.precision == BASELINE}

    def row(precision: str) -> Row:
        mine = sorted(
            (run for run in whole if run.case.precision == precision), key=lambda r: r.case.seed
        )
        pairs = [(run, beside[run.case.seed]) for run in mine if run.case.seed in beside]
        if precision == BASELINE:
            pairs = []

        def over(measure: Callable[[Run], float]) -> Spread:
            return Spread(tuple(measure(run) for run in mine))

        def above(measure: Callable[[Run], float]) -> Spread:
            return Spread(tuple(measure(run) - measure(other) for run, other in pairs))

        return Row(
            precision,
            over(_loss),
            above(_loss),
            over(_heldout),
            above(_heldout),
            over(_norm),
            Spread(tuple(_norm(run) / _norm(other) - 1 for run, other in pairs)),
            tuple(
                run.case.seed
                for run in of_recipe
                if run.failure and run.case.precision == precision
            ),
        )

    return [row(each) for each in dict.fromkeys(run.case.precision for run in of_recipe)]


def _loss(run: Run) -> float:
    return last_tenth(run.losses)


def _norm(run: Run) -> float:
    return last_tenth(run.norms)


def _heldout(run: Run) -> float:
    return run.heldout


def binned(values: Sequence[float], bins: int) -> list[tuple[float, float]]:
    """Return (middle step, mean) of `bins` equal parts of the steps, or of as many as there are."""
    count = min(bins, len(values))
    ends = [len(values) * part // count for part in range(count + 1)] if count else []
    return [
        ((low + 1 + high) / 2, statistics.fmean(values[low:high])) for low, high in pairwise(ends)
    ]
