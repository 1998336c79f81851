"""Gradient reduction over several replica groups, sharded optimizers, one true gradient norm.

In a mixture-of-experts model different parameters have different replicas: a dense weight lives on
every data-parallel rank, an expert only on the ranks that hold the same experts. `ReplicaGroups`
says so once; the reducer, the optimizers and the norm read it.
"""

from ._adamw import ShardedAdamW as ShardedAdamW
from ._decay import DecayPolicy as DecayPolicy
from ._decay import decays_matrices as decays_matrices
from ._flat_shard import FlatShard as FlatShard
from ._flat_shard import Location as Location
from ._grad_norm import clip_factor as clip_factor
from ._grad_norm import clip_grad_norm as clip_grad_norm
from ._grad_norm import global_grad_norm as global_grad_norm
from ._groups import ReplicaGroup as ReplicaGroup
from ._groups import ReplicaGroups as ReplicaGroups
from ._guard import StepGuard as StepGuard
from ._memory import MemoryReport as MemoryReport
from ._memory import memory_report as memory_report
from ._muon import ShardedMuon as ShardedMuon
from ._parameter_kinds import is_hidden_matrix as is_hidden_matrix
from ._reducer import GradientReducer as GradientReducer

__all__ = [
    "DecayPolicy",
    "FlatShard",
    "GradientReducer",
    "Location",
    "MemoryReport",
    "ReplicaGroup",
    "ReplicaGroups",
    "ShardedAdamW",
    "ShardedMuon",
    "StepGuard",
    "clip_factor",
    "clip_grad_norm",
    "decays_matrices",
    "global_grad_norm",
    "is_hidden_matrix",
    "memory_report",
]
