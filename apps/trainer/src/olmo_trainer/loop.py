"""A run from its first step to its report.

open data, read checkpoint (one process can still say no) -> launch -> assemble -> [load]
-> steps: train, log, hold out, save -> checkpoint, sample, report
"""

import math
import platform
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch.distributed import PrefixStore

from olmo_trainer import __version__
from olmo_trainer.build import Assembly, assemble
from olmo_trainer.checkpoint import load_checkpoint
from olmo_trainer.checkpoint_manifest import (
    Manifest,
    check_same_data,
    check_same_model,
    checkpoints_of,
    discard_leftovers,
)
from olmo_trainer.checkpoint_saver import CheckpointSaver
from olmo_trainer.checkpoint_soundness import newest_sound
from olmo_trainer.compiler import require_compiler
from olmo_trainer.config import TrainerConfig
from olmo_trainer.data import Batch, ByteTokenizer, TrainData
from olmo_trainer.device_peaks import peak_flops
from olmo_trainer.dispatcher import check_installed
from olmo_trainer.end_of_run import conclude
from olmo_trainer.launch import check_kernels, launched, pick_device
from olmo_trainer.learning_rate import describe_bend, learning_rate
from olmo_trainer.memory import measure_memory
from olmo_trainer.mesh import Mesh
from olmo_trainer.metrics import (
    METRICS,
    HeldoutRecord,
    MetricsLog,
    Record,
    RunHeader,
    StepRecord,
)
from olmo_trainer.open_data import end_with_data, open_data
from olmo_trainer.phases import PhaseClock
from olmo_trainer.progress import Progress
from olmo_trainer.rank_times import RankTimes, slow_rank
from olmo_trainer.rerun import DroppedError, Reruns
from olmo_trainer.run_folder import claim_folder, prepare_folder
from olmo_trainer.sizes import (
    count_document_flops,
    count_flops,
    count_parameters,
    count_weight_flops,
)
from olmo_trainer.step import NonFiniteError, accumulate_gradients, heldout_loss, update
from olmo_trainer.step_reader import StepReader
from olmo_trainer.stop_requests import STOP, stop_requests
from olmo_trainer.trackers import Tracking, require_trackers
from olmo_trainer.watchdog import Watchdog


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    `report` is `None` after a stop, on other ranks than the main one, and where it failed.
    """

    step: int
    finished: bool
    heldout_loss: float
    checkpoint: Path
    report: Path | None


def train(
    config: TrainerConfig, *, resume: Manifest | None, goes_on: bool = False, console: Console
) -> Outcome | None:
    """Train `config` (already fitted to the number of processes); return how it ended.

    Args:
        config: The run.
        resume: A checkpoint to continue from.
        goes_on: The same command goes on with the run again and again: `resume` is the newest
            checkpoint and gives way to an older one if its bytes are not as they were written; a
            folder with a run that has saved nothing may be started in again.
        console: Where the main rank prints.

    Returns:
        `None` when `resume` is already at the last step: nothing is done.

    Raises:
        ValueError: Data or checkpoint do not fit the configuration; before any process group, but
            for an older checkpoint.
        NonFiniteError: A gradient or the held-out loss is not finite. The last checkpoint stands.
        DroppedError: A step drops too many routes and is not to be taken, or there is no room for
            larger buffers. The last checkpoint stands.
    """
    require_trackers(config.run.trackers)
    device = pick_device(config)
    check_kernels(config, device)
    check_installed(config)
    require_compiler(config, device)
    data = open_data(config)
    config = end_with_data(config, data)
    if resume is not None:
        check_same_model(resume, config.model)
        check_same_data(resume, data.fingerprint)
        if resume.step >= config.steps and not goes_on:
            return None
    folder = prepare_folder(config, resume, goes_on=goes_on)
    with launched(config, device) as mesh:
        _require_same_data(mesh, data)
        _require_same_start(mesh, resume)
        if folder is None:
            claimed = str(claim_folder(config.name)) if mesh.is_main else ""
            folder = Path(mesh.broadcast_text(claimed))
        if mesh.is_main:
            discard_leftovers(folder)
            (folder / STOP).unlink(missing_ok=True)
        mesh.barrier()
        if resume is not None and resume.path.suffix == ".replaced":  # has its name again
            resume = replace(resume, path=resume.path.with_suffix(""))
        if resume is not None and goes_on:
            resume = newest_sound(
                mesh,
                resume,
                say=lambda text: console.print(text, soft_wrap=True) if mesh.is_main else None,
            )
            check_same_model(resume, config.model)
            check_same_data(resume, data.fingerprint)
            if resume.step >= config.steps:  # no sooner: the last one may be damaged too
                return None
        run = _Run(config, mesh, data, folder, console)
        outcome = run.train(resume)
        run.assembly.close()
        return outcome


@dataclass(frozen=True)
class _Asked:
    """What ranks ask of all ranks, in the steps that were read together."""

    stop: bool = False
    save_again: bool = False


class _Run:
    """One run in one process."""

    def __init__(
        self, config: TrainerConfig, mesh: Mesh, data: TrainData, folder: Path, console: Console
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.data = data
        self.folder = folder
        self.console = console
        self.log: MetricsLog | None = None
        self.tracking: Tracking | None = None
        self.versions = _versions(mesh)
        self.assembly: Assembly = assemble(config, mesh)
        self.saver = CheckpointSaver(
            self.assembly,
            folder,
            data_fingerprint=data.fingerprint,
            versions=self.versions,
            say=self._say,
        )
        self.watchdog = Watchdog(
            rank=mesh.rank,
            world=mesh.world,
            store=None if mesh.store is None else PrefixStore("watchdog", mesh.store.clone()),
            patience=config.run.watchdog_seconds,
        )
        stages = self.assembly.stages.values()
        self.clock = PhaseClock(mesh.device, self.watchdog.beat, stages)
        self.rank_times = RankTimes(mesh)
        self.reruns = Reruns()  # of the last step that was read
        is_bytes = data.vocabulary.name == ByteTokenizer.name
        self.bytes_per_token = 1.0 if is_bytes else None
        # FP32 products have another peak than BF16's.
        is_bf16 = self.assembly.dtype == torch.bfloat16
        self.peak = peak_flops(self.versions["device"]) if is_bf16 else None
        self.reader = StepReader(
            self.assembly,
            flops_per_token=(
                count_weight_flops(config.model)  # and what documents there are
                if config.data.attend == "document"
                else count_flops(config.model, config.data.sequence_length)
            ),
            peak=self.peak,
        )

    def train(self, resume: Manifest | None) -> Outcome:
        """Train from the start or from `resume` to the last step, or until asked to stop."""
        with self.watchdog:
            first = 0
            if resume is not None:
                load_checkpoint(self.assembly, resume)
                first = resume.step
            self._announce(first, resume)
            with ExitStack() as stack:
                stack.enter_context(self.saver)
                if self.mesh.is_main:
                    path = self.folder / METRICS
                    self.log = stack.enter_context(MetricsLog(path, resume_step=first))
                    self.tracking = stack.enter_context(self._open_trackers(first))
                step, heldout, saved = self._train_steps(first)
            self.watchdog.beat(step, "end")
            report = None
            if self.mesh.is_main and step == self.config.steps:
                report = self._conclude(heldout, saved)
            self.mesh.barrier()
        return Outcome(
            step=step,
            finished=step == self.config.steps,
            heldout_loss=heldout,
            checkpoint=saved,
            report=report,
        )

    def _train_steps(self, first: int) -> tuple[int, float, Path]:
        """Run the steps after `first`; return steps done, held-out loss and checkpoint."""
        run, num_steps = self.config.run, self.config.steps
        progress = Progress(
            num_steps,
            start_step=first,
            log_every=run.log_every,
            console=self.console,
            enabled=self.mesh.is_main,
        )
        with progress, stop_requests() as stop:
            self._write(RunHeader(step=first, info=self._header()))
            if first == 0:
                progress.say(f"before training: held-out {self._hold_out(0):.4f} nats a token")
            for step in range(first + 1, num_steps + 1):
                self._launch(step, stop)
                record, asked = self._read_steps(step, progress)
                if record is None:  # the host goes on while the device is at it
                    continue
                # The record comes before the checkpoint: a resume will not write it again.
                if asked.stop and step < num_steps:
                    # Who asks to stop may not have the time of an evaluation: save before it.
                    self._write(record)
                    self.watchdog.beat(step, "save")
                    saved, heldout = self.saver.save_now(step), self._hold_out(step)
                    progress.update(replace(record, heldout_loss=heldout))
                    # Nor the time of a sample or of a report, which anyone can ask for later.
                    progress.say(f"stopped after step {step}, as asked\ncheckpoint {saved}")
                    return step, heldout, saved
                if step == num_steps or _due(step, run.heldout_every):
                    record = replace(record, heldout_loss=self._hold_out(step))
                self._write(record)
                if step == num_steps or _due(step, run.log_every):
                    ranks = self.rank_times.gather(step, measure_memory(self.assembly))
                    self._write(ranks)
                    if words := slow_rank(ranks):
                        progress.say(words)
                self.watchdog.beat(step, "save")
                if step == num_steps and record.heldout_loss is not None:
                    saved = self.saver.save_now(step)
                    progress.update(record)
                    return step, record.heldout_loss, saved
                if asked.save_again:
                    self.saver.save_now(step)
                elif _due(step, run.save_every):
                    self.saver.save(step)
                progress.update(record)
        raise AssertionError(f"no step to run after step {first} of {num_steps}")

    def _write(self, record: Record) -> None:
        if isinstance(record, StepRecord) and not self._writes_layers(record.step):
            record = record.without_layers()
        if self.log is not None:
            self.log.write(record)
        if self.tracking is not None:
            self.tracking.write(record)

    def _writes_layers(self, step: int) -> bool:
        return step in (1, self.config.steps) or _due(step, self.config.run.layers_every)

    def _open_trackers(self, first: int) -> Tracking:
        return Tracking(
            self.config.run.trackers,
            self.folder,
            name=self.config.name,
            config=self.config.model_dump(mode="json"),
            first_step=first,
            say=self._say,
        )

    def _launch(self, step: int, stop: threading.Event) -> None:
        """Launch step `step`, from 1: on a GPU without waiting for it, unless a dispatcher must."""
        assembly, mesh, config = self.assembly, self.mesh, self.config
        self.clock.begin(step)
        whole = self.data.microbatches(
            step - 1,
            num_replicas=mesh.num_data,
            replica=mesh.data,
            accumulation=config.batch.accumulation,
        )
        batches = [
            batch.context_part(mesh.context, mesh.num_context).to(mesh.device) for batch in whole
        ]
        tells = mesh.context == 0 and mesh.pipeline == 0  # other ranks there read the same
        documents = [length for batch in whole for length in batch.document_lengths]
        rate = learning_rate(config, step - 1)
        try:
            accumulate_gradients(
                assembly,
                batches,
                stop=stop.is_set() or (mesh.is_main and (self.folder / STOP).exists()),
                save_failed=self.saver.failed,
                attention_flops=count_document_flops(config.model, documents) if tells else 0.0,
                enter=self.clock.enter,
            )
            self.clock.enter("step")
            updated = update(assembly, step, rate)
        except DroppedError:
            while self.reader.is_due(at_once=True):  # steps before it, which were taken
                self._write(self.reader.read().record)
            raise
        self.reader.take(step, rate, updated, self.clock)

    def _read_steps(self, step: int, progress: Progress) -> tuple[StepRecord | None, _Asked]:
        """Read the steps that are due after step `step` was launched, and write down all before it.

        All are due where something else than steps follows: the end, an evaluation, a save, or the
        times of all ranks. Every rank reads the same.

        Returns:
            The record of `step` itself if it is among them, not yet written; and what ranks ask.
        """
        run = self.config.run
        pauses = step == self.config.steps or any(
            _due(step, every) for every in (run.log_every, run.heldout_every, run.save_every)
        )
        asked = _Asked()
        while self.reader.is_due(at_once=pauses or asked.stop or asked.save_again):
            result = self.reader.read()
            totals, record = result.totals, result.record
            asked = _Asked(asked.stop or totals.stop, asked.save_again or totals.save_failed)
            self.rank_times.add(record.phase_seconds)
            if result.reasons:
                progress.say(f"step {record.step} is left out: {', '.join(result.reasons)}")
            if words := result.reruns.describe(self.reruns):
                progress.say(f"step {record.step} {words}")
            self.reruns = result.reruns
            if record.step == step:
                return record, asked
            self._write(record)
            progress.update(record)
        return None, asked

    def _hold_out(self, step: int) -> float:
        """Return the held-out loss; training is left bitwise as it was."""
        began, sources = time.perf_counter(), self.data.heldout_by_source
        limits: dict[str | None, int] = {None: self.config.run.heldout_sequences}
        if len(sources) > 1:  # as great a part of each source, and something of every one
            most, all_of_them = limits.pop(None), len(self.data.heldout)
            limits |= {
                name: max(1, round(min(1.0, most / all_of_them) * len(heldout)))
                for name, heldout in sources.items()
            }
        found = {
            name: heldout_loss(self.assembly, self._heldout_batches(name, limit))
            for name, limit in limits.items()
        }
        tokens = sum(count for _, count in found.values())
        loss = sum(each * count for each, count in found.values()) / max(tokens, 1)
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"step {step}: the held-out loss is {loss}; nothing was saved. Lower "
                "optimizer.learning_rate."
            )
        named = {name: value for name, value in found.items() if name is not None}
        self._write(
            HeldoutRecord(
                step=step,
                loss=loss,
                tokens=tokens,
                seconds=time.perf_counter() - began,
                source_losses={name: each for name, (each, _) in named.items()},
                source_tokens={name: count for name, (_, count) in named.items()},
            )
        )
        return loss

    def _heldout_batches(self, source: str | None, limit: int) -> list[Batch]:
        mesh, config = self.mesh, self.config
        per_rank = config.batch.sequences // (mesh.num_data * config.batch.accumulation)
        return [
            batch.context_part(mesh.context, mesh.num_context).to(mesh.device)
            for batch in self.data.heldout_batches(
                per_rank,
                num_replicas=mesh.num_data,
                replica=mesh.data,
                limit_sequences=limit,
                source=source,
            )
        ]

    def _say(self, text: str) -> None:
        if self.mesh.is_main:
            self.console.print(text, soft_wrap=True)

    def _announce(self, step: int, resume: Manifest | None) -> None:
        if not self.mesh.is_main:
            return
        counts, layout = count_parameters(self.config.model), self.config.layout
        where = f"{self.mesh.device}, {str(self.assembly.dtype).removeprefix('torch.')}"
        self.console.print(
            f"{self.config.name}: {counts.total:,} parameters, {counts.active:,} active a token; "
            f"{self.data.describe(self.config.steps)}; {layout.describe()} on {where}"
            + (f"; continuing {self.folder} after step {step}" if step else ""),
            soft_wrap=True,
        )
        bend = [] if resume is None else describe_bend(resume.config, self.config, step)
        for words in (*bend, *self.config.unreached()):
            self.console.print(words, soft_wrap=True)
        for later, path in checkpoints_of(self.folder):
            if later > step:
                self.console.print(f"left out {path}: damaged", soft_wrap=True)
        if self.data.order.max_steps == self.config.steps:
            self.console.print(
                f"the data end after step {self.config.steps}: no more passes are allowed"
            )
        if self.data.skipped:
            name, reason = next(iter(self.data.skipped.items()))
            self.console.print(
                f"left out {len(self.data.skipped)} files that are no text, as {name}: {reason}",
                soft_wrap=True,
            )

    def _conclude(self, heldout: float, saved: Path) -> Path | None:
        return conclude(self.config, self.folder, saved, heldout, self.console)

    def _header(self) -> dict[str, object]:
        return {
            "config": self.config.model_dump(mode="json"),
            "versions": self.versions,
            "world": self.mesh.world,
            # What turns nats a token into nats a byte, where it is known.
            "bytes_per_token": self.bytes_per_token,
            "peak_flops": "unknown" if self.peak is None else self.peak,
        }


def _require_same_data(mesh: Mesh, data: TrainData) -> None:
    """Raise on every rank alike when ranks read different text (other Python versions, say)."""
    spoken = mesh.broadcast_text(data.fingerprint)
    differ = torch.tensor([float(spoken != data.fingerprint)], device=mesh.device)
    if mesh.sum_over_world(differ).item():
        raise ValueError(
            f"every rank must read the same data, got {int(differ.item())} ranks that read other "
            "text than rank 0; use one Python version and one copy of the text on all machines"
        )


def _require_same_start(mesh: Mesh, resume: Manifest | None) -> None:
    """Raise on every rank alike when ranks found other checkpoints to go on from."""
    step = -1 if resume is None else resume.step
    spoken = int(mesh.broadcast_text(str(step)))
    differ = torch.tensor([float(spoken != step)], device=mesh.device)
    if mesh.sum_over_world(differ).item():
        raise ValueError(
            f"every rank must find the same newest checkpoint, got {int(differ.item())} ranks that "
            f"found another than rank 0 (step {spoken}); the run's folder must be on a file system "
            "that all machines share"
        )


def _versions(mesh: Mesh) -> dict[str, str]:
    device = (
        torch.cuda.get_device_name(mesh.device)
        if mesh.device.type == "cuda"
        else f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    return {
        "olmo-trainer": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
    }


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
