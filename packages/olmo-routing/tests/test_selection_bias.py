"""The selection bias: its step, its precision, its ranks and its file."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from olmo_routing import Router, SelectionBias
from torch import nn

COUNTS = torch.tensor([5, 3, 2, 2], dtype=torch.int32)


def test_the_step():
    bias = SelectionBias(4, 0.125)
    buffer = bias.bias_E
    bias.update(COUNTS)
    assert bias.bias_E.tolist() == [-0.125, 0.0, 0.125, 0.125]
    bias.update(COUNTS)
    assert bias.bias_E.tolist() == [-0.25, 0.0, 0.25, 0.25]
    assert bias.bias_E is buffer  # in place: whoever holds the buffer sees the step
    bias.update(torch.zeros(4).int())
    assert bias.bias_E.tolist() == [-0.25, 0.0, 0.25, 0.25]
    bias.rate = 0.0
    bias.update(COUNTS)
    assert bias.bias_E.tolist() == [-0.25, 0.0, 0.25, 0.25]
    assert COUNTS.tolist() == [5, 3, 2, 2]


def test_an_expert_at_the_mean_stays_also_with_huge_counts():
    # In float32 the mean of these counts rounds away from the count.
    counts = torch.tensor([2**25 + 1, 2**25 + 1, 2**25, 2**25 + 2], dtype=torch.int32)
    bias = SelectionBias(4, 1.0)
    bias.update(counts)
    assert bias.bias_E.tolist() == [0.0, 0.0, 1.0, -1.0]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_summed_microbatches_make_one_step(microbatches):
    torch.manual_seed(0)
    bias = SelectionBias(4, 0.01)
    router = Router(3, 4, 2, selection_bias=bias)
    x = torch.randn(12, 3)
    whole = router(x).counts_E
    parts = [router(part).counts_E for part in x.chunk(microbatches)]
    assert torch.equal(torch.stack(parts).sum(0), whole)
    bias.update(torch.stack(parts).sum(0))
    assert torch.equal(bias.bias_E, 0.01 * torch.sign(6 - whole.float()))


@pytest.mark.parametrize("convert", ["bfloat16", "half", "double"])
def test_stays_exactly_float32_in_a_model_of_another_precision(convert):
    model = nn.Sequential(Router(3, 4, 2, selection_bias=SelectionBias(4, 0.001)))
    router = model[0]
    assert isinstance(router, Router)
    bias = router.selection_bias
    assert bias is not None
    for _ in range(7):
        bias.update(COUNTS)
    before, buffer = bias.bias_E.clone(), bias.bias_E
    getattr(model, convert)()
    assert router.weight_ED.dtype != torch.float32
    assert torch.equal(bias.bias_E, before)
    assert bias.bias_E.dtype == torch.float32
    assert bias.bias_E is buffer
    model.to("cpu", torch.bfloat16)
    assert torch.equal(bias.bias_E, before)
    model.to("meta", torch.bfloat16)
    assert bias.bias_E.is_meta
    assert bias.bias_E.dtype == torch.float32


def test_the_file_holds_the_live_bias():
    bias = SelectionBias(4, 0.001)
    for _ in range(3):
        bias.update(COUNTS)
    file = io.BytesIO()
    torch.save(bias.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["bias_E"].dtype == torch.float32
    assert torch.equal(saved["bias_E"], bias.bias_E)
    assert saved["bias_E"].abs().sum() > 0
    fresh = SelectionBias(4, 0.001)
    fresh.load_state_dict(saved)
    assert torch.equal(fresh.bias_E, bias.bias_E)
    assert torch.equal(copy.deepcopy(bias).bias_E, bias.bias_E)


def _update_of_each_rank(rank, world, counts):
    summed, own = SelectionBias(4, 0.5), SelectionBias(4, 0.5)
    mine = torch.tensor(counts[rank])
    summed.update(mine, group=dist.group.WORLD)
    own.update(mine)
    assert mine.tolist() == counts[rank]
    return summed.bias_E.tolist(), own.bias_E.tolist()


@pytest.mark.dist
def test_ranks_sum_their_counts_only_over_a_given_group(processes):
    # The parts of [5, 3, 2, 2]; the last rank saw no token.
    parts = [[5, 0, 0, 1], [0, 3, 2, 1], [0, 0, 0, 0]]
    results = processes.run(_update_of_each_rank, parts, world=3)
    assert [summed for summed, _ in results] == [[-0.5, 0.0, 0.5, 0.5]] * 3
    assert [own for _, own in results] == [
        [-0.5, 0.5, 0.5, 0.5],
        [0.5, -0.5, -0.5, 0.5],
        [0.0, 0.0, 0.0, 0.0],
    ]


def test_messages():
    with pytest.raises(ValueError, match=r"`rate` must be finite and at least 0, got -1\.0"):
        SelectionBias(4, -1.0)
    with pytest.raises(ValueError, match="`num_experts` must be at least 1, got 0"):
        SelectionBias(0, 0.1)
    with pytest.raises(TypeError, match=r"`counts_E` must be an integer tensor, got torch.float32"):
        SelectionBias(4, 0.1).update(COUNTS.float())
    with pytest.raises(ValueError, match=r"`counts_E` must have shape \(4,\), got \(3,\)"):
        SelectionBias(4, 0.1).update(COUNTS[:3])
