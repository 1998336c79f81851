"""Checkpoints written beside training: the state is copied, then files are written in a thread.

    training            step 400, copy, step 401, step 402, ...
    a thread a rank     files, index, fsync, rename; over a group of its own

The copy is on the host, in buffers that are made once. One save is in hand at a time: the next one
waits for it. A rank that fails to write fails the save on every rank (`write_checkpoint`), and
training, which hears of it in the next step's reduction, saves again at once.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from olmo_distopt import FlatShard

from olmo_trainer.build import Assembly
from olmo_trainer.checkpoint import SaveError, state_of, write_checkpoint
from olmo_trainer.checkpoint_manifest import checkpoint_path, delete_expired

_LEAVE_SECONDS = 120.0  # how long a failing run waits for a save in hand


class CheckpointSaver:
    """Saves one run's checkpoints, and deletes those that are no longer to be kept.

    Every method but `failed` is collective over the world. As a context manager it lets a save in
    hand finish when training ends by an error.

    Args:
        assembly: What is saved.
        run: The run's folder.
        data_fingerprint: Of the training data.
        versions: What the run runs on.
        say: Takes a line for a person.
    """

    def __init__(
        self,
        assembly: Assembly,
        run: Path,
        *,
        data_fingerprint: str,
        versions: dict[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._assembly = assembly
        self._run = run
        self._about = {"data_fingerprint": data_fingerprint, "versions": versions}
        self._say = say
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._saved: Path | None = None

    @property
    def failed(self) -> bool:
        """Whether the save in hand has come to nothing; waits for nobody."""
        return self._error is not None

    def save(self, step: int) -> None:
        """Copy the state after `step` and have it written, once the save before it is whole.

        Raises:
            SaveError: The save before it failed.
        """
        self.wait()
        if self._assembly.config.run.save_mode == "blocking":
            self._write(state_of(self._assembly), step)
            self.wait()
            return
        state = self._copy(state_of(self._assembly))
        # A daemon: a run that is aborted does not wait for it.
        self._thread = threading.Thread(target=self._write, args=(state, step), daemon=True)
        self._thread.start()

    def wait(self) -> Path | None:
        """Wait for the save in hand; return the newest checkpoint of this process, if any.

        Raises:
            SaveError: The save failed; on every rank alike.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._saved

    def save_now(self, step: int) -> Path:
        """Save `step`, in place of a save that failed if one did, and wait for it.

        Raises:
            SaveError: This save failed; on every rank alike.
        """
        with suppress(SaveError):
            self.wait()
        self.save(step)
        saved = self.wait()
        assert saved is not None, "a save that did not fail has saved"
        return saved

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Not after Ctrl-C: who aborts does not want to wait.
        if self._thread is not None and (kind is None or issubclass(kind, Exception)):
            self._thread.join(_LEAVE_SECONDS)

    def _write(self, state: dict[str, Any], step: int) -> None:
        config, mesh = self._assembly.config, self._assembly.mesh
        try:
            path = checkpoint_path(self._run, step)
            saved = write_checkpoint(state, config, mesh, path, step=step, **self._about)
        except Exception as error:
            self._error = error
            self._say(str(error))
            return
        self._saved = saved
        if mesh.is_main:
            keep = config.run.keep_last, config.run.keep_every
            try:
                delete_expired(self._run, keep_last=keep[0], keep_every=keep[1])
            except OSError as error:  # the new one is safe: no reason to stop
                self._say(f"an old checkpoint could not be deleted: {error}")

    def _copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy the state into host buffers, made at the first save; done when this returns."""
        copies: dict[str, Any] = {}
        device = self._assembly.mesh.device
        for name, value in state.items():
            held = value.local if isinstance(value, FlatShard) else value
            if name not in self._buffers:
                pin = held.device.type == "cuda"
                self._buffers[name] = torch.empty_like(held, device="cpu", pin_memory=pin)
            copy = self._buffers[name].copy_(held, non_blocking=True)
            copies[name] = (
                FlatShard(copy, start=value.start, global_numel=value.numel())
                if isinstance(value, FlatShard)
                else copy
            )
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return copies
