"""The command line: arguments to a command. Answers `--help` and wrong arguments without torch.

    uv run apps/trainer [train] [RECIPE] [--set a.b=c ...] [--steps N] [--dry-run]
                                [--resume [PATH] | --continue] [--processes N]
    uv run apps/trainer verify [RECIPE] [--set a.b=c ...]
    uv run apps/trainer sample CHECKPOINT [--prompt TEXT] [--bytes N] [--temperature X] [--seed N]
    uv run apps/trainer inspect CHECKPOINT
    uv run apps/trainer report RUN [RUN ...] [--to FILE]
    uv run apps/trainer prepare TEXT ... --to FOLDER [--tokenizer FILE] [--workers N] ...
    uv run apps/trainer import FOLDER RUN [RECIPE] [--set a.b=c ...]
    uv run apps/trainer export CHECKPOINT FOLDER [--dtype TYPE] [--end TOKEN]
    uv run apps/trainer recipes

Exit codes: 0 done (with `--continue` also stopped as asked), 1 a verification or a run failed,
2 wrong input, 130 stopped and saved.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_trainer import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from olmo_trainer.config import TrainerConfig

COMMANDS = (
    *("train", "verify", "sample", "inspect", "report", "prepare", "import", "export", "recipes"),
)
DEFAULT_RECIPE = "toy"
IMPORT_RECIPE = "olmoe-1b-7b"
EXAMPLES = """\
training is the default command; `train --help` lists its options:
  uv run apps/trainer                                     the toy, in two minutes
  uv run apps/trainer toy --steps 100 --set batch.sequences=8
  uv run apps/trainer --resume                            go on with the newest run of the toy
  uv run apps/trainer --dry-run                           every key of the config
"""
STOPPED = 130
PATIENCE_SECONDS = 3.0  # a launcher's monitor looks ten times a second


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` (default: the process's) ask for; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or (words[0] not in COMMANDS and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, "train")
    options = _parser().parse_args(words)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except ValueError as error:
        _explain(error)
        return 2
    except OSError as error:  # a full disk, a folder that takes no files
        if command in (_train, _verify):
            raise  # whose files are not what was typed: where it comes from must be seen
        _complain(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _complain("aborted; the last checkpoint stands")
        return STOPPED


def _speaks() -> bool:
    """Whether this process speaks for the run: every rank sees the same, one says it."""
    return os.environ.get("RANK", "0") == "0"


def _complain(text: str) -> None:
    if _speaks():
        print(text, file=sys.stderr)  # noqa: T201


def _explain(error: Exception) -> None:
    """Say what is wrong; on another rank than the main one, when that one did not.

    A launcher ends all ranks with the first that fails: another rank that failed at once would
    silence the main one. Yet it alone may lack a file. So it waits to be ended, and else speaks.
    """
    if _speaks():
        _complain(f"error: {error}")
        return
    time.sleep(PATIENCE_SECONDS)
    print(f"error on rank {os.environ['RANK']}: {error}", file=sys.stderr)  # noqa: T201


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="apps/trainer",
        description="Train a mixture-of-experts language model; without arguments, the toy.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"olmo-trainer {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    train = commands.add_parser("train", help="train a recipe (the default command)")
    _add_config(train)
    train.add_argument("--steps", type=int, metavar="N", help="same as --set steps=N")
    onward = train.add_mutually_exclusive_group()
    onward.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="PATH",
        help="continue a run folder or checkpoint; without PATH the newest run of the recipe",
    )
    onward.add_argument(
        "--continue",
        action="store_true",
        dest="goes_on",
        help="go on with the newest checkpoint of run.folder that is as it was written, or start "
        "when there is none: the same command again after a crash",
    )
    train.add_argument(
        "--dry-run", action="store_true", help="print config, parameters and bytes; train nothing"
    )
    train.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="with --dry-run: as if there were so many, which torchrun starts otherwise",
    )
    train.set_defaults(run=_train)

    verify = commands.add_parser("verify", help="does any layout or choice change the numbers?")
    _add_config(verify)
    verify.set_defaults(run=_verify)

    sample = commands.add_parser("sample", help="continue a text with a checkpoint")
    sample.add_argument("checkpoint", type=Path, help="a run folder or a checkpoint")
    sample.add_argument("--prompt", default="def ", help="text to continue (default: 'def ')")
    sample.add_argument(
        "--bytes",
        type=int,
        default=300,
        metavar="N",
        help="tokens, of a byte each for bytes; default: 300",
    )
    sample.add_argument("--temperature", type=float, default=0.7, metavar="X", help="default: 0.7")
    sample.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    sample.set_defaults(run=_sample)

    inspect = commands.add_parser("inspect", help="say what a checkpoint holds")
    inspect.add_argument("checkpoint", type=Path, help="a run folder or a checkpoint")
    inspect.set_defaults(run=_inspect)

    report = commands.add_parser("report", help="draw a run, over or not, or compare several")
    report.add_argument("runs", nargs="+", type=Path, metavar="run", help="run folders")
    report.add_argument(
        "--to",
        type=Path,
        metavar="FILE",
        help="of a comparison (default: comparison.html; one run's report lies in its folder)",
    )
    report.set_defaults(run=_report)

    _add_prepare(commands.add_parser("prepare", help="turn text into token files to train on"))

    bring = commands.add_parser("import", help="begin a run with weights of Hugging Face's format")
    bring.add_argument("folder", type=Path, help="config.json and safetensors: OLMoE, Qwen3-MoE")
    bring.add_argument("run_folder", type=Path, metavar="run", help="the run's folder, a new one")
    _add_config(bring, default=IMPORT_RECIPE)
    bring.set_defaults(run=_import)

    export = commands.add_parser("export", help="write a checkpoint for transformers")
    export.add_argument("checkpoint", type=Path, help="a run folder or a checkpoint")
    export.add_argument("folder", type=Path, help="what to write, a new one")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    export.add_argument(
        "--end", type=int, metavar="TOKEN", help="ends a text (default: what the run says)"
    )
    export.set_defaults(run=_export)

    recipes = commands.add_parser("recipes", help="list the recipes")
    recipes.set_defaults(run=_recipes)
    return parser


def _add_config(parser: argparse.ArgumentParser, default: str = DEFAULT_RECIPE) -> None:
    parser.add_argument("recipe", nargs="?", help=f"see `recipes` (default: {default})")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="change one value of the config, as batch.sequences=8; repeatable",
    )


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="TEXT",
        help="files or folders: plain text, JSON lines (.gz, .zst) or Parquet",
    )
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a new folder")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json (default: bytes)"
    )
    parser.add_argument(
        "--end-of-document", metavar="TOKEN", help="ends each document (default: the usual one)"
    )
    parser.add_argument("--field", default="text", help="of a line or row (default: text)")
    parser.add_argument(
        "--pattern",
        action="append",
        default=[],
        help="names of a folder's files, as '*.md'; repeatable (default: by the usual suffixes)",
    )
    parser.add_argument(
        "--file-tokens", type=int, default=2**28, metavar="N", help="of a token file, about"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: all cores)")
    parser.set_defaults(run=_prepare)


def _train(options: argparse.Namespace) -> int:
    from olmo_trainer.checkpoint_manifest import (
        find_checkpoint,
        newest_manifest,
        newest_run,
        read_manifest,
    )
    from olmo_trainer.overrides import apply_overrides

    settings = [*options.settings]
    if options.steps is not None:
        settings.append(f"steps={options.steps}")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if options.processes is not None:
        if not options.dry_run:
            raise ValueError(
                "--processes is for --dry-run; training takes as many as torchrun starts"
            )
        if options.processes < 1:
            raise ValueError(f"--processes must be at least 1, got {options.processes}")
        world = options.processes
    resume = None
    if options.goes_on:
        config = apply_overrides(_recipe(options.recipe), settings).for_world(world)
        resume = newest_manifest(config.run.folder)
    else:
        if options.resume is not None:
            name = options.recipe or DEFAULT_RECIPE
            path = Path(options.resume) if options.resume else newest_run(Path("runs") / name)
            resume = read_manifest(find_checkpoint(path))
        # A checkpoint brings its configuration; a recipe named beside it replaces that.
        base = resume.config if resume and options.recipe is None else _recipe(options.recipe)
        if resume:  # where it is now, with as many ranks as there are: not as it was written
            run = base.run.model_copy(update={"folder": None})
            layout = base.layout.model_copy(update={"data": None})
            base = base.model_copy(update={"run": run, "layout": layout})
        config = apply_overrides(base, settings).for_world(world)
    console = _console()
    if options.dry_run:
        from olmo_trainer.describe import print_config

        print_config(config, console)
        return 0
    from olmo_trainer.checkpoint import SaveError
    from olmo_trainer.loop import train
    from olmo_trainer.rerun import DroppedError
    from olmo_trainer.step import NonFiniteError

    try:
        outcome = train(config, resume=resume, goes_on=options.goes_on, console=console)
    except (NonFiniteError, DroppedError, SaveError) as error:
        _explain(error)
        return 1
    if outcome is None:
        assert resume is not None, "only a resumed run can have nothing to do"
        if _speaks():
            more = "--steps N" if resume.step >= config.steps else "the data end; data.max_passes=N"
            console.print(
                f"{resume.path}: already at step {resume.step} of {config.steps}; nothing to do "
                f"({more} for more)",
                soft_wrap=True,
            )
        return 0
    # A launcher takes another code for a crash, and would start the run again at once.
    return 0 if outcome.finished or options.goes_on else STOPPED


def _verify(options: argparse.Namespace) -> int:
    from olmo_trainer.overrides import apply_overrides

    config = apply_overrides(_recipe(options.recipe), options.settings)
    from olmo_trainer.describe import print_choices, print_verdicts
    from olmo_trainer.verify import TOLERANCE, verify
    from olmo_trainer.verify_choices import verify_choices

    console = _console()
    with console.status("comparing layouts with one process"):
        verdicts = verify(config)
    print_verdicts(verdicts, TOLERANCE, console)
    console.print()
    with console.status(
        "comparing schedules, dispatchers, recompute, compile, precision and optimizers"
    ):
        choices, unfit = verify_choices(config)
    print_choices(choices, unfit, console)
    return 1 if any(verdict.faults for verdict in (*verdicts, *choices)) else 0


def _sample(options: argparse.Namespace) -> int:
    from olmo_trainer.checkpoint_manifest import find_checkpoint, read_manifest

    for name, least, most in (("bytes", 1, 2**31), ("temperature", 0, 1e6), ("seed", 0, 2**63 - 1)):
        if not least <= getattr(options, name) <= most:
            raise ValueError(
                f"--{name} must be in [{least}, {most:g}], got {getattr(options, name)}"
            )
    manifest = read_manifest(find_checkpoint(options.checkpoint))
    from olmo_trainer.open_data import open_tokenizer
    from olmo_trainer.sample import continue_text, load_model

    text = continue_text(
        load_model(manifest),
        options.prompt,
        options.bytes,
        context=manifest.config.data.sequence_length,
        tokenizer=open_tokenizer(manifest.config),
        temperature=options.temperature,
        seed=options.seed,
    )
    _console().print(options.prompt + text, soft_wrap=True)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from olmo_trainer.checkpoint_manifest import find_checkpoint, read_manifest
    from olmo_trainer.describe import print_manifest

    print_manifest(read_manifest(find_checkpoint(options.checkpoint)), _console())
    return 0


def _report(options: argparse.Namespace) -> int:
    if len(options.runs) == 1:
        if options.to is not None:
            raise ValueError("--to is for several runs; the report of one lies in its folder")
        from olmo_trainer.report.of_run import report_run

        path = report_run(options.runs[0].expanduser())
    else:
        from olmo_trainer.report.compare import write_comparison

        folders = [folder.expanduser() for folder in options.runs]
        path = write_comparison(options.to or Path("comparison.html"), folders)
    _console().print(str(path), soft_wrap=True)
    return 0


def _prepare(options: argparse.Namespace) -> int:
    from olmo_trainer.prepare import PrepareOptions
    from olmo_trainer.prepare.command import run

    settings = PrepareOptions(
        options.tokenizer, options.end_of_document, options.field, options.file_tokens
    )
    try:
        run(
            options.inputs,
            options.to,
            settings,
            patterns=options.pattern,
            num_workers=options.workers,
            console=_console(),
        )
    except KeyboardInterrupt:
        _complain("stopped; the same command goes on")
        return STOPPED
    except (OSError, RuntimeError) as error:  # a full disk, a killed process
        _complain(f"error: {error}; the same command goes on")
        return 1
    return 0


def _import(options: argparse.Namespace) -> int:
    from olmo_trainer.hugging_face.architecture import ArchitectureError, from_hugging_face
    from olmo_trainer.hugging_face.configuration_files import configure, read_fields

    recipe = _recipe(options.recipe or IMPORT_RECIPE)
    try:
        model = from_hugging_face(read_fields(options.folder))
    except ArchitectureError as error:
        raise ValueError(f"{options.folder / 'config.json'}: {error}") from None
    config = configure(recipe, options.settings, model)
    from olmo_trainer.checkpoint import SaveError
    from olmo_trainer.hugging_face.import_run import import_checkpoint

    try:
        checkpoint = import_checkpoint(options.folder, options.run_folder, config)
    except SaveError as error:
        _complain(f"error: {error}")
        return 1
    _console().print(f"{checkpoint}\ntrain it: --resume {options.run_folder}", soft_wrap=True)
    return 0


def _export(options: argparse.Namespace) -> int:
    from olmo_trainer.checkpoint_manifest import find_checkpoint, read_manifest

    manifest = read_manifest(find_checkpoint(options.checkpoint))
    from olmo_trainer.hugging_face.export_run import export_checkpoint

    family = export_checkpoint(manifest, options.folder, dtype=options.dtype, end=options.end)
    trust = ", trust_remote_code=True" if family == "olmo_trainer" else ""
    _console().print(
        f"{family}: AutoModelForCausalLM.from_pretrained({str(options.folder)!r}{trust})",
        soft_wrap=True,
    )
    return 0


def _recipes(_: argparse.Namespace) -> int:
    from olmo_trainer.describe import print_recipes

    print_recipes(_console())
    return 0


def _recipe(name: str | None) -> "TrainerConfig":
    from olmo_trainer.recipes import RECIPES

    if (name or DEFAULT_RECIPE) not in RECIPES:
        raise ValueError(
            f"no recipe or command {name!r}; recipes: {', '.join(RECIPES)}; commands: "
            f"{', '.join(COMMANDS)}"
        )
    return RECIPES[name or DEFAULT_RECIPE]()


def _console() -> "Console":
    """Return standard output; what a person typed or a model wrote is printed as it is."""
    from olmo_trainer.lasting_console import LastingConsole

    return LastingConsole(markup=False, emoji=False, highlight=False)
