"""The collective transport's opening message; what the transport achieves is tested in test_collection.py."""

from rowmesh.exchange.collective import _describe


def test_operations_in_words():
    assert _describe([3, -2], lambda rank: rank) == "rank 0 is in forward 3, rank 1 is in step 2"
