"""Small placement problems that comparison, explanation and report are tested on."""

import numpy as np

from rowmesh.placement import TableShape
from rowmesh.placement.profile import Profile, TableProfile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology

NAMES = ("user", "item", "<city & 'town'>")
NUM_ROWS = (3000, 500, 9)


def problem(topology: Topology | None = None, **wanted) -> Problem:
    """Three tables that are read by a power law; the last row of the first, for rare ids, is read much."""
    shapes = [TableShape(name, n, 64, 64, 4) for name, n in zip(NAMES, NUM_ROWS, strict=True)]
    counts = {
        name: (20_000 / np.arange(1, n + 1) ** 1.1).astype(np.int64) for name, n in zip(NAMES, NUM_ROWS, strict=True)
    }
    counts["user"][-1] = 5000
    counts["item"][-100:] = 0
    profile = Profile.from_counts(counts, shapes, num_samples=200_000)
    return Problem(profile, topology or Topology.uniform(4), Request(**{"batch_size": 256, **wanted}))


# Ids a bag and rows of the industry's reference task, MLPerf's DLRM-DCNv2.
BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
BAG_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)


def mlperf(send, dim=128):
    """Its tables, of ids that follow a power law, in runs whose lengths grow."""
    tables, num_samples = [], 1_000_000
    for index, (ids, num_rows) in enumerate(zip(BAGS, BAG_ROWS, strict=True)):
        edges = np.unique(np.concatenate([np.arange(min(num_rows, 64)), np.geomspace(1, num_rows, 150).astype(int)]))
        lengths = np.diff(edges, append=num_rows) if edges[-1] < num_rows else np.diff(edges)
        starts = edges[: len(lengths)]
        chances = lengths * (starts + (lengths + 1) / 2) ** -1.1
        accesses = num_samples * ids * chances / chances.sum() / lengths
        shape = TableShape(f"t{index}", num_rows, 4 * dim, 4 * dim, 4, send)
        tables.append(TableProfile(shape, lengths, accesses, num_jagged=0))
    return Profile(tuple(tables), num_samples)
