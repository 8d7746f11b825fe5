"""What a rank is asked; what comes of it is tested in test_plans.py and test_equivalence.py."""

import numpy as np

from rowmesh.exchange.incoming import Incoming


def test_entries_of_all_ranks_are_counted_on():
    """The last of the two segments gets no replies."""
    incoming = Incoming(np.array([[7, 9, 10], [0, 0, 0], [2, 2, 6]]), np.zeros((3, 2), np.int64), num_replying=1)
    assert incoming.bounds.tolist() == [0, 3, 3, 7]
    assert incoming.reply_bounds.tolist() == [0, 2, 2, 2]
    assert incoming.num_entries == 7
