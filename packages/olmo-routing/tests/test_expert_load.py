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
        "routes": 0.0,
        "imbalance": 1.0,
        "rank_imbalance": 1.0,
        "kept_imbalance": 1.0,
        "kept_rank_imbalance": 1.0,
        "dropped_routes": 0.0,
        "entropy_deficit": 0.0,
        "coefficient_of_variation": 0.0,
        "score_variation": 0.0,
        "dead_experts": 4,
        "dead_mass": 0.0,
        "balance_loss": 0.0,
        "cross_term": 0.0,
        "honesty": 1.0,
        "gerrymandered": False,
    }


def test_kept_counts_and_ranks():
    requested, kept = torch.tensor([6, 2, 0, 4]), torch.tensor([3, 2, 0, 4], dtype=torch.int32)
    mass = torch.tensor([0.5, 1.0, 2.0, 0.5])
    report = measure_load(requested, mass, kept_counts_E=kept, num_ranks=2)
    assert report.imbalance.item() == 2.0
    assert report.rank_imbalance.item() == pytest.approx(8 * 2 / 12)
    assert report.kept_imbalance.item() == pytest.approx(4 * 4 / 9)
    assert report.kept_rank_imbalance.item() == pytest.approx(5 * 2 / 9)
    assert report.dropped_routes.item() == 3 / 12
    assert report.dead_experts.item() == 1
    assert report.dead_mass.item() == 0.5
    deviations = [value / 4 - 1 / 4 for value in (0.5, 1.0, 2.0, 0.5)]
    variation = (sum(each**2 for each in deviations) / 4) ** 0.5 * 4
    assert report.score_variation.item() == pytest.approx(variation)
    bound = report.coefficient_of_variation * report.score_variation
    assert abs(report.cross_term) <= bound + 1e-12


def test_messages_of_what_was_kept():
    with pytest.raises(ValueError, match=r"`kept_counts_E` must have shape \(4,\), got \(3,\)"):
        measure_load(torch.ones(4), torch.ones(4), kept_counts_E=torch.ones(3))
    with pytest.raises(ValueError, match="`num_ranks` must divide the 4 experts, got 3"):
        measure_load(torch.ones(4), torch.ones(4), num_ranks=3)
    with pytest.raises(TypeError, match="`num_ranks` must be an int, got float"):
        measure_load(torch.ones(4), torch.ones(4), num_ranks=2.0)


@pytest.mark.parametrize("shapes", [((4,), (3,)), ((2, 4), (2, 4)), ((0,), (0,))])
def test_messages(shapes):
    with pytest.raises(ValueError, match="`counts_E` and `mass_E` must be vectors of one length"):
        measure_load(torch.zeros(shapes[0]).long(), torch.zeros(shapes[1]))
