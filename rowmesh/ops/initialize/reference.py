"""Initial values in NumPy: SplitMix64 (Steele, Lea, Flood, OOPSLA'14), one 64-bit output an element."""

from __future__ import annotations

import numpy as np


def bits(key: int, rows: np.ndarray, dim: int) -> np.ndarray:
    """uint64 `[n, D]`: output number r·D + e of the stream of `key`."""
    counter = rows.astype(np.uint64)[:, None] * np.uint64(dim) + np.arange(dim, dtype=np.uint64)
    z = np.uint64(key) + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def values(key: int, rows: np.ndarray, dim: int, distribution: str, a: float, b: float) -> np.ndarray:
    """float64 `[n, D]`: uniform in [a, b), normal with mean a and deviation b (Box–Muller), or constant a."""
    if distribution == "constant":
        return np.full((len(rows), dim), a)
    z = bits(key, rows, dim)
    if distribution == "uniform":
        return a + (b - a) * ((z >> np.uint64(11)).astype(np.float64) * 2.0**-53)
    u = ((z >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    v = (z & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
    return a + b * np.sqrt(-2.0 * np.log(u)) * np.cos(2.0 * np.pi * v)
