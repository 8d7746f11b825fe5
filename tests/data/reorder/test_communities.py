"""Communities by scikit-network, and what is said where it is missing."""

import sys

import numpy as np
import pytest

from rowmesh.data.reorder.communities import Graph, load_louvain
from rowmesh.errors import ConfigurationError


def test_cliques_are_communities():
    cliques = [np.array([[i, j] for i in range(first, first + 5) for j in range(first, i)]) for first in (0, 5, 10)]
    graph = Graph(np.concatenate([*cliques, [[4, 5]], [[9, 10]]]).astype(np.int32), num_vertices=17)
    labels = graph.communities(1.0)
    assert len(set(labels[:15])) == 3
    assert all(len(set(labels[first : first + 5])) == 1 for first in (0, 5, 10))
    assert len(set(labels)) == 5


def test_no_edges():
    assert len(set(Graph(np.empty((0, 2), np.int32), 4).communities(1.0))) == 4


def test_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "sknetwork.clustering", None)
    with pytest.raises(ConfigurationError, match=r"with scikit-network, .*; run.*: pip install '\.\[reorder\]'"):
        load_louvain()
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(ConfigurationError, match=r"with scipy, .*; run.*: pip install '\.\[reorder\]'"):
        Graph(np.empty((0, 2), np.int32), 4)
