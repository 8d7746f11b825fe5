"""Sparse features of a batch: ids, the bags they fall into, and their weights."""

from rowmesh.sparse.batch import SparseBatch
from rowmesh.sparse.position_weights import PositionWeights
from rowmesh.sparse.split import micro_batches, take

__all__ = ["PositionWeights", "SparseBatch", "micro_batches", "take"]
