"""A run from its first step to its report.

open data, read checkpoint (one process can still say no) -> launch -> assemble -> [load]
-> steps: train, log, hold out, save -> checkpoint, sample, report
"""

import platform
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from olmo_trainer import __version__
from olmo_trainer.build import Assembly, assemble
from olmo_trainer.checkpoint import (
    Manifest,
    check_same_data,
    check_same_model,
    discard_leftovers,
    read_manifest,
)
from olmo_trainer.checkpoint_tensors import load_checkpoint, save_checkpoint
from olmo_trainer.config import TrainerConfig
from olmo_trainer.data import TrainData
from olmo_trainer.launch import launched, pick_device
from olmo_trainer.mesh import Mesh
from olmo_trainer.metrics import (
    HeldoutRecord,
    MetricsLog,
    RunHeader,
    StepRecord,
    bits_per_byte,
    read_metrics,
)
from olmo_trainer.open_data import open_data
from olmo_trainer.progress import Progress
from olmo_trainer.sample import continue_text, load_model
from olmo_trainer.sizes import count_parameters
from olmo_trainer.step import (
    NonFiniteGradientError,
    accumulate_gradients,
    heldout_loss,
    learning_rate,
    update,
)

PROMPT = "def "

__all__ = ["NonFiniteGradientError", "Outcome", "train"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    finished: bool
    heldout_loss: float
    checkpoint: Path
    report: Path | None


def train(config: TrainerConfig, *, resume: Manifest | None, console: Console) -> Outcome | None:
    """Train `config` (already fitted to the number of processes); return how it ended.

    Args:
        config: The run.
        resume: A checkpoint to continue from.
        console: Where the main rank prints.

    Returns:
        `None` when `resume` is already at the last step: nothing is done.

    Raises:
        ValueError: Data or checkpoint do not fit the configuration; before any process group.
        NonFiniteGradientError: A step's gradient is not finite. The last checkpoint stands.
    """
    device = pick_device(config)
    data = open_data(config)
    if resume is not None:
        check_same_model(resume, config.model)
        check_same_data(resume, data.fingerprint)
        if resume.step >= config.steps:
            return None
    with launched(config, device) as mesh:
        _require_same_data(mesh, data)
        folder = Path(mesh.broadcast_text(str(_run_folder(config, resume))))
        if mesh.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            discard_leftovers(folder)
        return _Run(config, mesh, data, folder, console).train(resume)


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
        self.versions = _versions(mesh)
        self.assembly: Assembly = assemble(config, mesh)

    def train(self, resume: Manifest | None) -> Outcome:
        """Train from the start or from `resume` to the last step, or until asked to stop."""
        config, mesh = self.config, self.mesh
        step = 0
        if resume is not None:
            load_checkpoint(self.assembly, resume)
            step = resume.step
        log = MetricsLog(self.folder / "metrics.jsonl", resume_step=step) if mesh.is_main else None
        self._announce(step)
        progress = Progress(
            config.steps,
            start_step=step,
            log_every=config.run.log_every,
            console=self.console,
            enabled=mesh.is_main,
        )
        saved, heldout, stopping = resume.path if resume else None, float("nan"), False
        with progress, _stop_requests() as stop:
            if log is not None:
                log.write(RunHeader(step=step, info=self._header()))
            if step == 0:
                heldout = self._hold_out(0, log)
                progress.say(f"before training: held-out {heldout:.4f} nats a byte")
            while step < config.steps and not stopping:
                record, stopping = self._step(step, stop)
                step += 1
                is_last = step == config.steps or stopping
                if is_last or _due(step, config.run.heldout_every):
                    heldout = self._hold_out(step, log)
                    record = replace(record, heldout_loss=heldout)
                # The record first: a resume from this step's checkpoint will not write it again.
                if log is not None:
                    log.write(record)
                if is_last or _due(step, config.run.save_every):
                    saved = self._save(step)
                progress.update(record)
        if log is not None:
            log.close()
        assert saved is not None, "the last step always saves"
        report = self._conclude(step, heldout, saved) if mesh.is_main else None
        mesh.barrier()
        return Outcome(
            step=step,
            finished=step == config.steps,
            heldout_loss=heldout,
            checkpoint=saved,
            report=report,
        )

    def _step(self, step: int, stop: threading.Event) -> tuple[StepRecord, bool]:
        """Train on global batch `step`; return its record and whether a rank wants to stop."""
        assembly, mesh, config = self.assembly, self.mesh, self.config
        began = time.perf_counter()
        batches = [
            batch.to(mesh.device, non_blocking=True)
            for batch in self.data.microbatches(
                step,
                num_replicas=mesh.num_data,
                replica=mesh.data,
                accumulation=config.batch.accumulation,
            )
        ]
        accumulate_gradients(assembly, batches, stop=stop.is_set())
        rate = learning_rate(config.optimizer, step, config.steps)
        norm = update(assembly, step, rate)
        totals, layers = assembly.statistics.totals(), assembly.statistics.layers()
        seconds = time.perf_counter() - began
        record = StepRecord(
            step=step + 1,
            loss=totals.loss,
            balance_loss=_mean([layer.balance_loss for layer in layers]),
            auxiliary_loss=totals.auxiliary_loss,
            z_loss=_mean([layer.z_loss for layer in layers]),
            grad_norm=norm,
            learning_rate=rate,
            tokens=totals.tokens,
            seconds=seconds,
            tokens_per_second=totals.tokens / seconds,
            worst_imbalance=max((layer.imbalance for layer in layers), default=None),
            expert_counts=[layer.counts for layer in layers],
            imbalance=[layer.imbalance for layer in layers],
            honesty=[layer.honesty for layer in layers],
            entropy_deficit=[layer.entropy_deficit for layer in layers],
            dead_experts=[layer.dead_experts for layer in layers],
        )
        return record, totals.stop

    def _hold_out(self, step: int, log: MetricsLog | None) -> float:
        """Return the held-out loss; training is left bitwise as it was."""
        began, mesh, config = time.perf_counter(), self.mesh, self.config
        per_rank = config.batch.sequences // (mesh.num_data * config.batch.accumulation)
        batches = [
            batch.to(mesh.device)
            for batch in self.data.heldout_batches(
                per_rank,
                num_replicas=mesh.num_data,
                replica=mesh.data,
                limit_sequences=config.run.heldout_sequences,
            )
        ]
        loss, tokens = heldout_loss(self.assembly, batches)
        if log is not None:
            seconds = time.perf_counter() - began
            log.write(HeldoutRecord(step=step, loss=loss, tokens=tokens, seconds=seconds))
        return loss

    def _save(self, step: int) -> Path:
        return save_checkpoint(
            self.assembly,
            self.folder,
            step,
            data_fingerprint=self.data.fingerprint,
            versions=self.versions,
        )

    def _announce(self, step: int) -> None:
        if not self.mesh.is_main:
            return
        counts, layout = count_parameters(self.config.model), self.config.layout
        where = f"{self.mesh.device}, {str(self.assembly.dtype).removeprefix('torch.')}"
        self.console.print(
            f"{self.config.name}: {counts.total:,} parameters, {counts.active:,} active a token; "
            f"{self.data.num_train_documents} documents, {len(self.data.train):,} sequences of "
            f"{self.config.data.sequence_length}; data {layout.data} x expert {layout.expert} x "
            f"pipeline {layout.pipeline} on {where}"
            + (f"; continuing after step {step}" if step else ""),
            soft_wrap=True,
            highlight=False,
        )

    def _header(self) -> dict[str, object]:
        return {
            "config": self.config.model_dump(mode="json"),
            "versions": self.versions,
            "world": self.mesh.world,
        }

    def _conclude(self, step: int, heldout: float, saved: Path) -> Path:
        """Print what a person wants to know at the end, and write the report."""
        # matplotlib takes a second to import: only the rank that draws pays it, at the end.
        from olmo_trainer.report import write_report

        bits, sample = bits_per_byte(heldout), ""
        self.console.print(
            f"\nheld-out loss {heldout:.4f} nats a byte, {bits:.4f} bits a byte", highlight=False
        )
        if self.config.run.sample_bytes:
            model = load_model(read_manifest(saved))
            context = self.config.data.sequence_length
            sample = PROMPT + continue_text(
                model, PROMPT, self.config.run.sample_bytes, context=context, seed=self.config.seed
            )
            self.console.print(f"\n{sample}\n", markup=False, highlight=False)
        records = read_metrics(self.folder / "metrics.jsonl")
        steps = [record for record in records if isinstance(record, StepRecord)]
        counts, seconds = count_parameters(self.config.model), sum(each.seconds for each in steps)
        tokens = sum(each.tokens for each in steps)
        report = write_report(
            self.folder / "report.html",
            title=self.config.name,
            config=self.config.model_dump(mode="json"),
            summary={
                "heldout_loss": heldout,
                "bits_per_byte": bits,
                "tokens_per_second": tokens / seconds,
                "parameters_total": counts.total,
                "parameters_active": counts.active,
                "steps": step,
                "tokens": tokens,
                "seconds": seconds,
                "world": self.mesh.world,
                **self.versions,
            },
            records=records,
            sample=sample,
            layer_names=[f"layer {index}" for index in self.config.model.moe_layers],
        )
        self.console.print(f"checkpoint {saved}\nreport     {report}", soft_wrap=True)
        return report


def _require_same_data(mesh: Mesh, data: TrainData) -> None:
    """Raise on every rank alike when ranks read different text (other Python versions, say)."""
    spoken = mesh.broadcast_text(data.fingerprint)
    differ = torch.tensor([float(spoken != data.fingerprint)], device=mesh.device)
    if mesh.sum_over_world(differ).item():
        raise ValueError(
            f"every rank must read the same data, got {int(differ.item())} ranks that read other "
            "text than rank 0; use one Python version and one copy of the text on all machines"
        )


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """Turn Ctrl-C and SIGTERM into a request to save after the step in hand; a second one kills."""
    event = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(number, previous[number])
        event.set()

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    for number in previous:
        signal.signal(number, ask)
    try:
        yield event
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run_folder(config: TrainerConfig, resume: Manifest | None) -> Path:
    if config.run.folder is not None:
        return Path(config.run.folder)
    if resume is not None:
        return resume.path.parent.parent
    return Path("runs") / config.name / datetime.now().strftime("%Y%m%d-%H%M%S")


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


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
