"""The message that opens a fetch or a push; what it guards is tested in test_collection.py."""

from rowmesh.exchange.handshake import describe


def test_operations_in_words():
    assert [describe(3), describe(-2)] == ["is in forward 3", "is in step 2"]
