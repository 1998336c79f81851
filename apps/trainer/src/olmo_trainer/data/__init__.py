"""From text and token files to the batches of a run, as pure functions of a seed and a step.

    source -> two sides -> streams of tokens -> sequences -> order -> batches

Nothing here keeps a position or talks to another process. Ask for step 7 and you get the batch of
step 7: after a resume, on another number of ranks, or with another accumulation.
"""

from olmo_trainer.data.batch_warmup import BatchWarmup as BatchWarmup
from olmo_trainer.data.batches import IGNORE_INDEX as IGNORE_INDEX
from olmo_trainer.data.batches import Batch as Batch
from olmo_trainer.data.joined import JoinedDataset as JoinedDataset
from olmo_trainer.data.order import Share as Share
from olmo_trainer.data.order import TrainOrder as TrainOrder
from olmo_trainer.data.packing import PackedDataset as PackedDataset
from olmo_trainer.data.packing import split_documents as split_documents
from olmo_trainer.data.packing import token_stream as token_stream
from olmo_trainer.data.repeats import RepeatFilter as RepeatFilter
from olmo_trainer.data.train_data import Ingredient as Ingredient
from olmo_trainer.data.train_data import TrainData as TrainData
from olmo_trainer.text import ByteTokenizer as ByteTokenizer
from olmo_trainer.text import Corpus as Corpus
from olmo_trainer.text import Document as Document
from olmo_trainer.text import Source as Source
from olmo_trainer.text import StandardLibrary as StandardLibrary
from olmo_trainer.text import TextFolder as TextFolder
from olmo_trainer.text import TokenFiles as TokenFiles
from olmo_trainer.text import Tokenizer as Tokenizer

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "BatchWarmup",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "Ingredient",
    "JoinedDataset",
    "PackedDataset",
    "RepeatFilter",
    "Share",
    "Source",
    "StandardLibrary",
    "TextFolder",
    "TokenFiles",
    "Tokenizer",
    "TrainData",
    "TrainOrder",
    "split_documents",
    "token_stream",
]
