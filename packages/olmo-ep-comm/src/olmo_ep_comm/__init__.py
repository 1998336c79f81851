"""Dispatch and combine over an expert-parallel group, by interchangeable backends."""

from ._all_to_all import AllToAllDispatcher as AllToAllDispatcher
from ._create import create_dispatcher as create_dispatcher
from ._deepep import DeepEPDispatcher as DeepEPDispatcher
from ._interface import Dispatched as Dispatched
from ._interface import Dispatcher as Dispatcher
from ._local import LocalDispatcher as LocalDispatcher
from ._pair_codec import PairCodec as PairCodec
from ._rowwise.buffer_bytes import rowwise_buffer_bytes as rowwise_buffer_bytes
from ._rowwise.dispatcher import RowwiseDispatcher as RowwiseDispatcher
from ._rowwise.virtual import VirtualRowwise as VirtualRowwise

__all__ = [
    "AllToAllDispatcher",
    "DeepEPDispatcher",
    "Dispatched",
    "Dispatcher",
    "LocalDispatcher",
    "PairCodec",
    "RowwiseDispatcher",
    "VirtualRowwise",
    "create_dispatcher",
    "rowwise_buffer_bytes",
]
