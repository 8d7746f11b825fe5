"""A batch that is refused anywhere decides nothing: on any number of ranks, over either transport."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from rowmesh import EmbeddingOptimizer
from rowmesh.exchange.host_group import HostGroupExchange
from rowmesh.mesh import Mesh
from tests.support.refused import KINDS, batch_of, joined, known_of, make, run, train

STEPS = 6
NAMED = {
    "range": "IdRangeError",
    "feature": "DataError",
    "room": "NoRoomError",
    "room of the last table": "NoRoomError",
    "scores": "DataError",
    "time": "DataError",
    "store": "StoreError",
    "hook": "RowmeshError",
    "fetched": "KeyError",
}
ALONE = {"range", "feature", "scores"}  # which the others learn of by a letter


@pytest.fixture(scope="module")
def expected():
    *_, found, rows, told = run(Mesh(), "auto", {}, 3, STEPS)
    return joined([found]), rows, told


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_batch_decides_nothing(kind, expected):
    errors, is_same, found, rows, told = run(Mesh(), "auto", {2: kind, 4: kind}, 3, STEPS)
    assert [error.split(":")[0] for error in errors] == 2 * [NAMED[kind]]
    assert is_same == [True, True]
    assert (joined([found]), rows, told) == expected


def test_nor_does_one_that_finds_no_memory_once_it_was_decided(monkeypatch):
    embeddings = make(Mesh(), "auto")
    optimizer = EmbeddingOptimizer(embeddings)
    train(embeddings, optimizer, batch_of(Mesh(), 3, 0))
    for name in ("place", "find_unique", "route"):
        before = known_of(embeddings)
        with monkeypatch.context() as patched:
            patched.setattr(HostGroupExchange, name, no_memory)
            with pytest.raises(MemoryError):
                embeddings(batch_of(Mesh(), 3, 1))
        assert known_of(embeddings) == before
    train(embeddings, optimizer, batch_of(Mesh(), 3, 1))
    assert known_of(embeddings)["step"] == 2


def no_memory(*_, **__):
    raise MemoryError("no room")


@pytest.mark.parametrize("transport", ["collective", "one_sided"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_several_ranks_it_decides_nothing_either(ranks, kind, transport, expected):
    check_ranks(ranks, kind, transport, 2, expected)


def check_ranks(ranks, kind, transport, world_size, expected):
    seen = ranks.run(run, transport, {2: kind, 4: kind}, 3, STEPS, world_size=world_size)
    *others, last = [[error.split(":")[0] for error in errors] for errors, *_ in seen]
    assert last == 2 * [NAMED[kind]]
    if kind == "fetched":
        assert others == (world_size - 1) * [["", ""]]
        assert seen[-1][1] == [True, True]
    else:
        assert others == (world_size - 1) * [2 * ["RefusedError" if kind in ALONE else NAMED[kind]]]
        assert all(is_same == [True, True] for _, is_same, *_ in seen)
    plain = ranks.run(run, transport, {}, 3, STEPS, world_size=world_size)
    assert [each[3] for each in seen] == [each[3] for each in plain]
    assert joined([each[2] for each in seen]) == joined([each[2] for each in plain]) == expected[0]


def test_on_four_ranks_it_decides_nothing_either(ranks, expected):
    check_ranks(ranks, "room", "one_sided", 4, expected)


REFUSALS = {
    "seed": st.integers(0, 2**16),
    "num_steps": st.integers(2, 9),
    "refused": st.dictionaries(st.integers(0, 8), st.sampled_from(KINDS), max_size=5),
}


@settings(max_examples=8, deadline=None)
@given(**REFUSALS)
def test_streams_go_on_as_if_they_had_not_been(seed, num_steps, refused):
    errors, is_same, *others = run(Mesh(), "auto", refused, seed, num_steps)
    assert all(errors)
    assert all(is_same)
    _, _, *expected = run(Mesh(), "auto", {}, seed, num_steps)
    assert others == expected


@pytest.mark.parametrize("transport", ["collective", "one_sided"])
def test_streams_on_two_ranks_go_on_as_on_one(ranks, transport):
    @settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(**REFUSALS)
    def check(seed, num_steps, refused):
        seen = ranks.run(run, transport, refused, seed, num_steps, world_size=2)
        _, _, found, *_ = run(Mesh(), "auto", {}, seed, num_steps)
        assert joined([each[2] for each in seen]) == joined([found])

    check()
