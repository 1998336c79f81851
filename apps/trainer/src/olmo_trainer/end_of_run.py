"""The end of a run: what a person wants to know, a sampled continuation, and the report."""

from pathlib import Path

from rich.console import Console

from olmo_trainer.checkpoint_manifest import read_manifest
from olmo_trainer.config import TrainerConfig
from olmo_trainer.data import ByteTokenizer, Tokenizer
from olmo_trainer.metrics import bits_per_byte
from olmo_trainer.open_data import open_tokenizer
from olmo_trainer.report.of_run import SAMPLE, report_run
from olmo_trainer.sample import continue_text, load_model

PROMPT = "def "


def conclude(
    config: TrainerConfig,
    folder: Path,
    checkpoint: Path,
    heldout_loss: float,
    console: Console,
) -> Path:
    """Print the held-out loss, a continuation and where things are; return the report's path.

    Args:
        config: The run's configuration.
        folder: The run's folder, with its metrics.
        checkpoint: The last checkpoint; the continuation comes from it.
        heldout_loss: After the last step, in nats a token.
        console: Where to print.
    """
    tokenizer = _tokenizer(config, console)
    if isinstance(tokenizer, ByteTokenizer):
        bits = bits_per_byte(heldout_loss)
        console.print(f"\nheld-out loss {heldout_loss:.4f} nats a byte, {bits:.4f} bits a byte")
    else:
        console.print(f"\nheld-out loss {heldout_loss:.4f} nats a token")
    if config.run.sample_bytes and tokenizer is not None:
        context = config.data.sequence_length
        model = load_model(read_manifest(checkpoint))
        sample = PROMPT + continue_text(
            model,
            PROMPT,
            config.run.sample_bytes,
            context=context,
            tokenizer=tokenizer,
            seed=config.seed,
        )
        (folder / SAMPLE).write_text(sample, encoding="utf-8", errors="replace")
        console.print(f"\n{sample}\n", soft_wrap=True)
    report = report_run(folder)
    console.print(f"checkpoint {checkpoint}\nreport     {report}", soft_wrap=True)
    return report


def _tokenizer(config: TrainerConfig, console: Console) -> Tokenizer | None:
    """Return the tokenizer of the run's text; `None` and a word rather than an error at the end."""
    try:
        return open_tokenizer(config)
    except ValueError as error:
        console.print(f"no sample: {error}", soft_wrap=True)
        return None
