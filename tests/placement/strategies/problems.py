"""Problems to place: random ones, and power laws."""

import numpy as np
from hypothesis import strategies as st

from rowmesh.placement import TableShape
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.topology import Topology


@st.composite
def small(draw, sorted_counts=None, **fixed):
    """Few rows of any counts, any ranks, any request: (profile, topology, request)."""
    shapes, counts = [], {}
    for index in range(draw(st.integers(1, 4))):
        num_rows = draw(st.integers(1, 60))
        value, gradient = draw(st.sampled_from([(8, 8), (64, 64), (32, 64)]))
        shapes.append(TableShape(f"t{index}", num_rows, value, gradient, draw(st.sampled_from([0, 4]))))
        of_rows = draw(st.lists(st.integers(0, 50), min_size=num_rows, max_size=num_rows))
        falls = draw(st.booleans()) if sorted_counts is None else sorted_counts
        counts[shapes[-1].name] = sorted(of_rows)[::-1] if falls else of_rows
    # Bags hold several ids where a table was read more often than there are samples.
    profile = Profile.from_counts(counts, shapes, num_samples=draw(st.sampled_from([20, 1000])))
    topology = Topology.grouped(draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.sampled_from([1.0, 4.21])))
    fields = {
        "batch_size": draw(st.integers(1, 50)),
        "mode": draw(st.sampled_from(["train", "infer"])),
        "deduplicated": draw(st.booleans()),
        "extra_memory": draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 5.0])),
        "objective": draw(st.sampled_from(["total", "slowest_link"])),
        "max_hops": draw(st.sampled_from([1, 2])),
        "fetch_weight": draw(st.sampled_from([1.0, 3.0])),
    }
    return profile, topology, Request(**fields | fixed)


def power_law(sizes=(200_000, 50_000, 3_000, 100, 7), exponent=1.1, samples=2_000_000, dims=(16,), seed=0):
    """Tables whose counts fall as rank^−exponent, with the noise of a finite sample."""
    rng = np.random.default_rng(seed)
    shapes, counts = [], {}
    for index, num_rows in enumerate(sizes):
        weight = np.arange(1, num_rows + 1) ** -(exponent + 0.03 * (index % 3))
        dim = dims[index % len(dims)]
        shapes.append(TableShape(f"t{index}", num_rows, 4 * dim, 4 * dim, 4))
        counts[f"t{index}"] = np.sort(rng.poisson(samples * weight / weight.sum()))[::-1]
    return Profile.from_counts(counts, shapes, int(max(values.sum() for values in counts.values())))
