"""The data of a configuration, opened and checked before any process group starts."""

from olmo_trainer.config import StandardLibrarySource, TextFolderSource, TrainerConfig
from olmo_trainer.data import StandardLibrary, TextFolder, TrainData


def open_data(config: TrainerConfig) -> TrainData:
    """Read, split and pack the text that `config.data` names.

    Raises:
        ValueError: A missing or empty folder, or a vocabulary that the model's does not hold.
    """
    data = config.data
    match data.source:
        case StandardLibrarySource():
            source = StandardLibrary()
        case TextFolderSource(path=path, pattern=pattern):
            source = TextFolder(path, pattern)
    loaded = TrainData.load(
        source,
        sequence_length=data.sequence_length,
        batch_sequences=config.batch.sequences,
        seed=config.seed,
        heldout_fraction=data.heldout_fraction,
    )
    needed = loaded.tokenizer.vocab_size
    if config.model.vocab_size < needed:
        raise ValueError(
            f"model.vocab_size ({config.model.vocab_size}) must be at least the "
            f"tokenizer's ({needed})"
        )
    return loaded
