"""Small placement problems that comparison, explanation and report are tested on."""

import numpy as np

from rowmesh.placement import TableShape
from rowmesh.placement.profile import Profile
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
