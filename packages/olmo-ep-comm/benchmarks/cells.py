"""What is measured of whole exchanges: layers, pairs, and what the link gives others."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

import timing
import torch
import torch.distributed as dist
from olmo_ep_comm import AllToAllDispatcher, Dispatcher, PairCodec, RowwiseDispatcher
from olmo_ep_comm._rowwise.sizes import CombineBy
from torch import Tensor

BLOCK = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of a rank, width, experts and slots."""

    T: int
    D: int
    E: int
    K: int

    def __str__(self) -> str:
        return f"T {self.T}, D {self.D}, E {self.E}, K {self.K}"


SHAPES = (Shape(16384, 4096, 64, 4), Shape(16384, 4096, 64, 8))
TINY = (Shape(64, 256, 8, 2), Shape(64, 256, 8, 4))


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison: milliseconds of each contender, and the bytes that one call sends away.

    `wire` are bytes of rows that leave this rank, `logical` those of all rows that its experts get.
    """

    what: str
    samples: dict[str, list[float]]
    wire: dict[str, int]
    logical: int


def make_inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return tokens, ids and weights, every expert as likely as every other."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    scores_TE = torch.rand(shape.T, shape.E, generator=generator, device=device)
    weights_TK, ids = scores_TE.topk(shape.K)
    x_TD = torch.randn(shape.T, shape.D, generator=generator, device=device).to(dtype)
    return [x_TD, ids, weights_TK]


def make_rowwise(
    shape: Shape,
    dtype: torch.dtype,
    codec: PairCodec | None = None,
    combine_by: CombineBy = "get",
) -> RowwiseDispatcher:
    """Return a dropless dispatcher for one live forward."""
    return RowwiseDispatcher(
        num_experts=shape.E,
        max_tokens=shape.T,
        width=shape.D,
        top_k=shape.K,
        dtype=dtype,
        codec=codec,
        combine_by=combine_by,
    )


def forward(dispatcher: Dispatcher, inputs: list[Tensor]) -> Tensor:
    """Dispatch and combine, the experts doing nothing."""
    x_TD, ids, weights_TK = inputs
    sent = dispatcher.dispatch(x_TD, ids, weights_TK)
    return dispatcher.combine(sent.rows_RD, sent.handle)


def both(dispatcher: Dispatcher, inputs: list[Tensor]) -> None:
    """Run forward and backward, the gradient of the result being the result."""
    x_TD, ids, weights_TK = inputs
    x_TD = x_TD.detach().requires_grad_()
    y_TD = forward(dispatcher, [x_TD, ids, weights_TK])
    y_TD.backward(y_TD.detach())


def rows_away(ids: Tensor, shape: Shape) -> tuple[int, int]:
    """Return the rows that leave this rank: one a route, and one a destination rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    owner_TK = ids // (shape.E // ranks)
    away = int((owner_TK != rank).sum())
    once = sum(int((owner_TK == other).any(1).sum()) for other in range(ranks) if other != rank)
    return away, once


def layers(shape: Shape, device: torch.device, repeats: int) -> Iterator[Cell]:
    """Compare whole exchanges, sums written or fetched, with all-to-all, after they agree."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = make_inputs(shape, device, dtype)
    peer = AllToAllDispatcher(num_experts=shape.E)
    put, get = (make_rowwise(shape, dtype, combine_by=by) for by in get_args(CombineBy))
    with torch.no_grad():
        written, fetched, theirs = (forward(one, inputs) for one in (put, get, peer))
    if not torch.equal(written, fetched):
        raise RuntimeError("sums that are fetched differ from those that are written")
    torch.testing.assert_close(written, theirs, rtol=4e-2, atol=4e-2)
    away, once = rows_away(inputs[1], shape)
    row = shape.D * dtype.itemsize
    logical = shape.T * shape.K * row
    named = {"rowwise, put": put, "rowwise, get": get, "all_to_all": peer}

    def times(call: Callable[[Dispatcher, list[Tensor]], object]) -> dict[str, list[float]]:
        calls = {name: functools.partial(call, one, inputs) for name, one in named.items()}
        return timing.interleave(calls, repeats, device)

    for what, call, count in (
        ("forward", torch.no_grad()(forward), 2),
        ("forward + backward", both, 4),
    ):
        wire = dict.fromkeys(("rowwise, put", "rowwise, get"), count * once * row)
        wire["all_to_all"] = count * away * row
        yield Cell(f"{shape}: {what}", times(call), wire, count * logical)


def pairs(shape: Shape, device: torch.device, repeats: int) -> Iterator[Cell]:
    """Compare the dispatch of bytes that stand for MXFP8 with that of bfloat16; no quantising."""
    dtype = torch.bfloat16
    inputs = make_inputs(shape, device, dtype)
    data = inputs[0].to(torch.float8_e4m3fn)
    scales = torch.zeros(shape.T, shape.D // BLOCK, dtype=torch.uint8, device=device)
    rows = torch.empty(0, dtype=dtype, device=device)

    def decode(data_ND: Tensor, scales_NS: Tensor, dtype: torch.dtype) -> Tensor:
        return rows.new_empty(1, 1).expand(data_ND.shape)

    def encode(x_ND: Tensor) -> tuple[Tensor, Tensor]:
        return data[: len(x_ND)], scales[: len(x_ND)]

    codec = PairCodec(encode=encode, decode=decode)
    named = {"mxfp8": make_rowwise(shape, dtype, codec), "bfloat16": make_rowwise(shape, dtype)}
    calls = {
        name: functools.partial(torch.no_grad()(one.dispatch), *inputs)
        for name, one in named.items()
    }
    _, once = rows_away(inputs[1], shape)
    sizes = {name: one._buffers.settings.form.token_words * 4 for name, one in named.items()}
    wire = {name: once * size for name, size in sizes.items()}
    samples = timing.interleave(calls, repeats, device)
    yield Cell(f"{shape}: dispatch", samples, wire, shape.T * shape.K * shape.D * 2)


def ceiling(device: torch.device, repeats: int) -> Iterator[Cell]:
    """Time the copy engine and NCCL's all-to-all of as many bytes, for comparison."""
    import torch.distributed._symmetric_memory as symmetric

    rows = torch.randn(16384, 4096, device=device).bfloat16()
    buffer = symmetric.empty(*rows.shape, dtype=rows.dtype, device=device)
    group = dist.group.WORLD
    assert group is not None, "the process group is there"
    handle = symmetric.rendezvous(buffer, group.group_name)
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    theirs = handle.get_buffer(peer, rows.shape, rows.dtype)
    out = torch.empty_like(rows)
    calls = {
        "copy engine": lambda: theirs.copy_(rows),
        "nccl all_to_all": lambda: dist.all_to_all_single(out, rows),
    }
    share = rows.nbytes * (dist.get_world_size() - 1) // dist.get_world_size()
    wire = {"copy engine": rows.nbytes, "nccl all_to_all": share}
    yield Cell("ceilings", timing.interleave(calls, repeats, device), wire, 0)
