"""From files of text to the batches of a run, as pure functions of a seed and a step.

    source -> documents -> split -> token stream -> sequences -> order -> batches

Nothing here keeps a position or talks to another process. Ask for step 7 and you get the batch of
step 7: after a resume, on another number of ranks, or with another accumulation.
"""

from olmo_trainer.data.batches import IGNORE_INDEX as IGNORE_INDEX
from olmo_trainer.data.batches import Batch as Batch
from olmo_trainer.data.batches import TrainData as TrainData
from olmo_trainer.data.order import TrainOrder as TrainOrder
from olmo_trainer.data.packing import PackedDataset as PackedDataset
from olmo_trainer.data.packing import split_documents as split_documents
from olmo_trainer.data.packing import token_stream as token_stream
from olmo_trainer.data.sources import Corpus as Corpus
from olmo_trainer.data.sources import Document as Document
from olmo_trainer.data.sources import Source as Source
from olmo_trainer.data.sources import StandardLibrary as StandardLibrary
from olmo_trainer.data.sources import TextFolder as TextFolder
from olmo_trainer.data.tokens import ByteTokenizer as ByteTokenizer
from olmo_trainer.data.tokens import Tokenizer as Tokenizer

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "PackedDataset",
    "Source",
    "StandardLibrary",
    "TextFolder",
    "Tokenizer",
    "TrainData",
    "TrainOrder",
    "split_documents",
    "token_stream",
]
