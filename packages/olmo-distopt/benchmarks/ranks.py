"""A whole training step over several processes, beside FSDP2 and DDP with a sharded optimizer.

The model is a chain of square linear layers and the batch is tiny, so that the step is the making
of the gradients, their reduction, the update, and the gathering of the weights. All contenders
compute in BF16 and keep FP32 main weights and moments, reduced gradients in FP32.
"""

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cells import Cell, Settings
from olmo_distopt import GradientReducer, ReplicaGroups, ShardedAdamW
from timing import interleave
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

# With so large an `eps` a gradient that is off by a factor shows in the weights.
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1.0, 0.1
BATCH, MICROBATCHES = 16, 2
Step = Callable[[torch.Tensor], None]
Weights = Callable[[], list[torch.Tensor]]
Contender = tuple[Step, Weights]


def measure(settings: Settings) -> Iterator[Cell]:
    """One cell of whole steps, one of a bare reduction."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (settings, folder), nprocs=settings.ranks)  # pyright: ignore[reportPrivateImportUsage]
        yield from pickle.loads(Path(folder, "cells").read_bytes())


def _rank(rank: int, settings: Settings, folder: str) -> None:
    cuda = settings.device == "cuda"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=settings.ranks,
    )
    cells = [_steps(settings), _bandwidth(settings)]
    if rank == 0:
        Path(folder, "cells").write_bytes(pickle.dumps(cells))
    dist.barrier()
    dist.destroy_process_group()


class _Chain(nn.Module):
    """Linear layers, each normalised so that the numbers stay near 1."""

    def __init__(self, width: int, depth: int, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(width, width, bias=False, device=device) for _ in range(depth)]
        )
        draw = torch.Generator(device).manual_seed(0)
        for layer in self.layers:
            with torch.no_grad():
                layer.weight.normal_(std=width**-0.5, generator=draw)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.rms_norm(layer(x), (x.shape[-1],))
        return x


def _ours(width: int, depth: int, device: str, collective: str) -> Contender:
    model = _Chain(width, depth, device)
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda *_: "all")
    optimizer = ShardedAdamW(
        model.named_parameters(), groups, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
    )
    optimizer.overlap_gather(model.layers)
    model.bfloat16()
    reducer = GradientReducer(model.named_parameters(), groups, collective=collective, overlap=True)

    def step(x: torch.Tensor) -> None:
        reducer.zero()
        with reducer.no_sync():
            for _ in range(MICROBATCHES - 1):
                _loss(model(x)).backward()
        _loss(model(x)).backward()
        reducer.reduce()
        optimizer.step()

    def weights() -> list[torch.Tensor]:
        optimizer.wait()
        return list(model.parameters())

    return step, weights


def _fsdp(width: int, depth: int, device: str) -> Contender:
    model = _Chain(width, depth, device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # a sum as ours is, by the plain collective
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = _adamw(model)

    def step(x: torch.Tensor) -> None:
        for index in range(MICROBATCHES):
            last = index == MICROBATCHES - 1
            model.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]
            model.set_reshard_after_backward(last)  # pyright: ignore[reportCallIssue]
            _loss(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: [parameter.full_tensor() for parameter in model.parameters()]  # pyright: ignore[reportCallIssue]


def _ddp(width: int, depth: int, device: str) -> Contender:
    inner = _Chain(width, depth, device)
    model = DistributedDataParallel(inner, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        inner.parameters(),
        torch.optim.AdamW,
        **{"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
        fused=device == "cuda",
    )

    def step(x: torch.Tensor) -> None:
        for index in range(MICROBATCHES):
            model.require_backward_grad_sync = index == MICROBATCHES - 1
            with torch.autocast(device, torch.bfloat16):
                y = model(x)
            (_loss(y) * dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step, lambda: list(inner.parameters())


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )


def _loss(y: torch.Tensor) -> torch.Tensor:
    return (y.float() * torch.linspace(-1, 1, y.shape[-1], device=y.device)).sum()


def _steps(settings: Settings) -> Cell:
    width, depth = (64, 3) if settings.dry else (8192, 59)
    contenders = {
        "ours, all_reduce": lambda w, d: _ours(w, d, settings.device, "all_reduce"),
        "ours, reduce_scatter": lambda w, d: _ours(w, d, settings.device, "reduce_scatter"),
        "FSDP2, resharded after backward": lambda w, d: _fsdp(w, d, settings.device),
        "DDP, ZeroRedundancyOptimizer": lambda w, d: _ddp(w, d, settings.device),
    }
    x = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    _require_agreement(contenders, x.to(settings.device, torch.bfloat16))
    samples: dict[str, list[float]] = {}
    x = torch.randn(BATCH, width, device=settings.device).bfloat16()
    for name, make in contenders.items():  # one at a time: two would not fit
        step, _ = make(width, depth)
        samples |= interleave({name: lambda step=step: step(x)}, settings.rounds)
        del step
        if settings.device == "cuda":
            torch.cuda.empty_cache()
    return Cell(
        topic="ranks",
        what=f"{MICROBATCHES} backwards, reduce, step and gather of {depth * width**2:.1e} "
        f"parameters on {settings.ranks} processes",
        samples=samples,
        notes=["contenders one after the other, not in turn: two do not fit"],
    )


def _require_agreement(
    contenders: dict[str, Callable[[int, int], Contender]], x: torch.Tensor
) -> None:
    """Three steps at a small width: the same weights but for BF16 noise in the gradients."""
    results = {}
    for name, make in contenders.items():
        step, weights = make(64, 2)
        for _ in range(3):
            step(x)
        results[name] = _line(weights())
    first, want = next(iter(results.items()))
    start = _line(list(_Chain(64, 2, x.device.type).parameters()))
    for name, got in results.items():
        moved = (want - start).norm()
        apart = float((got - want).norm() / moved)
        if not apart < 0.05:
            raise RuntimeError(f"{name} is {apart} of three steps from {first}")


def _line(weights: list[torch.Tensor]) -> torch.Tensor:
    """All weights as the model computes with them: rounded to BF16."""
    return torch.cat([weight.detach().bfloat16().float().flatten() for weight in weights])


def _bandwidth(settings: Settings) -> Cell:
    numel = 100_000 if settings.dry else 1_000_000_000
    device = settings.device
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda *_: "all")
    calls: dict[str, Callable[[], object]] = {}
    for collective in ("all_reduce", "reduce_scatter"):
        parameters = [
            (f"p{i}", nn.Parameter(torch.zeros(numel // 10, device=device).bfloat16()))
            for i in range(10)
        ]
        reducer = GradientReducer(parameters, groups, collective=collective)

        def reduce(reducer: GradientReducer = reducer) -> None:
            reducer._open_window()
            reducer.reduce()

        calls[f"ours, {collective}"] = reduce
    flat = torch.zeros(numel, device=device)
    piece = flat[: numel // settings.ranks].clone()
    calls["bare all_reduce of one line"] = lambda: dist.all_reduce(flat)
    calls["bare reduce_scatter of one line"] = lambda: dist.reduce_scatter_tensor(piece, flat)
    return Cell(
        topic="ranks",
        what=f"reduction of {numel:.1e} FP32 gradients on {settings.ranks} processes",
        samples=interleave(calls, settings.rounds),
        num_bytes=4 * numel,
    )
