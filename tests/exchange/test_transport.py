"""Sources: the requests that an owner merges, in the order in which they are added."""

import numpy as np

from rowmesh.exchange.transport import Sources


def test_sources_add_up():
    sources = Sources(2)
    first, second = np.array([10, 12, 15]), np.array([0, 0, 4])
    sources.add(1000, first, 2000, np.array([2, 3]))
    sources.add(3000, second, 4000, np.array([0, 9]))
    assert sources.num_entries == 5 + 4
    assert sources.accesses.tolist() == [2, 12]

    merged = []

    class Exchange:
        gradient_bytes = 12
        merger = staticmethod(lambda *arguments: merged.append(arguments))

    sources.merge(Exchange())
    addresses = [(1000, first.ctypes.data, 2000), (3000, second.ctypes.data, 4000)]
    assert merged == [(addresses, 12, 9)]
