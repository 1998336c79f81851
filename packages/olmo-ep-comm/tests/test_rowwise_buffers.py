"""The memory of a one-sided exchange: what its formula says, what is there, and what it holds."""

import pytest
import torch
from olmo_ep_comm import VirtualRowwise, rowwise_buffer_bytes
from pair_codecs import CAST, MXFP8
from rowwise_problem import Problem
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@pytest.mark.parametrize(("codec", "row"), [(None, 128), (MXFP8, 80), (CAST, 64)])
def test_the_buffers_have_the_size_of_the_formula(codec, row):
    layer = VirtualRowwise(
        num_ranks=2,
        num_experts=8,
        max_tokens=16,
        width=64,
        top_k=3,
        live_forwards=2,
        codec=codec,
        combine_by="put",
    )
    rows = 2 * 16 * 3
    want = {"rows 0": rows * row, "rows 1": rows * row, "gradients": rows * 128}
    want |= {"sums": 16 * 2 * 128, "meta": rows * 16, "weights": 16 * 3 * 4, "counts": 2 * 10 * 4}
    assert layer.buffer_bytes == want
    buffers = layer._buffers
    received = (*buffers.rows.buffers, *buffers.gradients.buffers)
    shared = (buffers.sums, buffers.meta, buffers.weights, buffers.counts)
    allocated = [one.own[0].nbytes for one in (*received, *shared)]
    assert allocated == list(want.values())
    assert (
        rowwise_buffer_bytes(
            num_ranks=2,
            num_experts=8,
            max_tokens=16,
            width=64,
            top_k=3,
            live_forwards=2,
            codec=codec,
            combine_by="put",
        )
        == layer.buffer_bytes
    )


@pytest.mark.parametrize("codec", [None, MXFP8])
def test_fetched_sums_share_the_buffer_of_gradients(codec):
    sizes = {"num_ranks": 2, "num_experts": 8, "max_tokens": 16, "width": 64, "top_k": 3}
    layer = VirtualRowwise(**sizes, backward_codec=codec)  # "get" is the default
    rows = 2 * 16 * 3
    want = {"rows 0": rows * 128, "gradients": rows * 128, "meta": rows * 16}
    assert layer.buffer_bytes == want | {"weights": 16 * 3 * 4, "counts": 2 * 10 * 4}
    buffers = layer._buffers
    (gradients,) = buffers.gradients.buffers
    assert gradients.own[1].shape == (rows, 20 if codec else 32)  # 64 + 2 bytes in whole 16 bytes
    assert gradients.own[1].data_ptr() == buffers.sums.own[1].data_ptr()
    assert buffers.sums.own[1].shape == (rows, 64)
    assert buffers.sums.pointers.tolist() == [own.data_ptr() for own in buffers.sums.own]


class Allocations(TorchDispatchMode):
    """Every storage that an operation returns while it is on."""

    def __init__(self):
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self) -> dict[int, int]:
        return {at: size for at, (one, size) in self.seen.items() if not one.expired()}


@pytest.mark.parametrize("codec", [None, MXFP8, CAST])
@pytest.mark.parametrize("combine_by", ["put", "get"])
def test_a_live_forward_holds_the_bytes_of_the_formula(codec, combine_by):
    """What is alive after a dispatch and was not before, the smallest things apart."""
    case = Problem(tokens=(16, 16), num_experts=8, top_k=3, width=64)
    layer = case.virtual(codec=codec, combine_by=combine_by)
    inputs = [case.inputs(rank) for rank in range(2)]
    tokens = [x.requires_grad_() for x, _, _ in inputs]
    with Allocations() as made:
        sent = layer.dispatch(tokens, [i for _, i, _ in inputs], [w for _, _, w in inputs])
    buffers = layer._buffers
    received = (*buffers.rows.buffers, *buffers.gradients.buffers)
    shared = (*received, buffers.sums, buffers.meta, buffers.weights, buffers.counts)
    known = {own.untyped_storage()._cdata for one in shared for own in one.own}
    known |= {value.untyped_storage()._cdata for part in inputs for value in part}
    held = sum(size for at, size in made.alive().items() if at not in known)
    assert layer.forward_bytes == 96 * (20 + 256 * bool(codec)) + 16 * (16 * 3 + 4)
    assert 0 <= held - 2 * layer.forward_bytes < 200  # ends, drops, and the like
    assert sent[0].num_dropped == 0


def test_the_default_capacity_holds_the_worst_imbalance():
    """Every token of every rank to every expert of one rank: all rows used, none dropped."""
    layer = VirtualRowwise(
        num_ranks=3, num_experts=6, max_tokens=5, width=4, top_k=2, dtype=torch.float32
    )
    tokens = [torch.randn(5, 4) for _ in range(3)]
    ids = [torch.tensor([[4, 5]] * 5)] * 3
    with torch.no_grad():
        sent = layer.dispatch(tokens, ids, [torch.full((5, 2), 0.5)] * 3)
        assert [part.offsets_E.tolist() for part in sent] == [[0, 0], [0, 0], [15, 30]]
        assert len(sent[2].rows_RD) == 30
        assert all(part.num_dropped == 0 for part in sent)
        results = [part.rows_RD * part.row_weights_R[:, None] for part in sent]
        assert all(map(torch.equal, layer.combine(results, sent[0].handle), tokens))


def test_a_dropless_layer_never_drops_an_expert_that_is_named_twice():
    """Two rows where they fit, on the way home too; an error before any row is written else."""
    layer = VirtualRowwise(
        num_ranks=1, num_experts=1, max_tokens=2, width=4, top_k=2, dtype=torch.float32
    )
    x_TD, twice, weights_TK = torch.randn(2, 4), torch.zeros(2, 2).long(), torch.full((2, 2), 0.5)
    once = torch.tensor([[0, 0], [-1, -1]])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"names an expert twice, 2, got more; name each"):
            layer.dispatch([x_TD], [twice], [weights_TK])
        assert layer.num_free_leases == 1
        with torch.no_grad():
            (sent,) = layer.dispatch([x_TD], [once], [weights_TK])
            assert sent.offsets_E.tolist() == [2]
            assert sent.num_dropped == 0
            assert torch.equal(sent.rows_RD, x_TD[[0, 0]])
            (y_TD,) = layer.combine([sent.rows_RD / 2], sent.handle)
        assert torch.equal(y_TD, torch.stack([x_TD[0], torch.zeros(4)]))
        del sent
    limited = VirtualRowwise(
        num_ranks=1,
        num_experts=1,
        max_tokens=4,
        width=8,
        top_k=2,
        capacity=4,
        admit=lambda requested, capacity: requested,
    )
    (sent,) = limited.dispatch(
        [torch.ones(4, 8).bfloat16()], [torch.zeros(4, 2).long()], [torch.ones(4, 2)]
    )
    assert sent.num_dropped == 4  # with a capacity drops are counted, whatever was named
