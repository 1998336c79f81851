"""The command line: arguments to a command. Answers `--help` and wrong arguments without torch.

    uv run apps/trainer [train] [RECIPE] [--set a.b=c ...] [--steps N] [--resume [PATH]] [--dry-run]
    uv run apps/trainer verify [RECIPE] [--set a.b=c ...]
    uv run apps/trainer sample CHECKPOINT [--prompt TEXT] [--bytes N] [--temperature X] [--seed N]
    uv run apps/trainer inspect CHECKPOINT
    uv run apps/trainer recipes

Exit codes: 0 done, 1 a verification or a run failed, 2 wrong input, 130 stopped and saved.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from olmo_trainer.config import TrainerConfig

COMMANDS = ("train", "verify", "sample", "inspect", "recipes")
DEFAULT_RECIPE = "toy"
STOPPED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` (default: the process's) ask for; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or (words[0] not in COMMANDS and words[0] not in ("-h", "--help")):
        words.insert(0, "train")
    options = _parser().parse_args(words)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except ValueError as error:
        # Every rank sees the same error; one says it.
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="apps/trainer",
        description="Train a mixture-of-experts language model; without arguments, the toy.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    train = commands.add_parser("train", help="train a recipe (the default command)")
    _add_config(train)
    train.add_argument("--steps", type=int, metavar="N", help="same as --set steps=N")
    train.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="PATH",
        help="continue a run folder or checkpoint; without PATH the newest run of the recipe",
    )
    train.add_argument(
        "--dry-run", action="store_true", help="print config, parameters and bytes; train nothing"
    )
    train.set_defaults(run=_train)

    verify = commands.add_parser("verify", help="does any layout change the numbers?")
    _add_config(verify)
    verify.set_defaults(run=_verify)

    sample = commands.add_parser("sample", help="continue a text with a checkpoint")
    sample.add_argument("checkpoint", type=Path, help="a run folder or a checkpoint")
    sample.add_argument("--prompt", default="def ", help="text to continue (default: 'def ')")
    sample.add_argument("--bytes", type=int, default=300, metavar="N", help="default: 300")
    sample.add_argument("--temperature", type=float, default=0.7, metavar="X", help="default: 0.7")
    sample.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    sample.set_defaults(run=_sample)

    inspect = commands.add_parser("inspect", help="say what a checkpoint holds")
    inspect.add_argument("checkpoint", type=Path, help="a run folder or a checkpoint")
    inspect.set_defaults(run=_inspect)

    recipes = commands.add_parser("recipes", help="list the recipes")
    recipes.set_defaults(run=_recipes)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help=f"see `recipes` (default: {DEFAULT_RECIPE})")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="change one value of the config, as batch.sequences=8; repeatable",
    )


def _train(options: argparse.Namespace) -> int:
    from olmo_trainer.checkpoint_manifest import find_checkpoint, newest_run, read_manifest
    from olmo_trainer.overrides import apply_overrides

    settings = [*options.settings]
    if options.steps is not None:
        settings.append(f"steps={options.steps}")
    resume = None
    if options.resume is not None:
        name = options.recipe or DEFAULT_RECIPE
        path = Path(options.resume) if options.resume else newest_run(Path("runs") / name)
        resume = read_manifest(find_checkpoint(path))
    # A checkpoint brings its configuration; a recipe named beside it replaces that.
    base = resume.config if resume and options.recipe is None else _recipe(options.recipe)
    config = apply_overrides(base, settings).for_world(int(os.environ.get("WORLD_SIZE", "1")))
    from rich.console import Console

    console = Console()
    if options.dry_run:
        from olmo_trainer.describe import print_config

        print_config(config, console)
        return 0
    from olmo_trainer.loop import train
    from olmo_trainer.step import NonFiniteGradientError

    try:
        outcome = train(config, resume=resume, console=console)
    except NonFiniteGradientError as error:
        console.print(f"error: {error}", style="red", highlight=False)
        return 1
    if outcome is None:
        assert resume is not None, "only a resumed run can have nothing to do"
        console.print(f"{resume.path}: already at step {resume.step}; nothing to do")
        return 0
    return 0 if outcome.finished else STOPPED


def _verify(options: argparse.Namespace) -> int:
    from olmo_trainer.overrides import apply_overrides

    config = apply_overrides(_recipe(options.recipe), options.settings)
    from rich.console import Console

    from olmo_trainer.describe import print_verdicts
    from olmo_trainer.verify import verify

    console = Console()
    with console.status("comparing layouts with one process"):
        verdicts = verify(config)
    print_verdicts(verdicts, console)
    return 1 if any(verdict.faults for verdict in verdicts) else 0


def _sample(options: argparse.Namespace) -> int:
    from olmo_trainer.checkpoint_manifest import find_checkpoint, read_manifest

    for name, least in (("bytes", 1), ("temperature", 0), ("seed", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name} must be at least {least}, got {getattr(options, name)}")
    manifest = read_manifest(find_checkpoint(options.checkpoint))
    from rich.console import Console

    from olmo_trainer.sample import continue_text, load_model

    text = continue_text(
        load_model(manifest),
        options.prompt,
        options.bytes,
        context=manifest.config.data.sequence_length,
        temperature=options.temperature,
        seed=options.seed,
    )
    Console().print(options.prompt + text, markup=False, highlight=False, soft_wrap=True)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from rich.console import Console

    from olmo_trainer.checkpoint_manifest import find_checkpoint, read_manifest
    from olmo_trainer.describe import print_manifest

    print_manifest(read_manifest(find_checkpoint(options.checkpoint)), Console())
    return 0


def _recipes(_: argparse.Namespace) -> int:
    from rich.console import Console

    from olmo_trainer.describe import print_recipes

    print_recipes(Console())
    return 0


def _recipe(name: str | None) -> "TrainerConfig":
    from olmo_trainer.recipes import RECIPES

    if (name or DEFAULT_RECIPE) not in RECIPES:
        raise ValueError(f"no recipe {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name or DEFAULT_RECIPE]()
