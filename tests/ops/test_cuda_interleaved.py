"""Kernels whose programs meet at atomics, their programs interleaved at every access to memory."""

from __future__ import annotations

import pytest
import torch

from rowmesh.ops.segment_unique import reference
from tests.support.interleaving import interleaved
from tests.support.triton import find_device, kernels_of

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(find_device().type == "cuda", reason="a GPU interleaves by itself"),
]
cuda = kernels_of("segment_unique")


def skewed(seed, num_ids, num_rows):
    """Ids of which few are frequent."""
    uniform = torch.rand(num_ids, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (num_rows * uniform**3).long()


@pytest.mark.parametrize("seed", range(6))
def test_segment_unique(seed, monkeypatch):
    """Many programs look for cells in the same small tables."""
    monkeypatch.setattr(cuda, "_PROBES", 4)
    monkeypatch.setattr(cuda, "_BLOCK", 16)
    ids, offsets = skewed(seed, 60, 12 + seed), torch.tensor([0, 21, 21, 60])
    with interleaved(seed):
        found = cuda.segment_unique(ids, offsets)
    unique, inverse, unique_offsets, counts = reference.segment_unique(ids, offsets)
    assert found.unique[: len(unique)].tolist() == unique.tolist()
    assert found.inverse.tolist() == inverse.tolist()
    assert found.offsets.tolist() == unique_offsets.tolist()
    assert found.counts[: len(unique)].tolist() == counts.tolist()
