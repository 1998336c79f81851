"""A source to the sequences of its two sides, train and held out.

Text: documents are held out by a hash of their name, and those of a side are shuffled and joined to
one stream (`packing.py`). Token files: each is a stream already; its last documents are held out
(`heldout_tail.py`), and only whole sequences are shuffled, by the order of training.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from olmo_trainer.data.heldout_tail import heldout_border
from olmo_trainer.data.packing import PackedDataset, split_documents, token_stream
from olmo_trainer.text import Source, TokenFiles, Tokenizer, Vocabulary


@dataclass(frozen=True, slots=True)
class Cut:
    """How sources are cut into sequences and sides.

    Attributes:
        sequence_length: S, predictions in a sequence, at least 1.
        heldout_fraction: Of the documents of text, of the tokens of a token file; in (0, 1).
        seed: The seed of the run.
    """

    sequence_length: int
    heldout_fraction: float
    seed: int


@dataclass(frozen=True, slots=True)
class Part:
    """A source, opened and cut.

    Attributes:
        name: In the mixture; empty for a sole source.
        train: Streams to train on, at least one.
        heldout: Streams held out, at least one.
        vocabulary: Whose ids they hold.
        num_documents: On both sides; `None` when nothing says it.
        skipped: What the source left out: its id -> the reason.
    """

    name: str
    train: tuple[PackedDataset, ...]
    heldout: tuple[PackedDataset, ...]
    vocabulary: Vocabulary
    num_documents: int | None
    skipped: Mapping[str, str]

    @property
    def num_sequences(self) -> int:
        """Sequences to train on."""
        return sum(map(len, self.train))


def cut_text(name: str, source: Source, tokenizer: Tokenizer, cut: Cut) -> Part:
    """Read text, hold documents out and pack both sides.

    Raises:
        ValueError: The source has no text or too few documents, or a number is out of range.
    """
    corpus = source.read()
    sides = split_documents(corpus.documents, seed=cut.seed, heldout_fraction=cut.heldout_fraction)
    train, heldout = (
        PackedDataset(
            token_stream(documents, tokenizer, seed=cut.seed),
            cut.sequence_length,
            tokenizer.end_of_document,
        )
        for documents in sides
    )
    vocabulary = Vocabulary.of(tokenizer)
    return Part(name, (train,), (heldout,), vocabulary, len(corpus.documents), corpus.skipped)


def cut_token_files(name: str, source: TokenFiles, cut: Cut) -> Part:
    """Open token files and hold the last documents of each out.

    The first token of a file is read and not predicted: nothing stands before it.

    Raises:
        ValueError: A file is not as it should be, a number is out of range, or nothing is left on
            a side.
    """
    if not 0 < cut.heldout_fraction < 1:
        raise ValueError(f"`heldout_fraction` must be between 0 and 1, got {cut.heldout_fraction}.")
    corpus = source.open()
    train: list[PackedDataset] = []
    heldout: list[PackedDataset] = []
    end = corpus.vocabulary.end_of_document
    for file in corpus.files:
        border = heldout_border(file.tokens, end, cut.heldout_fraction)
        # The held-out side begins with the end before it: its first token is predicted too.
        sides = (
            (train, slice(0, border)),
            (heldout, slice((border or len(file.tokens)) - 1, None)),
        )
        for side, part in sides:
            tokens = file.tokens[part]
            if len(tokens) >= 2:
                digest = f"{file.digest} {border}"
                side.append(PackedDataset(tokens, cut.sequence_length, end, digest))
    if not train or not heldout:
        raise ValueError(
            f"the token files of `{corpus.files[0].path.parent}` must hold documents to train on "
            "and, in the second half of a file, some to hold out, found none to "
            f"{'hold out' if train else 'train on'}; give more or longer files."
        )
    return Part(name, tuple(train), tuple(heldout), corpus.vocabulary, corpus.num_documents, {})
