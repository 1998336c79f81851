"""The data of a configuration, opened and checked before any process group starts."""

from pathlib import Path

from olmo_trainer.config import (
    LinearBatchWarmup,
    MixtureSource,
    PlainSourceConfig,
    RepeatsFilter,
    StandardLibrarySource,
    TextFolderSource,
    TokenFilesSource,
    TrainerConfig,
)
from olmo_trainer.data import BatchWarmup, Ingredient, RepeatFilter, TrainData
from olmo_trainer.text import (
    MANIFEST,
    TOKENIZER,
    ByteTokenizer,
    JsonTokenizer,
    Source,
    StandardLibrary,
    TextFolder,
    TokenFiles,
    Tokenizer,
    TokenManifest,
)


def open_data(config: TrainerConfig) -> TrainData:
    """Read, split and pack the text that `config.data` names.

    Raises:
        ValueError: A missing or empty folder, a token file that is not as it should be, or a
            vocabulary that the model's does not hold.
    """
    data, vocab_size = config.data, config.model.vocab_size
    if isinstance(data.source, MixtureSource):
        ingredients = {
            name: Ingredient(
                _source(each.source, vocab_size),
                each.weight,
                data.max_passes if each.max_passes is None else each.max_passes,
            )
            for name, each in data.source.sources.items()
        }
    else:
        source = _source(data.source, vocab_size)
        ingredients = {"": Ingredient(source, max_passes=data.max_passes)}
    repeats = None
    if isinstance(data.filter, RepeatsFilter):
        repeats = RepeatFilter(data.filter.max_period, data.filter.max_count)
    warmup = None
    if isinstance(config.batch.warmup, LinearBatchWarmup):
        growing = config.batch.warmup
        warmup = BatchWarmup(growing.start, growing.increment, growing.steps)
    loaded = TrainData.mix(
        ingredients,
        sequence_length=data.sequence_length,
        batch_sequences=config.batch.sequences,
        seed=config.seed,
        heldout_fraction=data.heldout_fraction,
        separate_documents=data.attend == "document",
        repeats=repeats,
        batch_warmup=warmup,
    )
    needed = loaded.vocabulary.size
    if vocab_size < needed:
        raise ValueError(
            f"model.vocab_size ({vocab_size}) must be at least the tokenizer's ({needed})"
        )
    return loaded


def end_with_data(config: TrainerConfig, data: TrainData) -> TrainerConfig:
    """Return the configuration with no more steps than the data feed.

    The steps themselves are lowered, so that the learning rate ends where the data do.

    Raises:
        ValueError: The data do not feed one step.
    """
    most = data.order.max_steps
    if most is None or config.steps <= most:
        return config
    if most == 0:
        raise ValueError(
            f"the data must feed at least one step of batch.sequences ({config.batch.sequences}), "
            f"got {data.describe(0)}; allow more data.max_passes, or lower batch.sequences"
        )
    return config.model_copy(update={"steps": most})


def open_tokenizer(config: TrainerConfig) -> Tokenizer:
    """Return what turns text into the tokens that the configuration trains on.

    Raises:
        ValueError: The token files do not say it, or what they name cannot be opened.
    """
    source = config.data.source
    # All sources share one vocabulary; the first that says it names it.
    mixed = isinstance(source, MixtureSource)
    sources = [each.source for each in source.sources.values()] if mixed else [source]
    paths: list[str] = []
    for each in sources:
        if not isinstance(each, TokenFilesSource):
            return ByteTokenizer()
        paths += each.paths
    for path in paths:
        folder = Path(path).expanduser()
        if (folder / MANIFEST).is_file():
            manifest = TokenManifest.read(folder / MANIFEST)
            if manifest.vocabulary.name == ByteTokenizer.name:
                return ByteTokenizer()
            return JsonTokenizer(folder / TOKENIZER, manifest.options["end_of_document"])
    raise ValueError(
        f"data.source.paths must hold a folder that `prepare` wrote, to know the tokenizer, got "
        f"{', '.join(paths)}"
    )


def _source(config: PlainSourceConfig, vocab_size: int) -> Source | TokenFiles:
    match config:
        case StandardLibrarySource():
            return StandardLibrary()
        case TextFolderSource(path=path, pattern=pattern):
            return TextFolder(path, pattern)
        case TokenFilesSource(paths=paths, dtype=dtype, end_of_document=end, check=check):
            return TokenFiles(
                paths,
                vocab_size,
                dtype=None if dtype == "auto" else dtype,
                end_of_document=end,
                check=check,
            )
