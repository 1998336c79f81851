"""What the commands print: a config before it runs, a checkpoint, the recipes, verdicts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from olmo_trainer.checkpoint_manifest import Manifest
from olmo_trainer.config import RowwiseDispatcher, TrainerConfig
from olmo_trainer.recipes import RECIPES
from olmo_trainer.sizes import bytes_per_rank, count_flops, count_parameters, layers_of_ranks

if TYPE_CHECKING:
    from olmo_trainer.verify import Verdict
    from olmo_trainer.verify_choices import ChoiceVerdict


def print_config(config: TrainerConfig, console: Console) -> None:
    """Print the resolved config, parameter counts and resident bytes a rank."""
    for key, value in flatten(config.model_dump(mode="json")):
        console.print(f"{key} = {value}", soft_wrap=True)
    counts, layout = count_parameters(config.model), config.layout
    flops = count_flops(config.model, config.data.sequence_length)
    console.print(f"\nparameters  {counts.total:,} total, {counts.active:,} active a token")
    console.print(f"operations  {flops:,.0f} a token, forward and backward")
    console.print(
        f"layout      {layout.describe()}",
    )
    for rank, parts in enumerate(layers_of_ranks(config)):
        stages = " and ".join(f"{part.start}..{part.stop - 1}" for part in parts)
        console.print(f"  pipeline rank {rank}: layers {stages}")
    words = (
        ("fp32", "bf16")
        if config.precision.parameters == "auto"
        else (config.precision.parameters,)
    )
    for word in words:
        console.print(
            f"bytes       {bytes_per_rank(config, weights=word):,.0f} on the fullest rank with "
            f"{word} weights: weights, FP32 gradients, sharded main weights and moments; "
            "no activations",
            soft_wrap=True,
        )
        _print_buffers(config, word, console)
    for words in config.unreached():
        console.print(words, soft_wrap=True)


def _print_buffers(config: TrainerConfig, word: str, console: Console) -> None:
    """Print what a rowwise dispatcher allocates, by the formula of its package."""
    if not isinstance(config.layout.dispatcher, RowwiseDispatcher):
        return
    import torch  # here alone: other dispatchers are described without it

    from olmo_trainer.dispatcher import buffer_bytes

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[word]
    sizes = buffer_bytes(config, dtype=dtype)
    rows = [size for name, size in sizes.items() if name.startswith("rows ")]  # all alike
    others = [f"{name} {size:,}" for name, size in sizes.items() if not name.startswith("rows ")]
    parts = ", ".join([f"rows {len(rows)} x {rows[0]:,}", *others])
    console.print(
        f"buffers     {sum(sizes.values()):,} bytes more with {word} rows, allocated once by the "
        f"dispatcher of the fullest rank: {parts}",
        soft_wrap=True,
    )


def print_manifest(manifest: Manifest, console: Console) -> None:
    """Print what a checkpoint holds."""
    config, counts = manifest.config, count_parameters(manifest.config.model)
    total = sum(manifest.files.values())
    console.print(f"checkpoint  {manifest.path}", soft_wrap=True)
    console.print(f"run         {config.name}, step {manifest.step} of {config.steps}")
    console.print(f"parameters  {counts.total:,} total, {counts.active:,} active a token")
    console.print(
        f"tensors     {len(manifest.elements)}, {total:,} bytes in {len(manifest.files)} files",
    )
    layout = config.layout
    console.print(
        f"saved by    {layout.describe()}; "
        + ", ".join(f"{name} {value}" for name, value in manifest.versions.items()),
        soft_wrap=True,
    )
    table = Table("tensor", "elements", box=None, pad_edge=False)
    for name, elements in manifest.elements.items():
        if name.startswith(("main.", "selection_bias.")):
            table.add_row(name.removeprefix("main."), f"{elements:,}")
    console.print(table)


def print_recipes(console: Console) -> None:
    """Print each recipe's name, size and purpose."""
    table = Table("recipe", "parameters", "active", "steps", "what for", box=None, pad_edge=False)
    for name, recipe in RECIPES.items():
        config = recipe()
        counts = count_parameters(config.model)
        purpose = (recipe.__doc__ or "").strip()
        table.add_row(name, f"{counts.total:,}", f"{counts.active:,}", str(config.steps), purpose)
    console.print(table)


def print_verdicts(verdicts: "Sequence[Verdict]", tolerance: str, console: Console) -> None:
    """Print each layout beside the one-process run, and what differs by more than `tolerance`."""
    columns = (
        "{:>4} {:>6} {:>4} {:>3} {:>5}  {:<11} {:>9}  {:>18} {:>8} {:>8} {:>8}  {:<7} {:<7} {}"
    )
    row = columns.format
    layout = ("data", "expert", "pipe", "ctx")
    heads = ("accum", "batch", "loss", "gradient ratios", "distance", "norm", "aux grad", "bias")
    lines = [row(*layout, *heads, "counts", "verdict")]
    for each in verdicts:
        ratios = each.ratios.values()
        line = row(
            *each.case.layout,
            each.case.accumulation,
            each.case.scenario,
            f"{each.loss:.6f}",
            f"{min(ratios):.5f}..{max(ratios):.5f}",
            f"{each.gradient_deviation:.1e}",
            f"{each.norm_ratio:.6f}",
            f"{each.auxiliary_ratio:.6f}",
            "equal" if each.bias_deviation == 0 else f"{each.bias_deviation:.1e}",
            "equal" if each.counts_equal else "differ",
            "differs" if each.faults else "same",
        )
        lines.append(line)
    for line in lines:
        console.print(line, soft_wrap=True)
    for each in verdicts:
        for fault in each.faults:
            console.print(f"{each.case}: {fault}", style="red", soft_wrap=True)
    bad = sum(bool(each.faults) for each in verdicts)
    console.print(
        f"{bad} of {len(verdicts)} differ from the one-process run"
        if bad
        else f"all {len(verdicts)} give the numbers of the one-process run",
        style="red" if bad else "green",
    )
    console.print(f"tolerance: {tolerance}", soft_wrap=True)


def print_choices(
    verdicts: "Sequence[ChoiceVerdict]", unfit: dict[str, str], console: Console
) -> None:
    """Print each choice beside the one-process run that it must equal or be near."""
    row = "{:<34} {:>4} {:>6} {:>4} {:>3}  {:<11} {:>9} {:>8} {:>8} {:>6}  {}".format
    layout = ("data", "expert", "pipe", "ctx")
    heads = ("batch", "loss", "ratio", "distance", "bound", "verdict")
    console.print(row("choice", *layout, *heads), soft_wrap=True)
    for each in verdicts:
        choice = each.choice
        line = row(
            choice.name,
            *choice.layout,
            choice.scenario,
            f"{each.loss:.6f}",
            f"{each.ratio:.5f}",
            f"{each.distance:.1e}",
            "-" if choice.bound is None else f"{choice.bound:g}",
            "differs" if each.faults else "same" if choice.bound is None else "near",
        )
        console.print(line, soft_wrap=True)
    for each in verdicts:
        for fault in each.faults:
            console.print(f"{each.choice.name}: {fault}", style="red", soft_wrap=True)
    for name, reason in unfit.items():
        console.print(f"{name}: not compared, it does not fit: {reason}", soft_wrap=True)
    bad = sum(bool(each.faults) for each in verdicts)
    console.print(
        f"{bad} of {len(verdicts)} choices differ from the one-process run"
        if bad
        else f"all {len(verdicts)} choices are as the one-process run, or as near as their bound",
        style="red" if bad else "green",
    )


def flatten(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return `(a.b.c, value)` for every leaf of a nested dictionary."""
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            pairs += flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs
