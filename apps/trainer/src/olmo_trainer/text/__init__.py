"""Text and tokens as files: documents, tokenizers, memory-mapped token files. No torch in here.

    text files -> documents -> tokenizer -> token files + manifest -> memory maps

`olmo_trainer.prepare` writes token files; `olmo_trainer.data` makes sequences and batches of them.
"""

from olmo_trainer.text.json_tokenizer import JsonTokenizer as JsonTokenizer
from olmo_trainer.text.manifest import MANIFEST as MANIFEST
from olmo_trainer.text.manifest import TOKENIZER as TOKENIZER
from olmo_trainer.text.manifest import TokenManifest as TokenManifest
from olmo_trainer.text.manifest import WrittenFile as WrittenFile
from olmo_trainer.text.sources import Corpus as Corpus
from olmo_trainer.text.sources import Document as Document
from olmo_trainer.text.sources import Source as Source
from olmo_trainer.text.sources import StandardLibrary as StandardLibrary
from olmo_trainer.text.sources import TextFolder as TextFolder
from olmo_trainer.text.token_files import MappedFile as MappedFile
from olmo_trainer.text.token_files import TokenCorpus as TokenCorpus
from olmo_trainer.text.token_files import TokenFiles as TokenFiles
from olmo_trainer.text.tokens import ByteTokenizer as ByteTokenizer
from olmo_trainer.text.tokens import Tokenizer as Tokenizer
from olmo_trainer.text.tokens import Vocabulary as Vocabulary
from olmo_trainer.text.tokens import shared_vocabulary as shared_vocabulary
from olmo_trainer.text.tokens import token_dtype as token_dtype

__all__ = [
    "MANIFEST",
    "TOKENIZER",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "JsonTokenizer",
    "MappedFile",
    "Source",
    "StandardLibrary",
    "TextFolder",
    "TokenCorpus",
    "TokenFiles",
    "TokenManifest",
    "Tokenizer",
    "Vocabulary",
    "WrittenFile",
    "shared_vocabulary",
    "token_dtype",
]
