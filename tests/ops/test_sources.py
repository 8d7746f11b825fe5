"""Sources: the requests that a rank merges, in the order in which they are added."""

import numpy as np

from rowmesh.ops.merge_update.sources import Sources


def test_sources_add_up():
    merged = []
    sources = Sources(lambda *arguments: merged.append(arguments), gradient_bytes=12, num_segments=2)
    first, second = np.array([10, 12, 15]), np.array([0, 0, 4])
    sources.add(1000, first, 2000, np.array([2, 3]))
    sources.end_node()
    sources.add(3000, second, 4000, np.array([0, 9]))
    sources.end_node()
    assert sources.num_entries == 5 + 4
    assert sources.accesses.tolist() == [2, 12]
    sources.merge()
    addresses = [(1000, first.ctypes.data, 2000), (3000, second.ctypes.data, 4000)]
    assert merged == [(addresses, 12, 9, [5, 9])]


def test_copies_are_read_from_what_goes_to_others():
    """Of requests to other owners, those about rows with a copy here; what comes to this rank is added by itself."""
    sources = Sources(lambda *_: None, gradient_bytes=12, num_segments=2)
    sources.add_copied(1000, np.array([[0, 3, 5], [5, 6, 7], [7, 9, 9]]), 2000, first=1, rank=1)
    assert sources.num_entries == 2
    assert sources.accesses.tolist() == [0, 0]
