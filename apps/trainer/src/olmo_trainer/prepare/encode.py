"""Texts to ids in several processes, given back in the order in which they were asked for."""

import os
import signal
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from olmo_trainer.text import ByteTokenizer, JsonTokenizer, Tokenizer, token_dtype

# Chunks that wait, a worker: enough that none idles, few enough that memory stays small.
_AHEAD = 4

Note = TypeVar("Note")


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """How a worker opens the tokenizer.

    Attributes:
        path: A `tokenizers` JSON file; `None` = bytes.
        end_of_document: The token after each document; `None` = the usual one of the file.
    """

    path: Path | None
    end_of_document: str | None

    def open(self) -> Tokenizer:
        """Open it.

        Raises:
            ValueError: The file is no tokenizer, or an end of document was named for bytes.
        """
        if self.path is not None:
            return JsonTokenizer(self.path, self.end_of_document)
        if self.end_of_document is not None:
            raise ValueError(
                f"the end of a document must be left out without a tokenizer file, got "
                f"{self.end_of_document!r}: after bytes it is the id 256."
            )
        return ByteTokenizer()


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[NDArray[np.unsignedinteger]]:
    """Return the ids of each text with the end of a document after them, in the files' dtype."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document], dtype)
    return [np.concatenate((ids.astype(dtype), end)) for ids in tokenizer.encode_all(texts)]


def encode_in_order(
    chunks: Iterable[tuple[list[str], Note]], file: TokenizerFile, num_workers: int
) -> Generator[tuple[list[NDArray[np.unsignedinteger]], Note], None, None]:
    """Yield the encoded texts of each chunk beside the note that came with it, in order.

    Args:
        chunks: Texts and whatever is to come back with their ids.
        file: The tokenizer.
        num_workers: Processes, at least 1; one is this process itself.
    """
    if num_workers == 1:
        for texts, note in chunks:
            yield _encode(file, texts), note
        return
    waiting: deque[tuple[Future[list[NDArray[np.unsignedinteger]]], Note]] = deque()
    # Not fork: the tokenizers library starts threads.
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _start)
    try:
        for texts, note in chunks:
            waiting.append((pool.submit(_encode, file, texts), note))
            if len(waiting) >= _AHEAD * num_workers:
                future, note = waiting.popleft()
                yield future.result(), note
        for future, note in waiting:
            yield future.result(), note
    finally:
        pool.shutdown(cancel_futures=True)


def _start() -> None:
    # Ctrl-C reaches every process of the terminal; the one that writes decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The processes are the parallelism: threads of each would fight over the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode(file: TokenizerFile, texts: list[str]) -> list[NDArray[np.unsignedinteger]]:
    return encode_texts(_opened(file), texts)


@lru_cache(maxsize=1)
def _opened(file: TokenizerFile) -> Tokenizer:
    return file.open()
