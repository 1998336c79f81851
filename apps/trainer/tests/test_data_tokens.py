"""Bytes in, the same text out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_trainer.data import ByteTokenizer

TOKENIZER = ByteTokenizer()
END = TOKENIZER.end_of_document
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=40, deadline=None)
@given(TEXT)
def test_encode_gives_the_bytes_and_decode_the_text(text: str):
    ids = TOKENIZER.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(text.encode())
    assert TOKENIZER.decode(ids) == text


@settings(max_examples=40, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=4))
def test_documents_decode_to_their_texts_with_the_separator_between(texts: list[str]):
    ids = [id for text in texts for id in [*text.encode(), END]][:-1]
    assert TOKENIZER.decode(ids) == "".join(texts)
    assert TOKENIZER.decode(torch.tensor(ids), separator="|") == "|".join(texts)


def test_no_character_is_made_from_two_documents():
    first, second = "\u00e9".encode()
    assert TOKENIZER.decode([first, second]) == "\u00e9"
    assert TOKENIZER.decode([first, END, second]) == "\ufffd\ufffd"


def test_any_ids_of_the_vocabulary_decode():
    text = TOKENIZER.decode(np.arange(TOKENIZER.vocab_size))
    assert text.startswith("".join(map(chr, range(128))) + "\ufffd")


def test_bad_ids_are_refused():
    with pytest.raises(ValueError, match=r"`ids` must be in \[0, 257\), got 3 to 257"):
        TOKENIZER.decode([3, 257])
    with pytest.raises(ValueError, match=r"`ids` must be in \[0, 257\), got -100 to 3"):
        TOKENIZER.decode([3, -100])
    with pytest.raises(TypeError, match="`ids` must be integers, got float64"):
        TOKENIZER.decode([0.5])
    with pytest.raises(ValueError, match=r"one row of tokens, got shape \(1, 2\)"):
        TOKENIZER.decode([[1, 2]])
