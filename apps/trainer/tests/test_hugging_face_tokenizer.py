"""The tokenizer that an export brings along."""

import json
from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_trainer.config import DataConfig
from olmo_trainer.hugging_face.tokenizer_files import write_tokenizer
from olmo_trainer.recipes import nano
from olmo_trainer.text import TokenManifest, Vocabulary


@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_bytes_are_the_tokens_of_the_exported_tokenizer(byte_tokenizer, text):
    ids = list(text.encode())
    assert byte_tokenizer(text)["input_ids"] == ids
    assert byte_tokenizer.decode(ids) == text


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    assert write_tokenizer(nano().data, folder) == 256
    tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token_id, len(tokenizer)) == (256, 257)
    return tokenizer


def test_prepared_text_brings_its_tokenizer(tmp_path):
    prepared, folder = tmp_path / "prepared", tmp_path / "export"
    prepared.mkdir()
    folder.mkdir()
    (prepared / "tokenizer.json").write_text("as it is")
    tokens = TokenManifest(
        vocabulary=Vocabulary("tokenizers 0", 61, 7),
        dtype="uint16",
        files=(),
        options={"end_of_document": "</s>"},
        inputs={},
        skipped={},
    )
    tokens.write(prepared / "manifest.json")
    source = {"kind": "token_files", "paths": [str(tmp_path / "raw"), str(prepared)]}
    assert write_tokenizer(DataConfig.model_validate({"source": source}), folder) == 7
    assert (folder / "tokenizer.json").read_text() == "as it is"
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "</s>"
    raw = source | {"paths": [str(tmp_path / "raw")], "end_of_document": 5}
    other = tmp_path / "other"
    other.mkdir()
    assert write_tokenizer(DataConfig.model_validate({"source": raw}), other) == 5
    mixture = {"kind": "mixture", "sources": {"a": {"source": raw}, "b": {"source": source}}}
    assert write_tokenizer(DataConfig.model_validate({"source": mixture}), other) == 7
    assert (other / "tokenizer.json").exists()
