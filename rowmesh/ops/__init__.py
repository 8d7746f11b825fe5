"""Kernels, one folder each: `reference` (plain torch, obviously right), `cpu` (Numba), room for `cuda` (Triton)."""
