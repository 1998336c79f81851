"""The search against a constraint solver that proves the least makespan, on small problems."""

import dataclasses

import pytest
from olmo_pipeline import Costs, lower_bound, search, simulate

cp_model = pytest.importorskip(
    "ortools.sat.python.cp_model",
    reason="the solver is not there; install the extra `solver` of olmo-pipeline",
)

HEAVY = [2] * 5 + [3]  # a last stage with the head
COSTS = {
    "equal": Costs(forward=2, input_gradient=1, weight_gradient=1),
    "double": Costs(forward=1, input_gradient=1, weight_gradient=1),
    "heavy": Costs(
        forward=HEAVY,
        backward=[2 * cost for cost in HEAVY],
        input_gradient=HEAVY,
        weight_gradient=HEAVY,
    ),
    "transfer": Costs(forward=2, backward=4, transfer=1),
}


def _least(num_ranks, num_microbatches, cap, costs, split):
    """Return the least makespan on the V with two chunks, whole costs, microbatches in order."""
    num_stages = 2 * num_ranks
    by_stage = costs.by_stage(num_stages)
    kinds = ["forward", "input_gradient", "weight_gradient"] if split else ["forward", "backward"]
    durations = [[int(cost) for cost in by_stage.actions[kind]] for kind in kinds]
    ranks = [min(s, num_stages - 1 - s) for s in range(num_stages)]
    delays = [int(by_stage.transfer[s]) * (ranks[s] != ranks[s + 1]) for s in range(num_stages - 1)]
    model = cp_model.CpModel()
    horizon = 4 * num_microbatches * sum(map(sum, durations))
    starts = {
        (k, s, i): model.new_int_var(0, horizon, "")
        for k in range(len(kinds))
        for s in range(num_stages)
        for i in range(num_microbatches)
    }
    end = model.new_int_var(0, horizon, "")
    busy = [[] for _ in range(num_ranks)]
    live = [[] for _ in range(num_ranks)]
    for (k, s, i), start in starts.items():
        stop = start + durations[k][s]
        model.add(end >= stop)
        busy[ranks[s]].append(model.new_interval_var(start, durations[k][s], stop, ""))
        if i:
            model.add(start >= starts[k, s, i - 1] + durations[k][s])
        if k == 0 and s:
            model.add(start >= starts[0, s - 1, i] + durations[0][s - 1] + delays[s - 1])
        if k == 1 and s < num_stages - 1:
            model.add(start >= starts[1, s + 1, i] + durations[1][s + 1] + delays[s])
        if k:
            model.add(start >= starts[k - 1, s, i] + durations[k - 1][s])
        if k == len(kinds) - 1:
            first, length = starts[0, s, i], model.new_int_var(1, horizon, "")
            model.add(first + length == stop)
            live[ranks[s]].append(model.new_interval_var(first, length, stop, ""))
    for rank in range(num_ranks):
        model.add_no_overlap(busy[rank])
        model.add_cumulative(live[rank], [1] * len(live[rank]), cap)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 60
    assert solver.solve(model) == cp_model.OPTIMAL
    return solver.objective_value


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("cap", [4, 6])
@pytest.mark.parametrize("name", COSTS)
def test_three_ranks(name, cap, split):
    costs = COSTS[name]
    found = search(3, 6, memory_cap=cap, costs=costs, split_backward=split)
    options = {field.name: getattr(costs, field.name) for field in dataclasses.fields(costs)}
    least = _least(3, 6, cap, costs, split)
    assert lower_bound(3, 6, memory_cap=cap, costs=costs, split_backward=split) <= least
    assert least <= simulate(found, **options).makespan <= 1.02 * least
