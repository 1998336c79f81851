"""The AdamW step with a BF16 copy out, the norm, and adding a BF16 gradient to FP32."""

from collections.abc import Callable, Iterator

import torch
from cells import Cell, Settings
from olmo_distopt import (
    GradientReducer,
    ReplicaGroups,
    ShardedAdamW,
    clip_grad_norm,
    global_grad_norm,
)
from olmo_distopt._impl import Impl
from timing import interleave
from torch import nn

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
# Main weight, gradient and two moments read; main weight and moments written; the copy out.
ADAMW_BYTES, ACCUMULATE_BYTES = 30, 10
ALONE = ReplicaGroups({"alone": None}, lambda *_: "alone")


def measure(settings: Settings) -> Iterator[Cell]:
    """The update of one large tensor, and of many small ones, then the accumulation."""
    numel = 10_000 if settings.dry else 2_000_000_000
    _Updates(5000, settings).require_agreement()
    updates = _Updates(numel, settings)
    yield Cell(
        topic="update",
        what=f"AdamW step of {numel:.1e} FP32 parameters and their BF16 copy",
        samples=interleave(
            updates.calls | {"torch copies of as many bytes": updates.copy_bytes}, settings.rounds
        ),
        num_bytes=ADAMW_BYTES * numel,
    )
    del updates
    count, size = (20, 256) if settings.dry else (2000, 4096)
    yield _small(count, size, settings)
    yield _norm(count, size, settings)
    yield _accumulate(numel, settings)


class _Updates:
    """Contenders over the same tensors, so that they fit beside each other."""

    def __init__(self, numel: int, settings: Settings) -> None:
        impls = ("reference", "triton") if settings.device == "cuda" else ("reference",)
        self.weight = nn.Parameter(torch.ones(numel, device=settings.device).bfloat16())
        vars(self.weight)["main_grad"] = torch.full((numel,), 1e-3, device=settings.device)
        self._ours = [
            ShardedAdamW([("w", self.weight)], ALONE, lr=LR, decay=lambda *_: True, impl=impl)
            for impl in impls
        ]
        first = self._ours[0]._states[0]
        for other in (optimizer._states[0] for optimizer in self._ours[1:]):
            other.main.set_(first.main)
            for key, moment in other.moments.items():
                moment.set_(first.moments[key])
        self._main = nn.Parameter(first.main)
        self._main.grad = vars(self.weight)["main_grad"]
        self._fused = torch.optim.AdamW(
            [self._main], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
        )
        self._num_steps = torch.zeros((), device=settings.device)
        self._fused.state[self._main] = {"step": self._num_steps, **first.moments}
        self.calls: dict[str, Callable[[], object]] = {
            f"ours, {impl}": optimizer.step
            for impl, optimizer in zip(impls, self._ours, strict=True)
        }
        self.calls["torch fused, then a copy"] = self._step_fused

    def copy_bytes(self) -> None:
        """Copy FP32, 8 bytes an element, 3 3/4 times: over the gradients, which may be anything."""
        line, source = vars(self.weight)["main_grad"], self._main.detach()
        for _ in range(3):
            line.copy_(source)
        part = 3 * line.numel() // 4
        line[:part].copy_(source[:part])

    def _step_fused(self) -> None:
        self._fused.step()
        self.weight.detach().copy_(self._main.detach())

    def require_agreement(self) -> None:
        """Three steps of each from the same start: a fast wrong step is no step."""
        results = {}
        for name, call in self.calls.items():
            self.weight.detach().fill_(1.0)
            self._num_steps.zero_()
            for optimizer in self._ours:
                optimizer.adopt_parameters()
            for _ in range(3):
                call()
            results[name] = self._main.detach().clone()
        want = results.popitem()[1]
        for name, main in results.items():
            difference = float((main - want).abs().max())
            if not difference < 1e-6 or torch.equal(main, torch.ones_like(main)):
                raise RuntimeError(f"{name} is {difference} from torch after three steps")


def _small(count: int, numel: int, settings: Settings) -> Cell:
    """One step of `count` tensors of `numel` elements each: launches count, not bytes."""
    impls: tuple[Impl, ...] = ("reference",)
    if settings.device == "cuda":
        impls += ("triton",)
    made = {name: _tensors(count, numel, settings.device) for name in (*impls, "fused")}
    calls: dict[str, Callable[[], object]] = {}
    for impl in impls:
        named = [(f"w{i}", weight) for i, weight in enumerate(made[impl])]
        optimizer = ShardedAdamW(named, ALONE, lr=LR, decay=lambda *_: True, impl=impl)
        calls[f"ours, {impl}"] = optimizer.step
    mains = [nn.Parameter(weight.detach().float()) for weight in made["fused"]]
    for main, weight in zip(mains, made["fused"], strict=True):
        main.grad = vars(weight)["main_grad"]
    fused = torch.optim.AdamW(mains, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
    copies = [weight.detach() for weight in made["fused"]]

    def step_fused() -> None:
        fused.step()
        torch._foreach_copy_(copies, [main.detach() for main in mains])

    calls["torch fused, then a copy"] = step_fused
    for call in calls.values():
        call()
    want = made.pop("fused")
    for name, weights in made.items():
        for mine, theirs in zip(weights, want, strict=True):
            if not torch.allclose(mine, theirs, rtol=2.0**-7) or torch.equal(
                mine, torch.full_like(mine, 0.01)
            ):
                raise RuntimeError(f"{name} differs from torch after a step of small tensors")
    return Cell(
        topic="update",
        what=f"AdamW step of {count} tensors of {numel} parameters and their BF16 copies",
        samples=interleave(calls, settings.rounds),
        num_bytes=ADAMW_BYTES * count * numel,
    )


def _norm(count: int, numel: int, settings: Settings) -> Cell:
    """The norm of as many gradients, and clipping by it: again launches count."""
    weights = _tensors(count, numel, settings.device)
    named = [(f"w{i}", weight) for i, weight in enumerate(weights)]
    grads = [vars(weight)["main_grad"] for weight in weights]
    calls: dict[str, Callable[[], object]] = {
        "ours, in float64": lambda: global_grad_norm(named, ALONE),
        "torch get_total_norm": lambda: torch.nn.utils.get_total_norm(grads),
        "ours, norm and clipping": lambda: clip_grad_norm(named, ALONE, 1e9),
    }
    norms = {name: float(call()) for name, call in calls.items()}  # pyright: ignore[reportArgumentType] # each returns a 0-d tensor
    want = (count * numel) ** 0.5
    for name, norm in norms.items():
        if not abs(norm / want - 1) < 1e-5:
            raise RuntimeError(f"{name} gives {norm}, not {want}")
    return Cell(
        topic="update",
        what=f"norm of {count} gradients of {numel} elements",
        samples=interleave(calls, settings.rounds),
        num_bytes=4 * count * numel,
    )


def _tensors(count: int, numel: int, device: str) -> list[nn.Parameter]:
    weights = [
        nn.Parameter(torch.full((numel,), 0.01, device=device).bfloat16()) for _ in range(count)
    ]
    for weight in weights:
        vars(weight)["main_grad"] = torch.full((numel,), -1.0, device=device)
    return weights


def _accumulate(numel: int, settings: Settings) -> Cell:
    impls = ("reference", "triton") if settings.device == "cuda" else ("reference",)
    grad = torch.full((numel,), 2.0**-9, dtype=torch.bfloat16, device=settings.device)
    target = torch.empty(numel, device=settings.device)
    source = torch.empty_like(target)
    calls: dict[str, Callable[[], object]] = {"torch copy of FP32": lambda: target.copy_(source)}
    for impl in impls:
        weight = nn.Parameter(torch.ones_like(grad))
        reducer = GradientReducer([("w", weight)], ALONE, impl=impl)

        def add(weight: nn.Parameter = weight, reducer: GradientReducer = reducer) -> None:
            weight.grad = grad
            reducer._accumulate(weight)

        add()
        add()
        if not bool((vars(weight)["main_grad"] == 2.0**-8).all()):
            raise RuntimeError(f"{impl} adds something else")
        calls[f"ours, {impl}"] = add
    return Cell(
        topic="update",
        what=f"add a BF16 gradient of {numel:.1e} elements to an FP32 line (copy: 8 bytes, not 10)",
        samples=interleave(calls, settings.rounds),
        num_bytes=ACCUMULATE_BYTES * numel,
    )
