"""Gradient reduction over several replica groups, sharded optimizers, one true gradient norm.

In a mixture-of-experts model different parameters have different replicas: a dense weight lives on
every data-parallel rank, an expert only on the ranks that hold the same experts. `ReplicaGroups`
says so once; the reducer, the optimizer and the norm read it.
"""

from ._adamw import ShardedAdamW as ShardedAdamW
from ._decay import decays_matrices as decays_matrices
from ._flat_shard import FlatShard as FlatShard
from ._flat_shard import Location as Location
from ._grad_norm import clip_grad_norm as clip_grad_norm
from ._grad_norm import global_grad_norm as global_grad_norm
from ._groups import ReplicaGroup as ReplicaGroup
from ._groups import ReplicaGroups as ReplicaGroups
from ._reducer import GradientReducer as GradientReducer

__all__ = [
    "FlatShard",
    "GradientReducer",
    "Location",
    "ReplicaGroup",
    "ReplicaGroups",
    "ShardedAdamW",
    "clip_grad_norm",
    "decays_matrices",
    "global_grad_norm",
]
