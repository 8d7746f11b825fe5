"""What batches decided is taken back: tables are then as if these had never been opened, and go on as if so."""

from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from rowmesh import EmbeddingOptimizer
from rowmesh.errors import NoRoomError
from rowmesh.exchange.resolve.pins import BatchPin
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from tests.exchange.resolve.test_resolver import RULES
from tests.support.dynamic import Stream, make
from tests.support.dynamic_streams import streams
from tests.support.shards import shard_of
from tests.tables.dynamic.test_demoted import RULES as DEMOTING

MOST_AHEAD = 3
STREAMS = streams(RULES | {f"demoting, {name}": rules for name, rules in DEMOTING.items()})


def saved(embeddings, stream):
    """All that a checkpoint has of the dynamic tables, and what they have counted."""
    found = {name: vars(counters).copy() for name, counters in embeddings.dynamic_counters.items()}
    for name, _ in stream.rules:
        shard = shard_of(embeddings, name, "held")
        found |= {(name, kind): array.tolist() for kind, array in shard.arrays}
        for number, piece in enumerate(piece for pieces in shard.pieces.values() for piece in pieces):
            tensors = {"values": piece.values, **piece.state}
            found |= {(name, number, kind): tensor.tolist() for kind, tensor in tensors.items()}
    return found


def train(
    mesh: Mesh, stream: Stream, aheads: list[int], every: int, late: int, replicas: int = 1
) -> tuple[list[dict], list[tuple]]:
    """What is saved after every so many steps, before which so many batches are opened ahead and taken back.

    Batches end so many steps after their own. Returns also what hooks were told.
    """
    embeddings, states, told = make(mesh, stream, replicas=replicas), [], []
    for name, _ in stream.rules:
        embeddings.register_decision_hook(name, lambda each: told.append((each.table, each.step, each.ids.tolist())))
    optimizer, resolver = EmbeddingOptimizer(embeddings), embeddings.engine.resolver
    assert resolver is not None
    held = deque[BatchPin]()
    for step, ahead in zip(range(stream.num_steps), aheads, strict=False):
        held.append(resolver.pins.begin())
        batches = [stream.batch(step + k, mesh.rank, is_dynamic=True) for k in range(ahead)]
        opened = [embeddings.engine.make_route(batch, is_ahead=True) for batch in batches]
        assert resolver.can_undo
        resolver.go_back(step)
        del opened
        (embeddings(stream.batch(step, mesh.rank, is_dynamic=True)).values ** 2).sum().backward()
        optimizer.step()
        if len(held) > late:
            held.popleft().end()
        if step % every == 0:  # which flushes what is demoted
            states.append(saved(embeddings, stream))
    states.append(saved(embeddings, stream))
    embeddings.close()
    return states, told


@settings(max_examples=12, deadline=None)
@given(
    stream=STREAMS,
    aheads=st.lists(st.integers(0, MOST_AHEAD), min_size=8, max_size=8),
    every=st.integers(1, 9),
    late=st.integers(0, 2),
)
def test_what_batches_decided_is_taken_back(stream, aheads, every, late):
    try:
        expected, seen = (train(Mesh(), stream, each, every, late) for each in ([0] * len(aheads), aheads))
    except NoRoomError:
        assume(False)
    else:
        assert seen == expected


AVERAGED = [
    (("user", RULES["both"]), ("item", RULES["sketch"])),
    (("user", DEMOTING["forgetting"]), ("item", DEMOTING["ttl too"])),
]


@pytest.mark.parametrize("rules", AVERAGED)
@pytest.mark.parametrize("every", [1, 3])
def test_averages_go_on_as_if_it_had_not_been(ranks, rules, every):
    stream = Stream(rules, num_steps=8, synchronization=Synchronization("average", every=every))
    expected = ranks.run(train, stream, [0] * 8, 9, 1, 2, world_size=2)
    assert ranks.run(train, stream, [2, 1, 3, 0, 1, 2, 1, 2], 9, 1, 2, world_size=2) == expected
