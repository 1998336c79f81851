"""The report from sums agrees with the report from tokens."""

import dataclasses
import inspect

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


@pytest.mark.parametrize("factor", [1e-3, 0.25, 1.0, 1000.0])
def test_counts_may_be_averages_below_one(factor):
    counts, mass = torch.tensor([6.0, 2.0, 0.0, 4.0]), torch.tensor([3.0, 1.0, 2.0, 2.0])
    kept = torch.tensor([3.0, 2.0, 0.0, 4.0])
    expected = measure_load(counts, mass, kept_counts_E=kept, num_ranks=2)
    got = measure_load(factor * counts, mass, kept_counts_E=factor * kept, num_ranks=2)
    for name in set(got.names()) - {"routes"}:
        have, want = getattr(got, name).double(), getattr(expected, name).double()
        torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6, msg=name)


def test_the_mass_of_a_batch_is_what_its_docstring_says():
    torch.manual_seed(0)
    scores_TE, mask_T = torch.rand(7, 4), torch.arange(7) < 5
    ids = torch.rand(7, 4).topk(2).indices
    expected = measure_balance(scores_TE, ids, mask_T=mask_T)
    counts_E = ids[mask_T].flatten().bincount(minlength=4)
    lines = inspect.getdoc(measure_load).splitlines()
    code = [line.strip() for line in lines if line.strip().startswith(("scores_TE =", "mass_E ="))]
    assert len(code) == 2
    names = {"torch": torch, "scores_TE": scores_TE, "mask_T": mask_T}
    exec("\n".join(code), names)
    got = measure_load(counts_E, names["mass_E"])
    for name in got.names():
        have, want = getattr(got, name).double(), getattr(expected, name).double()
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("counts", "mass", "error", "message"),
    [
        (torch.ones(2).bool(), torch.ones(2), TypeError, "`counts_E` must hold numbers of routes"),
        (torch.ones(2), torch.ones(2).long(), TypeError, "`mass_E` must be a floating-point tens"),
        (-torch.ones(2), torch.ones(2), ValueError, "`counts_E` must not be negative"),
        ([1, 2], torch.ones(2), TypeError, "`counts_E` must be a tensor, got list"),
        (torch.ones(2), torch.ones(2, device="meta"), ValueError, "`mass_E` must be on cpu"),
    ],
)
def test_messages_of_counts_and_mass(counts, mass, error, message):
    with pytest.raises(error, match=message):
        measure_load(counts, mass)
