"""A Muon step over expert stacks and square matrices, beside `torch.optim.Muon`."""

from collections.abc import Iterator

import torch
from cells import Cell, Settings
from olmo_distopt import ReplicaGroups, ShardedMuon
from timing import interleave
from torch import nn

LR = 1e-3


def measure(settings: Settings) -> Iterator[Cell]:
    """64 experts' stacks (gate and up together, and down) and 16 square matrices."""
    E, D, H, square = (4, 16, 8, 32) if settings.dry else (64, 2048, 1024, 4096)
    shapes = {
        "experts.w_gate_up": (E, 2 * H, D),
        "experts.w_down": (E, D, H),
        **{f"square.{i}": (square, square) for i in range(2 if settings.dry else 16)},
    }
    draw = torch.Generator(settings.device).manual_seed(0)
    ours = {
        name: nn.Parameter(torch.randn(shape, generator=draw, device=settings.device) * 0.02)
        for name, shape in shapes.items()
    }
    grads = {
        name: torch.randn(shape, generator=draw, device=settings.device)
        for name, shape in shapes.items()
    }
    # torch takes single matrices: each of a stack's is a parameter of its own.
    theirs = {
        name: [nn.Parameter(w.clone()) for w in p.detach().view(-1, *p.shape[-2:])]
        for name, p in ours.items()
    }
    for name, parameter in ours.items():
        vars(parameter)["main_grad"] = grads[name]
        for matrix, grad in zip(
            theirs[name], grads[name].view(-1, *parameter.shape[-2:]), strict=True
        ):
            matrix.grad = grad
    groups = ReplicaGroups({"alone": None}, lambda *_: "alone")
    optimizer = ShardedMuon(ours.items(), groups, lr=LR, scale="shape")
    peer = torch.optim.Muon([each for stack in theirs.values() for each in stack], lr=LR)
    optimizer.step()
    peer.step()
    for name, parameter in ours.items():
        together = torch.stack([each.detach() for each in theirs[name]]).view(parameter.shape)
        step = LR * max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
        difference = float((parameter.detach() - together).abs().max())
        if not difference < 0.1 * step:
            raise RuntimeError(f"{name} is {difference} from torch after a step of {step}")
    calls = {"ours": optimizer.step, "torch.optim.Muon": peer.step}
    yield Cell(
        topic="muon",
        what=", ".join(f"{name} {tuple(shape)}" for name, shape in list(shapes.items())[:3])
        + f", {len(shapes) - 2} squares in all",
        samples=interleave(calls, settings.rounds),
    )
