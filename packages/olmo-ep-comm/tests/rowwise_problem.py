"""Tokens of several ranks, one layer over them, and what one process makes of it."""

from dataclasses import dataclass, field

import torch
from olmo_ep_comm import Dispatched, LocalDispatcher, VirtualRowwise
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """A layer whose ranks have `tokens` tokens and choose among `experts`, of which -1 is none."""

    tokens: tuple[int, ...]
    num_experts: int
    top_k: int
    width: int = 8
    dtype: torch.dtype = torch.float32
    experts: tuple[int, ...] = ()
    seed: int = 0
    is_distinct: bool = False  # no token names an expert twice
    options: dict = field(default_factory=dict)

    def inputs(self, rank: int, device: str = "cpu") -> Inputs:
        generator = torch.Generator().manual_seed(100 * self.seed + rank)
        shape = (self.tokens[rank], self.top_k)
        experts = torch.tensor(self.experts or tuple(range(-1, self.num_experts)))
        ids = experts[torch.randint(len(experts), shape, generator=generator)]
        if self.is_distinct:
            scores = torch.rand(shape[0], self.num_experts, generator=generator)
            ids = torch.where(ids < 0, -1, scores.topk(self.top_k).indices)
        x_TD = torch.randn(shape[0], self.width, generator=generator).to(self.dtype)
        weights_TK = torch.rand(shape, generator=generator)
        return x_TD.to(device), ids.to(device), weights_TK.to(device)

    def virtual(self, **options) -> VirtualRowwise:
        most = max(*self.tokens, 1)
        # A token may name an expert twice, so that the worst case is a row for every slot.
        rows = len(self.tokens) * most * self.top_k
        every = {"capacity": rows, "admit": lambda requested, capacity: requested}
        return VirtualRowwise(
            num_ranks=len(self.tokens),
            num_experts=self.num_experts,
            max_tokens=most,
            width=self.width,
            top_k=self.top_k,
            dtype=self.dtype,
            **{**every, **self.options, **options},
        )


def expert_results(sent: Dispatched, local: range) -> Tensor:
    """Scale and shift rows by numbers of their expert; rows without one become NaN."""
    factor_R = torch.full((len(sent.rows_RD), 1), float("nan"), device=sent.rows_RD.device)
    start = 0
    for expert, end in zip(local, sent.offsets_E.tolist(), strict=True):
        factor_R[start:end] = 0.5 + expert % 5
        start = end
    factor_R = factor_R.to(sent.rows_RD.dtype)
    weights_R = sent.row_weights_R[:, None].to(sent.rows_RD.dtype)
    return (sent.rows_RD * factor_R + factor_R) * weights_R


def loss_of(results: list[Tensor]) -> Tensor:
    """Weigh every value differently, whatever rank it is on: a cosine of the value itself."""
    return torch.stack([value.float().sin().sum() for value in results]).sum()


def run_virtual(layer: VirtualRowwise, inputs: list[Inputs]) -> list[dict[str, Tensor]]:
    """One layer forward and backward: what each rank sees."""
    leaves = [(x.clone().requires_grad_(), w.clone().requires_grad_()) for x, _, w in inputs]
    sent = layer.dispatch(
        [x for x, _ in leaves], [ids for _, ids, _ in inputs], [w for _, w in leaves]
    )
    seen = [(part.rows_RD.detach().clone(), part.row_weights_R.detach().clone()) for part in sent]
    results = [expert_results(part, layer.local_experts(r)) for r, part in enumerate(sent)]
    sums = layer.combine(results, sent[0].handle)
    loss_of(sums).backward()
    return [
        {
            "ends": sent[rank].offsets_E,
            "rows": rows_RD[: int(sent[rank].offsets_E[-1])],
            "row weights": weights_R[: int(sent[rank].offsets_E[-1])],
            "y": sums[rank].detach(),
            "x gradient": leaves[rank][0].grad,
            "weight gradient": leaves[rank][1].grad,
            "dropped": sent[rank].num_dropped,
        }
        for rank, (rows_RD, weights_R) in enumerate(seen)
    ]


def run_local(num_experts: int, inputs: list[Inputs]) -> list[dict[str, Tensor]]:
    """The same in one process that holds all tokens, cut into the parts of the ranks."""
    tokens = [len(x_TD) for x_TD, _, _ in inputs]
    x_TD, ids, weights_TK = (torch.cat(part) for part in zip(*inputs, strict=True))
    x_TD, weights_TK = x_TD.requires_grad_(), weights_TK.requires_grad_()
    dispatcher = LocalDispatcher(num_experts=num_experts)
    sent = dispatcher.dispatch(x_TD, ids, weights_TK)
    y_RD = expert_results(sent, range(num_experts))
    y_TD = dispatcher.combine(y_RD, sent.handle)
    with torch.no_grad():
        magnitude_TD = dispatcher.combine(y_RD.abs(), sent.handle)
    loss_of([y_TD]).backward()
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    share = num_experts // len(tokens)
    ends = [0, *sent.offsets_E.tolist()]
    parts = []
    for rank in range(len(tokens)):
        rows = slice(ends[rank * share], ends[(rank + 1) * share])
        parts.append(
            {
                "ends": sent.offsets_E[rank * share : (rank + 1) * share] - rows.start,
                "rows": sent.rows_RD.detach()[rows],
                "row weights": sent.row_weights_R.detach()[rows],
                "y": y_TD.detach().split(tokens)[rank],
                "magnitude": magnitude_TD.split(tokens)[rank],
                "x gradient": x_TD.grad.split(tokens)[rank],
                "weight gradient": weights_TK.grad.split(tokens)[rank],
            }
        )
    return parts


def assert_equal_local(got: dict[str, Tensor], want: dict[str, Tensor], exact: bool) -> None:
    """Rows and their weights bitwise; sums bitwise if each has one addend a rank.

    A bfloat16 result has three roundings of 2^-9, at most of the sum of what it adds, a float32 one
    those of 2^-24 of two sums of four addends. What a bfloat16 result makes of its loss is not
    compared.
    """
    for name in ("ends", "rows", "row weights"):
        assert torch.equal(got[name], want[name]), name
    for name in ("y", "x gradient", "weight gradient"):
        if exact:
            assert torch.equal(got[name], want[name]), name
        elif got["y"].dtype == torch.float32 and name != "y":
            # The cosine of a result of at most 70 that is wrong by 1e-5, times sums of up to 100.
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-3)
    if not exact:
        bound = 2.0**-7 if got["y"].dtype == torch.bfloat16 else 6 * 2.0**-24
        error = (got["y"].float() - want["y"].float()).abs()
        assert (error <= bound * want["magnitude"].float()).all()
        assert all(bool(got[name].isfinite().all()) for name in ("x gradient", "weight gradient"))
