"""The end of a run: what a person wants to know, a sampled continuation, and the report.

The checkpoint is saved by now. So nothing here may fail the run: a launcher would start it again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from olmo_trainer.checkpoint_manifest import read_manifest
from olmo_trainer.config import TrainerConfig
from olmo_trainer.data import ByteTokenizer, Tokenizer
from olmo_trainer.metrics import bits_per_byte
from olmo_trainer.open_data import open_tokenizer
from olmo_trainer.run_folder import SAMPLE
from olmo_trainer.sample import continue_text, load_model
from olmo_trainer.sizes import count_parameters

PROMPT = "def "
Made = TypeVar("Made")


def conclude(
    config: TrainerConfig,
    folder: Path,
    checkpoint: Path,
    heldout_loss: float,
    console: Console,
) -> Path | None:
    """Print the held-out loss, a continuation and where things are; return the report's path.

    A model of more than `run.sample_parameters` is not sampled from. What fails is said in a line:
    nothing is raised, and the path is `None` where there is no report.

    Args:
        config: The run's configuration.
        folder: The run's folder, with its metrics.
        checkpoint: The last checkpoint; the continuation comes from it.
        heldout_loss: After the last step, in nats a token.
        console: Where to print.
    """
    wants_sample = config.run.sample_bytes > 0
    tokenizer = _attempt("sample", lambda: open_tokenizer(config), console)
    if isinstance(tokenizer, ByteTokenizer):
        bits = bits_per_byte(heldout_loss)
        console.print(f"\nheld-out loss {heldout_loss:.4f} nats a byte, {bits:.4f} bits a byte")
    else:
        console.print(f"\nheld-out loss {heldout_loss:.4f} nats a token")
    size, most = count_parameters(config.model).total, config.run.sample_parameters
    if wants_sample and size > most:
        console.print(
            f"no sample: {size:,} parameters are more than run.sample_parameters ({most:,}); the "
            f"command `sample {folder}` draws one",
            soft_wrap=True,
        )
    elif wants_sample and tokenizer is not None:
        _attempt("sample", lambda: _sample(config, folder, checkpoint, tokenizer, console), console)
    report = _attempt("report", lambda: _report(folder), console)
    console.print(f"checkpoint {checkpoint}", soft_wrap=True)
    if report is not None:
        console.print(f"report     {report}", soft_wrap=True)
    return report


def _attempt(what: str, make: Callable[[], Made], console: Console) -> Made | None:
    """Return what `make` returns; `None` and a line of why rather than any error."""
    try:
        return make()
    except Exception as error:
        reason = " ".join(str(error).split())
        if not isinstance(error, ValueError):  # whose words are for the user
            reason = f"{type(error).__name__}: {reason}"
        console.print(f"no {what}: {reason}; the run is done and saved", soft_wrap=True)
        return None


def _sample(
    config: TrainerConfig, folder: Path, checkpoint: Path, tokenizer: Tokenizer, console: Console
) -> None:
    sample = PROMPT + continue_text(
        load_model(read_manifest(checkpoint)),
        PROMPT,
        config.run.sample_bytes,
        context=config.data.sequence_length,
        tokenizer=tokenizer,
        seed=config.seed,
    )
    (folder / SAMPLE).write_text(sample, encoding="utf-8", errors="replace")
    console.print(f"\n{sample}\n", soft_wrap=True)


def _report(folder: Path) -> Path:
    # matplotlib takes a second to import: only the rank that draws pays it, at the end.
    from olmo_trainer.report.of_run import report_run

    return report_run(folder)
