"""Copies of partitions, as the paper makes them.

Source: OPER Algorithm 1 (inference), equations (4) and (5) (training).
"""

from __future__ import annotations

import numpy as np

from rowmesh.ops.compiled import compiled


def duplicate_for_inference(
    owner: np.ndarray, read_bytes: np.ndarray, stored_bytes: np.ndarray, spare_bytes: np.ndarray, L: np.ndarray
) -> np.ndarray:
    """Algorithm 1: every rank in turn copies a partition from behind its slowest link, while one fits.

    Partitions are tried in falling order of reads per byte, which the paper leaves open; fitting exactly is fitting.

    Args:
        owner: int64 [P], where each partition is.
        read_bytes: [P], what a rank reads of each in a step.
        stored_bytes: [P].
        spare_bytes: [M], what each rank has left.
        L: [M, M], seconds a byte.

    Returns:
        paths, int64 [P, M]: from which rank each rank fetches each partition.
    """
    num_ranks = len(spare_bytes)
    paths = np.repeat(owner[:, None], num_ranks, axis=1)
    seconds = np.bincount(owner, read_bytes, num_ranks)[None, :] * L
    order = np.argsort(-read_bytes / stored_bytes, kind="stable")
    _duplicate(order, stored_bytes.astype(np.float64), read_bytes, paths, seconds, spare_bytes.astype(np.float64), L)
    return paths


def pays_in_training(
    accesses_per_batch: np.ndarray, bandwidth_ratio: float, stored_bytes: np.ndarray, spare_bytes: float
) -> np.ndarray:
    """[P], which partitions are copied to all ranks, by equations (4) and (5), the most accessed first while they fit.

    T_non-dup = 2 · f · b · (M − 1) / M · S / BW_P2P and T_dup = 2 · (M − 1) / M · S / BW_AR; a copy pays where T_dup is
    less, which is f · b > BW_P2P / BW_AR.

    Args:
        accesses_per_batch: [P], f · b of a row, on average over the partition.
        bandwidth_ratio: BW_P2P / BW_AR.
        stored_bytes: [P].
        spare_bytes: what the fullest rank has left.
    """
    order = np.argsort(-accesses_per_batch, kind="stable")
    order = order[accesses_per_batch[order] > bandwidth_ratio]
    fits = np.cumsum(stored_bytes[order]) <= spare_bytes
    copied = np.zeros(len(accesses_per_batch), bool)
    copied[order[fits]] = True
    return copied


@compiled(nogil=True)
def _duplicate(order, stored, read, paths, seconds, spare, L):
    """`cursor[g, t]`: partitions before it, in order, that g fetches from t do not fit on g, and never will again."""
    num_partitions, num_ranks = paths.shape
    cursor = np.zeros((num_ranks, num_ranks), np.int64)
    position = np.empty(num_partitions, np.int64)
    for q in range(num_partitions):
        position[order[q]] = q
    stopped = np.zeros(num_ranks, np.bool_)
    while not stopped.all():
        for g in range(num_ranks):
            if stopped[g]:
                continue
            target = _slowest(seconds, g)
            q = cursor[g, target] if target >= 0 else num_partitions
            while q < num_partitions and (paths[order[q], g] != target or stored[order[q]] > spare[g]):
                q += 1
            if target >= 0:
                cursor[g, target] = q
            if q == num_partitions:
                stopped[g] = True
                continue
            p = order[q]
            paths[p, g] = g
            seconds[g, target] -= read[p] * L[g, target]
            seconds[g, g] += read[p] * L[g, g]
            spare[g] -= stored[p]
            for i in range(num_ranks):
                old = paths[p, i]
                if i != g and L[i, g] < L[i, old]:
                    paths[p, i] = g
                    seconds[i, old] -= read[p] * L[i, old]
                    seconds[i, g] += read[p] * L[i, g]
                    cursor[i, g] = min(cursor[i, g], position[p])


@compiled(nogil=True)
def _slowest(seconds, rank):
    """The rank from which another fetches for longest, or −1 where there is none."""
    target = -1
    for j in range(seconds.shape[1]):
        if j != rank and (target < 0 or seconds[rank, j] > seconds[rank, target]):
            target = j
    return target
