"""Other ways to bring samples together that share rows: both sort the samples, and cut the sorted ones into pieces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.sample_clustering_data import keys_by_feature
from rowmesh.pipeline.cutter import BatchRows

NUM_HASHES = 2
_NONE = np.uint64(2**64 - 1)


def sort_by_column(rows: BatchRows, sizes: Sequence[int]) -> Tensor:
    """Samples sorted by (the first id of) the feature by which sorting saves most rows.

    Of a row that f bags ask for, N even micro-batches would have N · (1 − (1 − 1/N)^f) on average, sorted ones
    ⌈f · N / B⌉.
    """
    columns = keys_by_feature(rows)[:, :, 0]
    savings = [_saved(np.bincount(column), len(sizes), rows.batch_size) for column in columns]
    return torch.from_numpy(np.argsort(columns[int(np.argmax(savings))], kind="stable"))


def _saved(counts: NDArray[np.int64], num_micro_batches: int, batch_size: int) -> float:
    spread = num_micro_batches * (1 - (1 - 1 / num_micro_batches) ** counts)
    return float((spread - np.ceil(counts * num_micro_batches / batch_size)).sum())


def minhash(rows: BatchRows, sizes: Sequence[int]) -> Tensor:
    """Samples sorted by MinHash signatures: samples with equal ones are likely to share many rows.

    Rows that one id asks for, or more than two micro-batches can hold, say nothing about which samples belong together.
    """
    counts = rows.counts.numpy()
    counted = (counts >= 2) & (counts <= 2 * rows.batch_size // len(sizes))
    keys = keys_by_feature(rows)
    signatures = [np.where(counted, _hash(len(counts), n), _NONE)[keys].min((0, 2)) for n in range(NUM_HASHES)]
    return torch.from_numpy(np.lexsort(signatures[::-1]))


def _hash(count: int, number: int) -> NDArray[np.uint64]:
    """A hash of 0 … count − 1, the finalizer of SplitMix64."""
    x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        number * 0xBF58476D1CE4E5B9 % 2**64
    )
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
