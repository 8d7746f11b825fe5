"""Memory, look-up workload and communication of a placement that is given row by row as path matrices.

This is the paper's model, as printed. A plan of rowmesh moves rows by rules of its own (two hops, deduplication, copies
kept equal), which `rowmesh.placement.cost` follows; these equations judge the paper's strategy by the paper's measure.

Path matrices `P` are [N, M, M]: P[k, i, j] = 1 where rank i fetches embedding (or partition) k from rank j.

Source: OPER §3.2, equations (1) to (3). Differs: equation (3) prints L[j][j]; §3.2 defines L[i][j] as the cost of
rank i fetching from rank j and Algorithm 1 uses it so, hence L[i][j] here.
"""

from __future__ import annotations

import numpy as np


def path_matrices(paths: np.ndarray) -> np.ndarray:
    """P [N, M, M] of paths [N, M], where paths[k, i] is the rank from which rank i fetches k.

    Example:
        >>> path_matrices(np.array([[1, 1]])).tolist()
        [[[0, 1], [0, 1]]]
    """
    return (paths[:, :, None] == np.arange(paths.shape[1])).astype(np.int64)


def memory(P: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Equation (1): M_j = Σ_k S_k · H(Σ_i P_k[i][j]), H the step function: what rank j stores, [M]."""
    return sizes @ (P.sum(axis=1) > 0)


def lookup_workload(P: np.ndarray, sizes: np.ndarray, accesses: np.ndarray, L: np.ndarray) -> np.ndarray:
    """Equation (2): E_j = Σ_k (S_k · A_k · Σ_i P_k[i][j]) · L[j][j]: what rank j looks up for all ranks, [M]."""
    return (sizes * accesses) @ P.sum(axis=1) * np.diag(L)


def communication(P: np.ndarray, sizes: np.ndarray, accesses: np.ndarray, L: np.ndarray) -> np.ndarray:
    """Equation (3): C_ij = Σ_k (S_k · A_k · P_k[i][j]) · L[i][j]: what rank i fetches from rank j, [M, M]."""
    return np.einsum("k,kij->ij", sizes * accesses, P) * L


def evaluate(
    paths: np.ndarray, stored_bytes: np.ndarray, read_bytes: np.ndarray, L: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(1), (2) and (3) for partitions, whose rows differ in accesses: M [M], E [M] and C [M, M].

    Args:
        paths: int [N, M], from which rank each rank fetches each partition.
        stored_bytes: [N], Σ S over the rows of each partition.
        read_bytes: [N], Σ S · A over the rows of each partition.
        L: [M, M], the cost of a byte.
    """
    num_ranks = paths.shape[1]
    moved = np.empty((num_ranks, num_ranks))
    holds = np.zeros((len(paths), num_ranks), np.bool_)
    for i in range(num_ranks):  # the matrices of all partitions would be gigabytes on many ranks
        moved[i] = np.bincount(paths[:, i], read_bytes, num_ranks)
        holds[np.arange(len(paths)), paths[:, i]] = True
    stored = stored_bytes @ holds
    return stored, moved.sum(axis=0) * np.diag(L), moved * L
