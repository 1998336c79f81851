"""The tokenizer of a run as `AutoTokenizer` of `transformers` loads it.

Text that was prepared through a `tokenizer.json` brings that file. Where the bytes of a text are
its tokens, the file written here says so: byte-level BPE without merges, whose token b is the byte
b.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from olmo_trainer.config import DataConfig, MixtureSource, TokenFilesSource
from olmo_trainer.text import MANIFEST, TOKENIZER, ByteTokenizer, TokenManifest

BYTES_END = "<|endoftext|>"


def write_tokenizer(data: DataConfig, folder: Path) -> int | None:
    """Write the tokenizer's files into `folder`; return the token that ends a document.

    Writes nothing where the configuration does not say the tokenizer (token files without a
    manifest, or whose folder is gone), and returns `None` where it does not say the token either.
    """
    source = data.source
    # All sources share one vocabulary; the first that says it names it.
    mixed = isinstance(source, MixtureSource)
    sources = [each.source for each in source.sources.values()] if mixed else [source]
    stated = None
    for each in sources:
        if not isinstance(each, TokenFilesSource):
            return _write_bytes(folder)
        stated = each.end_of_document if stated is None else stated
        for path in each.paths:
            prepared = Path(path).expanduser()
            if (prepared / MANIFEST).is_file():
                return _write_prepared(prepared, folder)
    return stated


def _write_prepared(prepared: Path, folder: Path) -> int:
    manifest = TokenManifest.read(prepared / MANIFEST)
    if manifest.vocabulary.name == ByteTokenizer.name:
        return _write_bytes(folder)
    if (prepared / TOKENIZER).is_file():
        shutil.copyfile(prepared / TOKENIZER, folder / TOKENIZER)
        _write_class(folder, manifest.options["end_of_document"])
    return manifest.vocabulary.end_of_document


def _write_bytes(folder: Path) -> int:
    end = ByteTokenizer.end_of_document
    options: dict[str, Any] = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": end,
                "content": BYTES_END,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "pre_tokenizer": {"type": "ByteLevel", **options},
        "decoder": {"type": "ByteLevel", **options},
        "model": {
            "type": "BPE",
            "vocab": {letter: byte for byte, letter in enumerate(byte_letters())},
            "merges": [],
        },
    }
    (folder / TOKENIZER).write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    _write_class(folder, BYTES_END)
    return end


def _write_class(folder: Path, end: str) -> None:
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n")


def byte_letters() -> list[str]:
    """Return the letter that byte-level BPE writes for each byte (GPT-2, `bytes_to_unicode`).

    Bytes of a visible Latin-1 letter are that letter; the others, in order, those from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]
