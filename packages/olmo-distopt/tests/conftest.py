import sys
from pathlib import Path

import pytest
import torch
from olmo_distopt import ReplicaGroups
from torch import nn

# importlib mode puts no folder on the path.
sys.path.append(str(Path(__file__).parent))
from rank_threads import threads as threads

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """Fresh memory holds NaN, so that a result that reads it cannot pass."""
    empty = torch.empty

    def poisoned(*size, **options):
        tensor = empty(*size, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-77)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def alone():
    """Replica groups of a single process."""
    return ReplicaGroups({"alone": None}, lambda name, parameter: "alone")


@pytest.fixture
def parameter():
    """Make a parameter from values."""

    def make(values, dtype=torch.float32):
        return nn.Parameter(torch.as_tensor(values, dtype=dtype))

    return make
