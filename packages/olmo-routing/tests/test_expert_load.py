"""The report from sums agrees with the report from tokens."""

import dataclasses

import pytest
import torch
from olmo_routing import measure_balance, measure_load, route


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("parts", [1, 3])
def test_sums_of_the_parts_measure_as_the_whole(gate, parts):
    logits = torch.randn(31, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits[:, 0] += 2
    whole = route(logits, 2, gate=gate)
    expected = measure_balance(whole.scores_TE, whole.expert_ids_TK)
    counts_E, mass_E = torch.zeros(7).long(), torch.zeros(7, dtype=torch.float64)
    for part in logits.tensor_split(parts):  # unequal parts, as of ranks
        routing = route(part, 2, gate=gate)
        counts_E += routing.counts_E
        mass_E += (routing.scores_TE / routing.scores_TE.sum(1, keepdim=True)).sum(0)
    for counts in (counts_E, counts_E.double()):
        report = measure_load(counts, mass_E)
        for field in dataclasses.fields(report):
            value = getattr(report, field.name)
            torch.testing.assert_close(value, getattr(expected, field.name), msg=field.name)


def test_without_any_route():
    report = measure_load(torch.zeros(4).long(), torch.zeros(4))
    values = {f.name: getattr(report, f.name).item() for f in dataclasses.fields(report)}
    assert values == {
        "imbalance": 1.0,
        "entropy_deficit": 0.0,
        "coefficient_of_variation": 0.0,
        "dead_experts": 4,
        "balance_loss": 0.0,
        "cross_term": 0.0,
        "honesty": 1.0,
        "gerrymandered": False,
    }


@pytest.mark.parametrize("shapes", [((4,), (3,)), ((2, 4), (2, 4)), ((0,), (0,))])
def test_messages(shapes):
    with pytest.raises(ValueError, match="`counts_E` and `mass_E` must be vectors of one length"):
        measure_load(torch.zeros(shapes[0]).long(), torch.zeros(shapes[1]))
