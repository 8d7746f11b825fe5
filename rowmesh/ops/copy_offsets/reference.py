"""The same in plain torch."""

from __future__ import annotations

from torch import Tensor


def copy_offsets(source: Tensor, num_ids: int, out: Tensor) -> bool:
    """Copies int64 `[n]`; returns whether they run from 0 to `num_ids` and never decrease."""
    out.copy_(source)
    return int(out[0]) == 0 and int(out[-1]) == num_ids and not bool((out[1:] < out[:-1]).any())
