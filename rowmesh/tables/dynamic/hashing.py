"""Which shard an id belongs to: a documented hash, which checkpoints and every rank agree on.

    hash(table, id) = mix(id xor seed(table))        shard = hash mod P

`seed` is the first 8 bytes, little-endian, of BLAKE2b (digest size 8) of the table's name in UTF-8; `mix` is the
finalizer of splitmix64, a bijection of 64-bit numbers. All arithmetic is modulo 2^64, on ids as unsigned numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15


def seed_of(table: str) -> int:
    """The number that makes the hash of one table differ from that of another."""
    return int.from_bytes(hashlib.blake2b(table.encode(), digest_size=8).digest(), "little")


def mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 of uint64 values."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_of(table: str, ids: np.ndarray) -> np.ndarray:
    """uint64 `[N]` of int64 ids `[N]`."""
    return mix(np.asarray(ids, np.int64).view(np.uint64) ^ np.uint64(seed_of(table)))


def shard_of(table: str, ids: np.ndarray, num_shards: int) -> np.ndarray:
    """The logical shard of each id, int64 `[N]`.

    Example:
        >>> shard_of("user", np.array([0, -1, 5]), 1).tolist()
        [0, 0, 0]
    """
    return (hash_of(table, ids) % np.uint64(num_shards)).astype(np.int64)


def sketch_columns(hashes: np.ndarray, depth: int, width: int) -> np.ndarray:
    """Where a count-min sketch counts each id: int64 `[N, depth]`, mix(hash + (row + 1) · golden ratio) mod width."""
    steps = np.arange(1, depth + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return (mix(hashes[:, None] + steps) % np.uint64(width)).astype(np.int64)
