import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

# importlib mode puts no folder on the path, and some tests share a module of this one.
sys.path.append(str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> str:
    """Where Triton's kernels run: the GPU, or the CPU in a process of Triton's interpreter."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, or the largest integer; an operation that adds by atomics raises."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all(), "this torch does not poison fresh memory"
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def _no_host_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="session")
def no_host_sync() -> Callable[[], AbstractContextManager[None]]:
    return _no_host_sync
