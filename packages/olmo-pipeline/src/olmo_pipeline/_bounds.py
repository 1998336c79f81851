"""A time that no schedule can beat, under a cap on live activations.

Let `A(s)` be the earliest start of a forward of stage s and `E(s)` that of its backward (the chain
of one microbatch, nothing in its way), `R(s)` what is left of the chain after a forward of stage s
has ended, and `Z(s)` what is left after its backward has. For a rank with stages s, work w (all its
actions) and cap c, the makespan is at least each of

    the chain of one microbatch
    min A  +  w  +  min Z                                   starting late, ending early
    min A  +  m sum over s of (life of an activation) / c  +  min Z            room
    e  +  l  +  w  -  early  -  late                        filling and draining under the cap

with `e = min E`, `l = min R`. For the last: before e the rank can do forwards only, and no more
than c of them, since nothing has been freed: `early` is the longest c forwards, at most
`e - min A`. After the end of its last forward, which is at least l before the end of all, it can do
no more than the backwards of c activations: `late`, at most `l - min Z`. Between the two it does
the rest. This needs more than c forwards on the rank, so that the last comes after e.

With a split backward an activation lives until its weight gradient, a rank may end with one
(Z = 0), and R includes the last weight gradient.

With two chunks and all costs 1 the last bound reads, for rank P - 1,

    whole   4 m + 2 (P - 1) + 2 (2 P - c)           split   6 m + (P - 1) + (2 P - c)

for c up to 2 P (split: and from (3 P) / 2), which `search` attains in most cases from c = P + 2 on.
"""

from collections.abc import Sequence

from ._list_scheduler import Problem


def least_makespan(problem: Problem) -> float:
    """Return a lower bound of the makespan, as the module's text says."""
    chain = _Chain(problem)
    bounds = [chain.length]
    for rank in range(problem.num_ranks):
        stages = [s for s, holder in enumerate(problem.rank_of_stage) if holder == rank]
        if stages:
            bounds += _bounds_of_rank(problem, chain, rank, stages)
    return max(bounds)


class _Chain:
    """Earliest times of one microbatch by stage: A, E, R and Z of the module's text."""

    def __init__(self, problem: Problem) -> None:
        forward, backward = problem.durations[:2]
        stages = range(len(forward))
        delays = problem.delays
        self.forward_start = [0.0]
        for stage in stages[:-1]:
            end = self.forward_start[stage] + forward[stage]
            self.forward_start.append(end + delays[stage])
        start = self.forward_start[-1] + forward[-1]
        starts = [start]
        for stage in stages[:0:-1]:
            start += backward[stage] + delays[stage - 1]
            starts.append(start)
        self.backward_start = starts[::-1]
        split = problem.splits_backward
        self.length = start + backward[0] + (problem.durations[2][0] if split else 0.0)
        self.after_forward = [
            self.length - self.forward_start[stage] - forward[stage] for stage in stages
        ]
        self.after_backward = [
            0.0 if split else self.length - self.backward_start[stage] - backward[stage]
            for stage in stages
        ]


def _bounds_of_rank(
    problem: Problem, chain: _Chain, rank: int, stages: Sequence[int]
) -> list[float]:
    count, cap, work = problem.num_microbatches, problem.max_live[rank], problem.work_of(rank)
    forwards = [problem.durations[0][stage] for stage in stages]
    backwards = [sum(kind[stage] for kind in problem.durations[1:]) for stage in stages]
    head = min(chain.forward_start[stage] for stage in stages)
    tail = min(chain.after_backward[stage] for stage in stages)
    lives = [
        chain.backward_start[stage] - chain.forward_start[stage] + backward
        for stage, backward in zip(stages, backwards, strict=True)
    ]
    bounds = [head + work + tail, head + count * sum(lives) / cap + tail]
    if count * len(stages) > cap:
        first = min(chain.backward_start[stage] for stage in stages)
        last = min(chain.after_forward[stage] for stage in stages)
        early = min(_longest(forwards, count, cap), first - head)
        late = min(_longest(backwards, count, cap), last - tail)
        bounds.append(first + last + work - early - late)
    return bounds


def _longest(durations: Sequence[float], copies: int, number: int) -> float:
    """Return the sum of the `number` longest, each duration being there `copies` times."""
    total = 0.0
    for duration in sorted(durations, reverse=True):
        taken = min(copies, number)
        total += taken * duration
        number -= taken
    return total
