"""Where a run took place: hardware, versions, commit, and two yardsticks of the device."""

import importlib.metadata
import platform
import statistics
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch
from cells import Settings
from timing import interleave

_PACKAGES = ("torch", "triton", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "numpy")


def describe(command: str, seed: int, settings: Settings) -> dict[str, str]:
    """What a reader needs to judge and to repeat the numbers, as words."""
    facts = {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "hardware": hardware(settings),
        "commit": _commit(),
        "seed": str(seed),
        "implementation": settings.impl,
        "repeats": (
            f"in turn, about {settings.budget_s} s a cell, at least {settings.least_rounds} each"
        ),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    if settings.device == "cuda":
        facts["cuda"] = str(torch.version.cuda)
        facts["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts["triton cache at the start"] = _triton_cache()
        facts |= _yardsticks(settings)
    return facts


def hardware(settings: Settings) -> str:
    """The name of the device."""
    if settings.device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU ({platform.machine()}), dry run: no number here means anything"


def slug(hardware_name: str) -> str:
    """`h200` for `NVIDIA H200`, for a file name."""
    if hardware_name.startswith("CPU"):
        return "dry-run"
    words = hardware_name.lower().replace("nvidia", "").split()
    return "-".join("".join(c for c in word if c.isalnum()) for word in words) or "gpu"


def _yardsticks(settings: Settings) -> dict[str, str]:
    """What the device copies and multiplies in this run, since machines of one kind differ."""
    source = torch.randn(1 << 29, device="cuda").bfloat16()
    target = torch.empty_like(source)
    a, b = (torch.randn(4096, 4096, device="cuda").bfloat16() for _ in range(2))
    calls = {"copy": lambda: target.copy_(source), "product": lambda: a @ b}
    medians = {name: statistics.median(t) for name, t in interleave(calls, settings).items()}
    return {
        "copy, bytes read and written": f"{2 * source.nbytes / medians['copy'] / 1e9:.2f} TB/s",
        "bfloat16 product 4096^3": f"{2 * 4096**3 / medians['product'] / 1e9:.0f} TFLOP/s",
    }


def _triton_cache() -> str:
    from triton import knobs

    folder = Path(knobs.cache.dir)
    entries = sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
    return f"{entries} entries" if entries else "empty"


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
