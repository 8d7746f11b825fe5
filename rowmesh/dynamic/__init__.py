"""Dynamic tables: any 64-bit id, bounded memory, the same decisions for any number of ranks."""

from rowmesh.dynamic.hashing import shard_of
from rowmesh.dynamic.hooks import DecisionHook, Decisions
from rowmesh.dynamic.shards import DynamicShards
from rowmesh.dynamic.state import Opened, ShardState, Statistics

__all__ = ["DecisionHook", "Decisions", "DynamicShards", "Opened", "ShardState", "Statistics", "shard_of"]
