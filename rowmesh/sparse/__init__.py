"""Sparse features of a batch: ids and the bags they fall into."""

from rowmesh.sparse.batch import SparseBatch

__all__ = ["SparseBatch"]
