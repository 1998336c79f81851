"""Dispatch and combine over an expert-parallel group, by interchangeable backends."""

from ._all_to_all import AllToAllDispatcher as AllToAllDispatcher
from ._create import create_dispatcher as create_dispatcher
from ._interface import Dispatched as Dispatched
from ._interface import Dispatcher as Dispatcher
from ._local import LocalDispatcher as LocalDispatcher

__all__ = [
    "AllToAllDispatcher",
    "Dispatched",
    "Dispatcher",
    "LocalDispatcher",
    "create_dispatcher",
]
