"""What only a GPU shows of the kernels: no host sync, launches, graphs, device assertions."""

import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from kernel_problem import make_problem, normal
from olmo_routing import Router, SelectionBias, plan_rows, route

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


def step(logits, mask, bias, align=128, **options):
    """From logits to a row plan and back."""
    routing = route(logits, 4, bias_E=bias, mask_T=mask, impl="triton", **options)
    plan = plan_rows(routing.expert_ids_TK, logits.shape[1], align=align, impl="triton")
    outputs = (routing.weights_TK, routing.scores_TE)
    gradients = [torch.ones_like(output) for output in outputs]
    (d_logits,) = torch.autograd.grad(outputs, logits, gradients)
    return [
        *(getattr(routing, field.name).detach() for field in fields(routing)),
        *(getattr(plan, field.name) for field in fields(plan)),
        d_logits,
    ]


def make_step(T=3001, E=64, device="cuda"):
    logits = normal(T, E).to(device).requires_grad_()
    return logits, (normal(T, seed=1) < 0.9).to(device), 0.1 * normal(E, seed=2).to(device)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_nothing_waits_for_the_device(no_host_sync, gate):
    arguments, options = make_step(), {"gate": gate, "num_groups": 8, "topk_groups": 4}
    first = step(*arguments, **options)
    with no_host_sync():
        again = step(*arguments, **options)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_auto_takes_the_kernels_and_falls_back(no_host_sync):
    logits, mask, bias = make_step()
    options = {"bias_E": bias, "mask_T": mask}
    auto, named = (route(logits, 4, **options, impl=impl) for impl in ("auto", "triton"))
    for field in fields(auto):
        assert torch.equal(getattr(auto, field.name), getattr(named, field.name)), field.name
    plain = route(logits.double(), 4, bias_E=bias)
    assert plain.weights_TK.dtype == torch.float64
    router = Router(16, 64, 4, selection_bias=SelectionBias(64, 0.1)).cuda()
    x = normal(33, 16).cuda()
    ids = router(x).expert_ids_TK
    with no_host_sync():
        again = router(x, expert_ids_TK=ids)
    assert torch.equal(again.expert_ids_TK, ids)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
def test_four_launches_forward_and_one_backward():
    """One of them is a fill of zeros; torch adds no copy."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    logits, mask, bias = make_step()
    g_weights = torch.ones(logits.shape[0], 4, device="cuda")

    def forward():
        routing = route(logits, 4, bias_E=bias, mask_T=mask, impl="triton")
        return routing, plan_rows(routing.expert_ids_TK, 64, align=128, impl="triton")

    def count(call):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            made = call()
            torch.cuda.synchronize()
        return made, [e.name for e in profiler.events() if e.device_type == DeviceType.CUDA]

    forward()[0].weights_TK.backward(g_weights)  # compiles
    (routing, _), names = count(forward)
    assert len(names) == 4, names
    _, names = count(lambda: torch.autograd.grad(routing.weights_TK, logits, g_weights))
    assert len(names) == 1, names


def test_a_captured_graph_follows_its_inputs():
    logits, mask, bias = make_step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(logits, mask, bias)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(logits, mask, bias)
    for seed in (5, 6):
        with torch.no_grad():
            logits.copy_(normal(*logits.shape, seed=seed))
        want = step(logits, mask, bias)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, want, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        "plan_rows(torch.tensor([[0, 3]], device='cuda'), 3, impl='triton')",
        "plan_rows(torch.tensor([[0, -2]], device='cuda'), 3, impl='triton')",
        "plan_rows(torch.tensor([[2**32, 0]], device='cuda'), 3, impl='triton')",
        "Router(4, 3, 1, impl='triton', device='cuda')"
        "(torch.zeros(1, 4, device='cuda'), expert_ids_TK=torch.tensor([[3]], device='cuda'))",
    ],
)
def test_an_id_out_of_range_is_a_device_assertion(call):
    """In a process of its own: the device cannot be used after it."""
    program = f"import torch\nfrom olmo_routing import Router, plan_rows\n{call}\n"
    program += "torch.cuda.synchronize()\nprint('no assertion')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode != 0
    assert "no assertion" not in done.stdout
    assert "must be in [-1, " in done.stdout + done.stderr
    assert "device-side assert" in done.stderr


@pytest.mark.parametrize(("E", "K"), [(64, 8), (128, 8), (384, 6), (1024, 64)])
def test_sizes_of_real_models(E, K):
    problem = make_problem(4099, E, K, biased=True, masked=True)
    got, want = problem.run("triton", "cuda"), problem.run("reference")
    # A near tie of score and bias may round either way; all but those must agree.
    same_T = (got["expert_ids_TK"] == want["expert_ids_TK"]).all(1)
    assert same_T.float().mean() > 0.99
    ids = got["expert_ids_TK"].sort(dim=1).values
    real_T = problem.mask_T
    assert (ids[real_T, 1:] > ids[real_T, :-1]).all()
    assert (ids[real_T] >= 0).all()
    assert torch.equal(got["counts_E"], torch.bincount(ids[real_T].flatten(), minlength=E).int())
    for name in ("weights_TK", "scores_TE", "gradient"):
        a, b = got[name][same_T], want[name][same_T]
        assert (a - b).abs().max() <= 1e-5 * b.abs().max(), name
    plan = plan_rows(got["expert_ids_TK"].cuda(), E, align=128, impl="triton")
    reference = plan_rows(got["expert_ids_TK"], E, align=128)
    for field in fields(plan):
        assert torch.equal(getattr(plan, field.name).cpu(), getattr(reference, field.name))


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_where_the_tensors_are():
    want, got = step(*make_step()), step(*make_step(device="cuda:1"))
    assert torch.cuda.current_device() == 0
    for a, b in zip(got, want, strict=True):
        assert a.device == torch.device("cuda:1")
        assert torch.equal(a.cpu(), b.cpu())
