"""The end of a run: what a person wants to know, a sampled continuation, and the report."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from olmo_trainer.checkpoint_manifest import read_manifest
from olmo_trainer.config import TrainerConfig
from olmo_trainer.data import ByteTokenizer, Tokenizer
from olmo_trainer.metrics import METRICS, StepRecord, bits_per_byte, read_metrics
from olmo_trainer.open_data import open_tokenizer
from olmo_trainer.report import write_report
from olmo_trainer.sample import continue_text, load_model
from olmo_trainer.sizes import count_parameters

PROMPT = "def "


def conclude(
    config: TrainerConfig,
    folder: Path,
    checkpoint: Path,
    step: int,
    heldout_loss: float,
    facts: Mapping[str, object],
    console: Console,
) -> Path:
    """Print the held-out loss, a continuation and where things are; return the report's path.

    Args:
        config: The run's configuration.
        folder: The run's folder, with its metrics.
        checkpoint: The last checkpoint; the continuation comes from it.
        step: Steps done.
        heldout_loss: After the last step, in nats a token.
        facts: What it ran on, for the report.
        console: Where to print.
    """
    tokenizer, sample = _tokenizer(config, console), ""
    summary: dict[str, object] = {"heldout_loss": heldout_loss}
    if isinstance(tokenizer, ByteTokenizer):
        bits = bits_per_byte(heldout_loss)
        summary["bits_per_byte"] = bits
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
        console.print(f"\n{sample}\n", soft_wrap=True)
    records = read_metrics(folder / METRICS)
    steps = [record for record in records if isinstance(record, StepRecord)]
    tokens, seconds = sum(each.tokens for each in steps), sum(each.seconds for each in steps)
    counts = count_parameters(config.model)
    report = write_report(
        folder / "report.html",
        title=config.name,
        config=config.model_dump(mode="json"),
        summary={
            **summary,
            "tokens_per_second": tokens / seconds,
            "parameters_total": counts.total,
            "parameters_active": counts.active,
            "steps": step,
            "tokens": tokens,
            "seconds": seconds,
            **facts,
        },
        records=records,
        sample=sample,
        layer_names=[f"layer {index}" for index in config.model.moe_layers],
    )
    console.print(f"checkpoint {checkpoint}\nreport     {report}", soft_wrap=True)
    return report


def _tokenizer(config: TrainerConfig, console: Console) -> Tokenizer | None:
    """Return the tokenizer of the run's text; `None` and a word rather than an error at the end."""
    try:
        return open_tokenizer(config)
    except ValueError as error:
        console.print(f"no sample: {error}", soft_wrap=True)
        return None
