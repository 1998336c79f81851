"""What `prepare` shows: a bar over the bytes of the inputs, each file when it is whole, the sum."""

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from olmo_trainer.prepare.run import PrepareOptions, prepare
from olmo_trainer.text import TokenManifest


def run(
    inputs: Sequence[str],
    folder: Path,
    options: PrepareOptions,
    *,
    patterns: Sequence[str],
    num_workers: int | None,
    console: Console,
) -> None:
    """Prepare token files as `prepare` does, with `num_workers` = all cores for `None`.

    Raises:
        ValueError: As `prepare`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    folder = folder.expanduser()
    bar = Progress(
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        expand=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=None)
        manifest = prepare(
            inputs,
            folder,
            options,
            patterns=patterns,
            num_workers=(cores or 1) if num_workers is None else num_workers,
            on_read=lambda done, total: bar.update(task, completed=done, total=total),
            on_file=lambda name: console.print(f"{folder / name}", soft_wrap=True),
        )
    console.print(summary(manifest, folder), soft_wrap=True)


def summary(manifest: TokenManifest, folder: Path) -> str:
    """Say what was written, what was left out, and how to train on it."""
    vocabulary = manifest.vocabulary
    lines = [
        f"{folder}: {manifest.tokens:,} tokens of {manifest.documents:,} documents in "
        f"{len(manifest.files)} files, {manifest.dtype}"
    ]
    if manifest.skipped:
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in manifest.skipped.items())
        lines.append(f"left out: {left_out}")
    lines.append(
        "train on it: --set data.source.kind=token_files --set "
        f"data.source.paths={folder} --set model.vocab_size={vocabulary.size}"
    )
    return "\n".join(lines)
