"""On a GPU: the same integers as on the CPU, and nothing waits for the device."""

import dataclasses

import pytest
import torch
from olmo_routing import (
    GerrymanderAlarm,
    LoadWindow,
    Router,
    SelectionBias,
    admit,
    balance_loss,
    margin_balance_loss,
    measure_balance,
    plan_rows,
    route,
    router_z_loss,
    stack_reports,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def forward(logits, mask, requested):
    bias = torch.linspace(-0.1, 0.1, logits.shape[1]).to(logits.device)
    outputs = []
    for gate in ("softmax", "softmax_topk", "sigmoid"):
        routing = route(logits, 3, gate=gate, bias_E=bias, num_groups=4, topk_groups=2, mask_T=mask)
        outputs += [routing.expert_ids_TK, routing.counts_E]
        plan = plan_rows(routing.expert_ids_TK, logits.shape[1], align=32)
        outputs += [plan.offsets_E, plan.rows_TK, plan.routes_R]
    return [*outputs, admit(requested, 100), admit(requested, 100, policy="tail")]


def test_integers_agree_with_the_cpu():
    # Coarse logits, both zeros, NaN and infinities: ties everywhere, broken the same way.
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(1001, 24, generator=generator)).round() / 2
    logits[::7, 3], logits[::5, 4], logits[9], logits[::11, 8] = (
        -0.0,
        torch.nan,
        torch.nan,
        torch.inf,
    )
    logits[9, ::2] = -torch.tensor(torch.nan)  # NaNs of both signs in a token of NaN alone
    mask = torch.rand(1001, generator=generator) < 0.9
    requested = torch.randint(0, 50, (4, 3, 5), generator=generator, dtype=torch.int32)
    on_cpu = forward(logits, mask, requested)
    on_gpu = forward(logits.cuda(), mask.cuda(), requested.cuda())
    for here, there in zip(on_cpu, on_gpu, strict=True):
        assert torch.equal(here, there.cpu())


def step(router, bias, alarm, window, x, mask, requested):
    """Run everything once, forward and backward, and return the last routing and report."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for force in ("uniform", "random", None):
            first = router(x, mask_T=mask, force=force)
            routing = router(x, mask_T=mask, expert_ids_TK=first.expert_ids_TK)
            pair = routing.scores_TE, routing.expert_ids_TK
            loss = balance_loss(*pair, mask_T=mask, num_sequences=7)
            loss = loss + router_z_loss(routing.logits_TE, mask_T=mask)
            fractions = window.add(routing.expert_ids_TK, mask_T=mask)
            loss = loss + margin_balance_loss(
                *pair, mask_T=mask, bias_E=bias.bias_E, fractions_BE=fractions
            )
            (loss + routing.weights_TK[:, 0].sum()).backward()
    bias.update(routing.counts_E)
    window.reset()
    plan_rows(routing.expert_ids_TK, 24, align=32)
    admit(requested, 20)
    kept = torch.where(routing.expert_ids_TK % 5 > 0, routing.expert_ids_TK, -1)
    report = measure_balance(
        *pair, mask_T=mask, kept_ids_TK=kept, weights_TK=routing.weights_TK, num_ranks=4
    )
    alarm.update([report])
    stack_reports([report, report])
    return routing, report


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_whole_step_never_waits_for_the_device():
    bias = SelectionBias(24, 0.01, device="cuda")
    router = Router(64, 24, 3, selection_bias=bias, jitter=0.01, device="cuda")
    x = torch.randn(1001, 64, device="cuda", dtype=torch.bfloat16)
    mask = torch.rand(1001, device="cuda") < 0.9
    requested = torch.ones(4, 3, 8, dtype=torch.int32, device="cuda")
    alarm = GerrymanderAlarm(24, device="cuda")
    window = LoadWindow(24, device="cuda")
    arguments = (router, bias, alarm, window, x, mask, requested)
    step(*arguments)  # warms up
    torch.cuda.set_sync_debug_mode("error")
    try:
        routing, report = step(*arguments)
        with pytest.raises(RuntimeError, match="synchronizing"):
            routing.counts_E.tolist()  # the check does work
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(getattr(report, f.name).is_cuda for f in dataclasses.fields(report))
    assert routing.logits_TE.dtype == torch.float32
