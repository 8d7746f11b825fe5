"""Communities: groups of vertices with many edges inside and few between, by modularity."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmesh._support import extras


def load_louvain() -> Any:
    """scikit-network's Louvain.

    Raises:
        ConfigurationError: scikit-network is not installed.
    """
    return extras.load("sknetwork.clustering", "reorder", "reordering finds communities").Louvain


class Graph:
    """Undirected edges between vertices, some of which have none.

    Args:
        edges: int32 `[E, 2]`; one that is there several times weighs more.
        num_vertices: vertices are 0 … num_vertices − 1.

    Example:
        >>> graph = Graph(np.array([[0, 1], [1, 4], [2, 5]], np.int32), num_vertices=6)
        >>> labels = graph.communities(resolution=1.0).tolist()
        >>> len(set(labels)), labels[0] == labels[1] == labels[4], labels[2] == labels[5]
        (3, True, True)
    """

    def __init__(self, edges: NDArray[np.int32], num_vertices: int) -> None:
        self.num_vertices = num_vertices
        is_linked = np.zeros(num_vertices, bool)
        is_linked[edges] = True
        self._linked = np.flatnonzero(is_linked)
        number = (is_linked.cumsum(dtype=np.int32) - 1)[edges]
        size = len(self._linked)
        weights = np.ones(len(edges), np.float32)
        sparse = extras.load("scipy.sparse", "reorder", "reordering makes graphs")
        half = sparse.coo_matrix((weights, (number[:, 0], number[:, 1])), (size, size)).tocsr()
        self._adjacency = (half + half.T).tocsr()

    def communities(self, resolution: float) -> NDArray[np.int64]:
        """The community of each vertex, `[num_vertices]`; a vertex without edges is one by itself.

        Args:
            resolution: γ; the larger, the smaller the communities.

        Source: Blondel et al., "Fast unfolding of communities in large networks", 2008.
        """
        labels = np.arange(self.num_vertices, dtype=np.int64) + len(self._linked)
        if len(self._linked):
            louvain = load_louvain()(resolution=resolution, shuffle_nodes=False)
            labels[self._linked] = louvain.fit_predict(self._adjacency)
        return labels
