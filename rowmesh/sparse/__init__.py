"""Sparse features of a batch: ids and the bags they fall into."""

from rowmesh.sparse.batch import SparseBatch
from rowmesh.sparse.split import micro_batches, take

__all__ = ["SparseBatch", "micro_batches", "take"]
