"""Relay against its reference: the sort by node, and where every row is read."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from rowmesh.ops.relay import reference, sort_relay
from tests.support.memory import Poisoned

ARENA, RECEIVED, ROW_BYTES, STRIDE = 10**12, 10**9, 20, 50


@st.composite
def requests(draw):
    """Keys of every segment: a few that stop here, then relayed ones, then ones without a reply."""
    num_nodes = draw(st.integers(1, 5))
    num_direct, num_fetched, num_node, num_forwarded = (draw(st.integers(0, 2)) for _ in range(4))
    key = st.integers(0, num_nodes * STRIDE - 1)
    segments = [draw(st.lists(key, unique=True, max_size=12)) for _ in range(num_fetched + num_node + num_forwarded)]
    direct = [draw(st.lists(st.integers(0, STRIDE - 1), unique=True, max_size=5)) for _ in range(num_direct)]
    return num_nodes, draw(st.integers(0, num_nodes - 1)), direct, segments, (num_fetched, num_node)


@given(requests=requests())
def test_equals_the_reference(requests):
    num_nodes, node, direct, relayed, (num_fetched, num_node) = requests
    every = [*direct, *relayed]
    keys = torch.tensor([key for part in every for key in part], dtype=torch.int64)
    merged_offsets = torch.tensor([0, *map(len, every)]).cumsum(0)
    heads = torch.arange(100, 100 + len(keys), dtype=torch.int32)
    small = keys.to(torch.int32)
    count, first = sum(map(len, relayed)), int(merged_offsets[len(direct)])
    num_replying = len(direct) + num_fetched + num_node
    slots, sorted_heads = (Poisoned(torch.int32, count) for _ in range(2))
    offsets, replies = Poisoned(torch.int64, num_nodes, len(relayed) + 1), Poisoned(torch.int64, num_nodes + 1)
    addresses = Poisoned(torch.int64, int(merged_offsets[num_replying]))
    sort_relay(
        small.data_ptr(),
        merged_offsets.data_ptr(),
        heads.data_ptr(),
        len(direct),
        len(relayed),
        num_fetched,
        num_replying,
        num_nodes,
        node,
        STRIDE,
        ARENA,
        ROW_BYTES,
        RECEIVED,
        slots.address,
        sorted_heads.address,
        offsets.address,
        replies.address,
        addresses.address,
    )
    segment = torch.repeat_interleave(torch.arange(len(relayed)), torch.tensor([*map(len, relayed)], dtype=torch.int64))
    expected = reference.sort_relay(keys[first:], segment, len(relayed), num_nodes, STRIDE)
    assert slots.result().tolist() == expected[0].tolist()
    assert offsets.result().tolist() == expected[2].tolist()
    assert sorted_heads.result().tolist() == heads[first + expected[1]].tolist()
    where, received = addresses.result().tolist(), 0
    by_node = [0] * num_nodes
    for m in (first + expected[1]).tolist():
        number, owner, slot = int(segment[m - first]), int(keys[m]) // STRIDE, int(keys[m]) % STRIDE
        if number < num_fetched and owner != node:
            assert where[m] == RECEIVED + received * ROW_BYTES
            received += 1
            by_node[owner] += 1
        elif number < num_fetched + num_node:
            assert where[m] == ARENA + slot * ROW_BYTES
    assert replies.result().diff().tolist() == by_node
    assert where[:first] == [ARENA + int(key) * ROW_BYTES for key in keys[:first]]
    assert replies.result()[[0, -1]].tolist() == [0, received]
