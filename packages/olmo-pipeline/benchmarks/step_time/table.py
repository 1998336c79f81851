"""The table of step times, beside the peer and beside the simulation."""

import statistics
from collections.abc import Mapping, Sequence

from contenders import Contender
from olmo_pipeline import Costs, simulate

PEERS = ("torch 1f1b", "torch interleaved")


def table_of(
    contenders: Sequence[Contender],
    times: Mapping[str, Sequence[float]],
    costs: Mapping[int, Costs],
) -> str:
    """Return Markdown: a row a contender.

    The simulated step has the measured costs of the actions and free transfers. Idle is the share
    of the step that a rank does not spend on the actions' own time, in both columns.
    """
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    heads = ("schedule", "step, ms (min to max)", *(f"{peer} / it" for peer in PEERS))
    heads += ("simulated, ms", "idle", "idle, simulated", "activations")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for contender in contenders:
        taken, step = times[contender.name], medians[contender.name]
        cells = [
            contender.name,
            f"{1e3 * step:.2f} ({1e3 * min(taken):.2f} to {1e3 * max(taken):.2f})",
            *(f"{medians[peer] / step:.3f}" for peer in PEERS),
        ]
        if contender.schedule is None:
            cells += [""] * 4
        else:
            own = costs[contender.schedule.num_stages // contender.schedule.num_ranks]
            timeline = simulate(
                contender.schedule,
                forward=own.forward,
                backward=own.backward,
                input_gradient=own.input_gradient,
                weight_gradient=own.weight_gradient,
            )
            work = (1 - timeline.bubble) * timeline.makespan
            peaks = "/".join(map(str, timeline.peak_live_per_rank))
            cells += [
                f"{1e3 * timeline.makespan:.2f}",
                f"{100 * (1 - work / step):.1f} %",
                f"{100 * timeline.bubble:.1f} %",
                peaks,
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def costs_of(costs: Mapping[int, Costs]) -> str:
    """Return one line for each size of stage."""
    lines = []
    for num_chunks, own in costs.items():
        kinds = own.by_stage(1).actions.items()
        numbers = ", ".join(f"{kind} {1e3 * times[0]:.3f}" for kind, times in kinds)
        lines.append(f"Actions of a stage, {num_chunks} a rank, ms: {numbers}")
    return "\n\n".join(lines)
