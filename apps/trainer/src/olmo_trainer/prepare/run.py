"""One preparation, from its inputs to its manifest."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from olmo_trainer.prepare.encode import TokenizerFile, encode_in_order
from olmo_trainer.prepare.inputs import InputFile, find_inputs
from olmo_trainer.prepare.readers import read_texts
from olmo_trainer.prepare.writer import PARTIAL, STATE, Position, State, TokenWriter
from olmo_trainer.text import MANIFEST, TOKENIZER, TokenManifest, Vocabulary, token_dtype

# What a worker is given at once; a longer text goes alone.
_CHUNK_CHARACTERS = 2**20
_CHUNK_TEXTS = 1024

# A text, or "" and why there is none, and up to where the inputs are read with it.
_Item = tuple[str, str, Position]


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """What decides the bytes of the token files, beside the inputs.

    Attributes:
        tokenizer: A `tokenizers` JSON file; `None` = bytes.
        end_of_document: The token after each document; `None` = the usual one of the file.
        field: The name of the text in a line of JSON or a row of Parquet.
        file_tokens: A file ends with the document that brings it to so many ids; at least 1.

    Raises:
        ValueError: `file_tokens` is below 1.
    """

    tokenizer: Path | None = None
    end_of_document: str | None = None
    field: str = "text"
    file_tokens: int = 2**28

    def __post_init__(self) -> None:
        if self.file_tokens < 1:
            raise ValueError(f"`file_tokens` must be at least 1, got {self.file_tokens}.")


def prepare(
    paths: Sequence[str | Path],
    folder: Path,
    options: PrepareOptions,
    *,
    patterns: Sequence[str] = (),
    num_workers: int = 1,
    on_read: Callable[[int, int], None] = lambda done, total: None,
    on_file: Callable[[str], None] = lambda name: None,
) -> TokenManifest:
    """Turn text into token files and a manifest, or go on where an earlier call was stopped.

    Args:
        paths: Files and folders of text, read in this order.
        folder: Where the token files go; made when missing.
        options: What decides their bytes.
        patterns: Which files of a folder are read; by default the usual suffixes.
        num_workers: Processes that tokenize, at least 1; the bytes do not depend on it.
        on_read: Called with the bytes of input read, and those there are.
        on_file: Called with the name of each token file that is whole.

    Returns:
        What `folder/manifest.json` says.

    Raises:
        ValueError: An input, an option or the folder is not as it should be, or there is no text.
            Nothing is left behind, but the whole files that came before an error within an input.
    """
    if num_workers < 1:
        raise ValueError(f"`num_workers` must be at least 1, got {num_workers}.")
    inputs = find_inputs(paths, patterns)
    file = TokenizerFile(options.tokenizer, options.end_of_document)
    vocabulary = Vocabulary.of(file.open())
    dtype = token_dtype(vocabulary.size)
    sizes = {str(each.path): each.size for each in inputs}
    # The vocabulary's name holds a hash of the tokenizer, wherever its file lies.
    words = {
        "end_of_document": options.end_of_document,
        "field": options.field,
        "file_tokens": options.file_tokens,
    }
    _require_free(folder)
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        state = State.read(
            folder, {"options": words, "inputs": sizes, "vocabulary": asdict(vocabulary)}
        )
        with _without_trace(folder, made, state):
            state.write(folder)
            if options.tokenizer is not None:
                shutil.copyfile(options.tokenizer.expanduser(), folder / TOKENIZER)
            items = _read(inputs, options.field, state.position, on_read)
            with (
                closing(encode_in_order(_chunks(items), file, num_workers)) as results,
                TokenWriter(folder, state, dtype, options.file_tokens) as writer,
            ):
                for encoded, chunk in results:
                    documents = iter(encoded)
                    for text, reason, position in chunk:
                        if not text:
                            writer.skip(reason, position)
                        elif writer.append(next(documents), position):
                            on_file(state.files[-1].name)
                writer.finish()
            if not state.files:
                left_out = ", ".join(f"{count} {reason}" for reason, count in state.skipped.items())
                raise ValueError(
                    "the inputs must hold at least one text, found none "
                    f"(left out: {left_out or 0})."
                )
        manifest = TokenManifest(
            vocabulary, dtype.name, tuple(state.files), words, sizes, state.skipped
        )
        manifest.write(folder / MANIFEST)
        (folder / STATE).unlink()
        return manifest


def _require_free(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`{folder}` must be a folder, found a file; give another.")
    if (folder / MANIFEST).exists():
        raise ValueError(
            f"`{folder}` holds finished token files, which are never overwritten; give another "
            "folder, or delete this one."
        )
    if folder.exists() and any(folder.iterdir()) and not (folder / STATE).exists():
        raise ValueError(
            f"`{folder}` must be empty or new, found other files in it; give another folder."
        )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder against a second preparation; a killed process lets go by itself."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"`{folder}` is being written by another process; wait for it, or give another."
            ) from None
        yield
    finally:
        os.close(handle)


@contextmanager
def _without_trace(folder: Path, made: Sequence[Path], state: State) -> Iterator[None]:
    """Within, wrong input that left no whole file behind leaves nothing else either.

    `made` are the folders that were not there before, the innermost first. What a killed process
    or a full disk leaves stays, so that the same command goes on.
    """
    try:
        yield
    except ValueError:
        if not state.files:
            for name in (STATE, TOKENIZER, PARTIAL):
                (folder / name).unlink(missing_ok=True)
            with suppress(OSError):  # somebody else has put something there
                for each in made:
                    each.rmdir()
        raise


def _read(
    inputs: Sequence[InputFile],
    field: str,
    after: Position,
    on_read: Callable[[int, int], None],
) -> Iterator[_Item]:
    """Yield the texts that come after a position."""
    total = sum(file.size for file in inputs)
    done = sum(file.size for file in inputs[: after.file])
    for number, file in enumerate(inputs):
        if number < after.file:
            continue
        try:
            stream = file.path.open("rb")
        except OSError as error:
            raise ValueError(f"`{file.path}` must be readable, got {error}.") from error
        with stream:
            for index, (text, reason) in enumerate(read_texts(file, stream, field), 1):
                position = Position(number, index)
                if position > after:
                    yield text, reason, position
                on_read(done + min(stream.tell(), file.size), total)
        done += file.size
        on_read(done, total)


def _chunks(items: Iterable[_Item]) -> Iterator[tuple[list[str], list[_Item]]]:
    """Gather items to what a worker is given at once: its texts, and all items as they came."""
    chunk: list[_Item] = []
    characters = 0
    for item in items:
        chunk.append(item)
        characters += len(item[0])
        if characters >= _CHUNK_CHARACTERS or len(chunk) >= _CHUNK_TEXTS:
            yield [text for text, _, _ in chunk if text], chunk
            chunk, characters = [], 0
    if chunk:
        yield [text for text, _, _ in chunk if text], chunk
