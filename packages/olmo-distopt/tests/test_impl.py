"""What `impl="auto"` picks, told without a GPU, and that it picks it with one."""

import pytest
import torch
from olmo_distopt import GradientReducer, ReplicaGroups, ShardedAdamW, ShardedMuon, _impl
from olmo_distopt._impl import runs_kernel
from torch import nn

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Say which device there is: its compute capability, whether CUDA and triton are there."""

    def have(capability=(9, 0), *, cuda="13.0", triton=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(_impl, "find_spec", lambda name: object() if triton else None)
        _impl._why_no_kernel.cache_clear()

    yield have
    _impl._why_no_kernel.cache_clear()


def test_auto_is_the_kernels_on_cuda_and_plain_elsewhere(gpu):
    gpu()
    assert runs_kernel("auto", CUDA)
    assert not runs_kernel("reference", CUDA)
    for device in ("cpu", "meta"):
        assert not runs_kernel("auto", torch.device(device))


@pytest.mark.parametrize(
    ("have", "reason"),
    [
        ({"capability": (7, 5)}, r"compute capability 8.0 or newer, this device has \(7, 5\)"),
        ({"cuda": None}, "compute capability 8.0"),
        ({"triton": False}, "needs triton, which is not installed"),
    ],
)
def test_where_the_kernels_cannot_run_auto_is_plain_and_triton_says_why(gpu, have, reason):
    gpu(**have)
    assert not runs_kernel("auto", CUDA)
    with pytest.raises(ValueError, match=reason):
        runs_kernel("triton", CUDA)


def test_what_the_kernels_cannot_take_is_plain(gpu):
    gpu()
    assert not runs_kernel("auto", CUDA, "takes no such dtype")
    with pytest.raises(ValueError, match=r"takes no such dtype; use `impl='reference'` or"):
        runs_kernel("triton", CUDA, "takes no such dtype")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_weight_of_a_dtype_that_no_kernel_takes(alone, monkeypatch, dtype):
    """A kernel that runs everywhere is offered it, and "auto" leaves it to plain torch."""
    chosen = []

    def offer(impl, device, reason=None):
        chosen.append(reason)
        return False

    monkeypatch.setattr("olmo_distopt._adamw_update.runs_kernel", offer)
    weight = nn.Parameter(torch.ones(4).to(dtype))
    optimizer = ShardedAdamW([("w", weight)], alone, lr=0.5, weight_decay=0.0)
    vars(weight)["main_grad"] = torch.ones(4)
    optimizer.step()
    assert chosen[-1:] == [
        f"takes no weight of {dtype} with a gradient of torch.float32, as `w` has"
    ]
    assert weight.float().tolist() == [0.5] * 4


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_sparse_gradient_is_added_by_plain_torch(alone, monkeypatch, impl):
    monkeypatch.setattr("olmo_distopt._accumulate.runs_kernel", lambda impl, device: 1 / 0)
    embedding = nn.Embedding(5, 2, sparse=True)
    reducer = GradientReducer(embedding.named_parameters(), alone, impl=impl)
    for _ in range(2):
        embedding(torch.tensor([1, 1, 3])).sum().backward()
    reducer.reduce()
    assert embedding.weight.main_grad[:, 0].tolist() == [0, 4, 0, 2, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", [ShardedAdamW, ShardedMuon])
def test_auto_gives_the_bits_of_the_kernels_on_cuda(make):
    groups = ReplicaGroups({"alone": None}, lambda *_: "alone")
    results = {}
    for impl in ("auto", "triton"):
        generator = torch.Generator().manual_seed(0)
        named = [
            (f"p{i}", nn.Parameter(torch.randn(1000 + i, generator=generator).cuda().bfloat16()))
            for i in range(3)
        ]
        reducer = GradientReducer(named, groups, impl=impl)
        optimizer = make(named, groups, lr=0.1, impl=impl)
        for _ in range(3):
            reducer.zero()
            torch.stack([parameter.float().cos().sum() for _, parameter in named]).sum().backward()
            reducer.reduce()
            optimizer.step()
        assert bool(optimizer._adamw._tables) is True
        results[impl] = {k: getattr(v, "local", v) for k, v in optimizer.state_dict().items()}
    for key, value in results["auto"].items():
        assert torch.equal(value, results["triton"][key]), key
