"""A layer with everything around it, trained: over any group the steps are those of one process."""

import pytest
import torch
import torch.distributed as dist
from olmo_ep_comm import Dispatched, Dispatcher, LocalDispatcher, create_dispatcher
from torch import Tensor

pytestmark = pytest.mark.dist
NUM_EXPERTS, WIDTH, TOKENS = 8, 4, (7, 0, 4, 8)
ROWWISE = {"max_tokens": max(TOKENS), "width": WIDTH, "top_k": 2, "dtype": torch.float32}
BACKENDS = {
    "local": ("local", {}),
    "all_to_all": ("all_to_all", {}),
    "put": ("rowwise", {**ROWWISE, "combine_by": "put"}),
    "get": ("rowwise", {**ROWWISE, "combine_by": "get"}),
}


def make_dispatcher(backend: str, group_size: int, rank: int, world: int) -> Dispatcher:
    if backend == "local":
        return LocalDispatcher(num_experts=NUM_EXPERTS)
    firsts = range(0, world, group_size)
    groups = [dist.new_group(list(range(first, first + group_size))) for first in firsts]
    name, options = BACKENDS[backend]
    return create_dispatcher(
        name, num_experts=NUM_EXPERTS, group=groups[rank // group_size], **options
    )


def apply_experts(sent: Dispatched, local: range, scale_ED: Tensor, bias_ED: Tensor) -> Tensor:
    """Return `weight * (scale_e * row + bias_e)`, and NaN for rows that are none."""
    counts_L = sent.offsets_E.diff(prepend=sent.offsets_E.new_zeros(1))
    expert_N = torch.tensor(local).repeat_interleave(counts_L)
    end = len(expert_N)
    y_ND = sent.rows_RD[:end] * scale_ED[expert_N] + bias_ED[expert_N]
    undefined = torch.full_like(sent.rows_RD[end:], float("nan"))
    return torch.cat([y_ND * sent.row_weights_R[:end, None].to(y_ND.dtype), undefined])


def _train(rank: int, world: int, backend: str, gate: str, group_size: int) -> list[Tensor]:
    """Five SGD steps of norm -> router -> shared and routed experts, residual around them.

    Returns the gradients of the first step and the parameters after the last. With the backend
    "local" this rank alone holds all the tokens.
    """
    dtype = torch.float32 if backend in ("put", "get") else torch.float64
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randn(sum(TOKENS), WIDTH, generator=generator, dtype=torch.float64).split(TOKENS)
    x_TD = (torch.cat(tokens) if backend == "local" else tokens[rank]).to(dtype)
    dispatcher = make_dispatcher(backend, group_size, rank, world)
    shapes = [(WIDTH,), *[(NUM_EXPERTS, WIDTH)] * 3, *[(2 * WIDTH, WIDTH)] * 2]
    parameters = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    parameters = [value.to(dtype).requires_grad_() for value in parameters]
    norm_D, gate_ED, scale_ED, bias_ED, up_HD, down_HD = parameters
    first: list[Tensor] = []
    for _ in range(5):
        h_TD = torch.nn.functional.normalize(x_TD) * norm_D
        logits_TE = h_TD @ gate_ED.T
        scores_TE = logits_TE.softmax(-1) if gate == "softmax" else logits_TE.sigmoid()
        weights_TK, ids = scores_TE.topk(2)
        sent = dispatcher.dispatch(h_TD, ids, weights_TK)
        y_RD = apply_experts(sent, dispatcher.local_experts, scale_ED, bias_ED)
        shared_TD = torch.nn.functional.silu(h_TD @ up_HD.T) @ down_HD
        y_TD = x_TD + shared_TD + dispatcher.combine(y_RD, sent.handle)
        y_TD.sin().sum().backward()
        grads = [torch.zeros_like(v) if v.grad is None else v.grad for v in parameters]
        for grad in grads if backend != "local" else []:
            dist.all_reduce(grad)
        first = first or [grad.clone() for grad in grads]
        with torch.no_grad():
            for value, grad in zip(parameters, grads, strict=True):
                value -= 0.01 * grad
                value.grad = None
    return [value.detach().double() for value in (*first, *parameters)]


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("backend", ["all_to_all", "put", "get"])
def test_training_equals_one_process(processes, backend, gate):
    """Gradients of a norm, a router, experts and a shared one have ratio 1; replicas stay equal."""
    (want,) = processes.run(_train, "local", gate, 0, world=1)
    assert all(value.abs().sum() > 0 for value in want)
    close = 1e-12 if backend == "all_to_all" else 1e-5
    for group_size in (1, 2, 4):
        ranks = processes.run(_train, backend, gate, group_size, world=4)
        for got in ranks:
            assert all(map(torch.equal, got, ranks[0]))
            for value, reference in zip(got, want, strict=True):
                ratio = (value * reference).sum() / reference.square().sum()
                assert ratio.item() == pytest.approx(1, abs=close)
                torch.testing.assert_close(value, reference, rtol=1e3 * close, atol=10 * close)
