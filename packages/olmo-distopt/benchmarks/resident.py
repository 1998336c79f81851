"""Bytes that a process holds between steps: by formula, by storages, by the allocator."""

import gc
from collections.abc import Iterator

import torch
from cells import Cell, Settings
from olmo_distopt import (
    GradientReducer,
    ReplicaGroups,
    ShardedAdamW,
    ShardedMuon,
    memory_report,
)
from torch import nn


def measure(settings: Settings) -> Iterator[Cell]:
    """One cell each of AdamW, AdamW with BF16 moments and Muon, without times."""
    for name, make, moment_dtype in (
        ("AdamW", ShardedAdamW, torch.float32),
        ("AdamW, BF16 moments", ShardedAdamW, torch.bfloat16),
        ("Muon", ShardedMuon, torch.float32),
    ):
        gc.collect()  # of the one before, or the allocator counts it
        yield _cell(name, make, moment_dtype, settings)


def _cell(
    name: str,
    make: type[ShardedAdamW] | type[ShardedMuon],
    moment_dtype: torch.dtype,
    settings: Settings,
) -> Cell:
    width, layers = (64, 2) if settings.dry else (4096, 24)
    groups = ReplicaGroups({"alone": None}, lambda *_: "alone")
    before = torch.cuda.memory_allocated() if settings.device == "cuda" else 0
    model = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
    model.to(settings.device, torch.bfloat16)
    named = list(model.named_parameters())
    reducer = GradientReducer(named, groups)
    optimizer = make(named, groups, lr=1e-3, moment_dtype=moment_dtype)
    report = memory_report(named, groups, optimizer)
    notes = [line for line in str(report).splitlines() if line]
    if settings.device == "cuda":
        held = torch.cuda.memory_allocated() - before
        notes.append(f"allocator: {held / 2**20:.1f} MiB")
    reducer.close()
    return Cell(topic="memory", what=f"{name}, {layers} x {width}", samples={}, notes=notes)
