"""A layer whose rows travel as pairs in both directions, and what one process makes of it."""

import torch
from olmo_ep_comm import Dispatched, Dispatcher, LocalDispatcher
from pair_codecs import MXFP8
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor]
CODECS = {"codec": MXFP8, "backward_codec": MXFP8}
E, K, D = 8, 3, 256  # a width that every backend takes


def make_inputs(rank: int, num_tokens: int, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """No expert twice in a token, and some slots without one."""
    generator = torch.Generator().manual_seed(rank)
    weights_TK, ids = torch.rand(num_tokens, E, generator=generator).topk(K)
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    x_TD = torch.randn(num_tokens, D, generator=generator).to(dtype)
    return x_TD.to(device), ids.to(device), weights_TK.to(device)


def slope(x_TD: Tensor) -> Tensor:
    """The gradient of a token's result: its own, wherever the token is, and exact."""
    return (x_TD.detach().float() * 3 - 1).clamp(-2, 2).to(x_TD.dtype)


def experts(sent: Dispatched) -> Tensor:
    y_RD = sent.rows_RD * sent.row_weights_R[:, None].to(sent.rows_RD.dtype)
    y_RD.retain_grad()
    return y_RD


def values_of(sent: Dispatched, y_RD: Tensor) -> dict[str, Tensor]:
    """The defined rows: as they came, and their gradients."""
    assert sent.encoded is not None
    assert y_RD.grad is not None
    data, scales = (part.view(torch.uint8) for part in sent.encoded)
    rows = {"data": data, "scales": scales, "rows": sent.rows_RD, "results": y_RD.grad}
    end = int(sent.offsets_E[-1])
    return {name: value[:end].detach().clone() for name, value in rows.items()}


def run_pairs(dispatcher: Dispatcher, inputs: Inputs) -> dict[str, Tensor]:
    x_TD, ids, weights_TK = inputs
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    sent = dispatcher.dispatch(x_TD, ids, weights_TK)
    y_RD = experts(sent)
    y_TD = dispatcher.combine(y_RD, sent.handle)
    y_TD.backward(slope(x_TD))
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    home = {"y": y_TD.detach(), "x": x_TD.grad, "weights": weights_TK.grad}
    return values_of(sent, y_RD) | home


def run_pairs_locally(inputs: list[Inputs]) -> list[dict[str, Tensor]]:
    """The same in one process that holds all tokens, cut into the parts of the ranks."""
    tokens = [len(x_TD) for x_TD, _, _ in inputs]
    x_TD, ids, weights_TK = (torch.cat(part) for part in zip(*inputs, strict=True))
    values = run_pairs(LocalDispatcher(num_experts=E, **CODECS), (x_TD, ids, weights_TK))
    owner = torch.where(ids < 0, -1, ids // (E // len(tokens)))
    rows = [int((owner == rank).sum()) for rank in range(len(tokens))]
    return [
        {
            name: value.split(tokens if name in ("y", "x", "weights") else rows)[rank]
            for name, value in values.items()
        }
        for rank in range(len(tokens))
    ]


def assert_equal_pairs(got: dict[str, Tensor], want: dict[str, Tensor], *, exact: bool) -> None:
    """Rows and gradients of rows bitwise, sums if `exact`.

    Else a sum has three roundings more, and one over the width of a row, of `D` products of at
    most 8, an order of its own.
    """
    rounding = 2.0**-7 if got["rows"].dtype == torch.bfloat16 else 2.0**-20
    for name, value in want.items():
        if exact or name not in ("x", "y", "weights"):
            assert torch.equal(got[name], value), name
        else:
            most = 64 if name == "weights" else 8
            torch.testing.assert_close(got[name], value, rtol=0, atol=rounding * most)
