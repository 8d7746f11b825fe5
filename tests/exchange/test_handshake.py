"""The message that opens a fetch or a push; what it guards is tested in test_collection.py."""

from rowmesh.exchange.handshake import describe


def test_operations_in_words():
    assert describe([3, -2], lambda rank: rank) == "rank 0 is in forward 3, rank 1 is in step 2"
