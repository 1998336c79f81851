"""The Triton kernels against the reference, on a GPU, or on a CPU in Triton's interpreter.

`test_interpreter.py` runs this file in the interpreter, in a process of its own. There bfloat16 is
wrong, so its tests use float16 and float32.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from olmo_distopt import GradientReducer, ReplicaGroups, ShardedAdamW, StepGuard, reference
from torch import nn

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
LOW = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]
ALONE = ReplicaGroups({"alone": None}, lambda name, _: "alone")
SIZES = [1, 7, 1023, 1024, 1025, 4097]
SETTINGS = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def _draw(numel, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator).to(dtype).to(DEVICE)


@SETTINGS
@given(
    numel=st.sampled_from(SIZES),
    dtype=st.sampled_from([*LOW, torch.float32]),
    passes=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_gradients_are_added_in_fp32(numel, dtype, passes, seed):
    kernel, plain = (nn.Parameter(_draw(numel, 0, dtype)) for _ in range(2))
    for parameter, impl in ((kernel, "triton"), (plain, "reference")):
        reducer = GradientReducer([("w", parameter)], ALONE, impl=impl)
        for index in range(passes):
            (parameter * _draw(numel, seed + index, dtype)).sum().backward()
        reducer.reduce()
    assert torch.equal(kernel.main_grad, plain.main_grad)
    assert kernel.main_grad.isfinite().all()


def test_a_gradient_that_is_not_contiguous(alone):
    weight = nn.Parameter(torch.zeros(5, 3, device=DEVICE))
    reducer = GradientReducer([("w", weight)], alone, impl="triton")
    other = torch.arange(15.0, device=DEVICE).view(3, 5)
    (weight.T * other).sum().backward()
    reducer.reduce()
    assert torch.equal(weight.main_grad, other.T)


def _steps(parameter, impl, *, moment_dtype, scale, betas, decay, seed, poison=False):
    """Four steps, the third one skipped when `poison`; everything that is left."""
    optimizer = ShardedAdamW(
        [("w", parameter)],
        ALONE,
        lr=0.01,
        betas=betas,
        weight_decay=decay,
        decay=lambda *_: True,
        moment_dtype=moment_dtype,
        impl=impl,
    )
    factor = torch.tensor(scale, device=DEVICE) if scale != 1.0 else None
    for step in range(4):
        grad = _draw(parameter.numel(), seed + step)
        skip = None
        if poison:
            bad = step == 2
            grad = grad * (float("nan") if bad else 1.0)
            skip = torch.tensor(bad, device=DEVICE)
        parameter.main_grad = grad.view_as(parameter)
        optimizer.step(grad_scale=factor, skip=skip)
    state = optimizer.state_dict()
    return {key: getattr(value, "local", value) for key, value in state.items()}


@SETTINGS
@given(
    numel=st.sampled_from(SIZES),
    dtype=st.sampled_from([*LOW, torch.float32]),
    low_moments=st.sampled_from([False] if INTERPRETED else [False, True]),
    scale=st.sampled_from([1.0, 0.125, 3.0]),
    betas=st.sampled_from([(0.9, 0.95), (0.0, 0.9), (0.6, 0.0)]),
    decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**31),
)
def test_a_step_is_as_good_as_the_reference(numel, dtype, low_moments, scale, betas, decay, seed):
    moment_dtype = torch.bfloat16 if low_moments else torch.float32
    options = {"scale": scale, "betas": betas, "decay": decay, "seed": seed}
    results, copies = {}, {}
    for impl in ("triton", "reference"):
        copies[impl] = nn.Parameter(_draw(numel, seed - 1, dtype))
        results[impl] = _steps(copies[impl], impl, moment_dtype=moment_dtype, **options)
    exact = [_draw(numel, seed - 1, dtype).double(), *(torch.zeros(numel).double().to(DEVICE),) * 2]
    for step in range(4):
        exact = reference.adamw(
            exact[0],
            _draw(numel, seed + step).double() * scale,
            *exact[1:],
            **{"step": step + 1, "lr": 0.01, "betas": betas, "eps": 1e-8, "weight_decay": decay},
        )
    for kind, want in zip(("main", "exp_avg", "exp_avg_sq"), exact, strict=True):
        ours, plain = (results[i][f"{kind}.w"].double() for i in ("triton", "reference"))
        error, allowed = (ours - want).abs().max(), (plain - want).abs().max()
        assert error <= 2 * allowed + 1e-6 * want.abs().max(), kind
    assert torch.equal(copies["triton"], results["triton"]["main.w"].to(dtype))


@pytest.mark.parametrize("numel", [5, 2049])
def test_a_skipped_step_leaves_every_bit(numel):
    options = {"moment_dtype": torch.float32, "scale": 0.5, "betas": (0.9, 0.95), "decay": 0.1}
    parameter = nn.Parameter(_draw(numel, 3))
    guarded = _steps(parameter, "triton", seed=1, poison=True, **options)
    other = nn.Parameter(_draw(numel, 3))
    optimizer = ShardedAdamW([("w", other)], ALONE, lr=0.01, decay=lambda *_: True, impl="triton")
    for step in (0, 1, 3):
        other.main_grad = _draw(numel, 1 + step)
        optimizer.step(grad_scale=torch.tensor(0.5, device=DEVICE))
    for key, value in optimizer.state_dict().items():
        assert torch.equal(getattr(value, "local", value), guarded[key]), key
    assert torch.equal(parameter, other)


def test_a_verdict_of_the_guard_is_obeyed():
    weight = nn.Parameter(_draw(100, 0))
    before = weight.detach().clone()
    optimizer = ShardedAdamW([("w", weight)], ALONE, lr=0.01, impl="triton")
    guard = StepGuard()
    weight.main_grad = _draw(100, 1)
    loss = torch.tensor(float("nan"), device=DEVICE)
    optimizer.step(skip=guard.check(loss, loss * 0 + 1))
    assert torch.equal(weight, before)
    optimizer.step(skip=guard.check(loss.nan_to_num(1.0), loss.nan_to_num(1.0)))
    assert not torch.equal(weight, before)
    assert int(guard.num_skipped) == 1
