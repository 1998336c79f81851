"""Where a run took place."""

import importlib.metadata
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch
from cells import Settings

_PACKAGES = ("torch", "triton", "torchao", "ai2-olmo-core")


def describe(command: str, seed: int, settings: Settings) -> dict[str, str]:
    """What a reader needs to judge and to repeat the numbers."""
    facts = {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "hardware": (
            f"CPU ({platform.machine()}), dry run: no number here means anything"
            if settings.is_dry
            else torch.cuda.get_device_name()
        ),
        "commit": _commit(),
        "seed": str(seed),
        "repeats": f"{settings.budget_s} s a cell, at least {settings.least_rounds} each, in turn",
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    if not settings.is_dry:
        facts["cuda"] = str(torch.version.cuda)
        facts["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return facts


def slug(facts: dict[str, str]) -> str:
    """`h200` for `NVIDIA H200`, for a file name."""
    if facts["hardware"].startswith("CPU"):
        return "dry-run"
    words = facts["hardware"].lower().replace("nvidia", "").split()
    return "-".join("".join(c for c in word if c.isalnum()) for word in words) or "gpu"


def _commit() -> str:
    here = str(Path(__file__).parent)
    commit = _said("git", "-C", here, "rev-parse", "--short=12", "HEAD")
    if commit == "unknown":
        return commit
    changed = _said("git", "-C", here, "status", "--porcelain", "--", "..")
    return f"{commit}, {'with changes on top' if changed else 'clean'}"


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
