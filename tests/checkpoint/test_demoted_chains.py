"""Increments of tables that demote ids: what came to the store since the parent, and what left it."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, checkpoint
from rowmesh.checkpoint import CheckpointError, read_manifest
from rowmesh.checkpoint.changes import ChangedSlots
from rowmesh.checkpoint.compact import compact
from rowmesh.checkpoint.rows import SavedKnown
from rowmesh.checkpoint.series import Series, verify
from rowmesh.errors import StoreError
from rowmesh.mesh import Mesh
from rowmesh.tables import Dynamic
from rowmesh.tables.dynamic.demoted import Demoted
from rowmesh.tables.dynamic.owned import OwnedTable
from rowmesh.tables.dynamic.record_layout import RecordLayout
from rowmesh.tables.dynamic.stored_changes import Touched
from tests.checkpoint.test_chain import changed_manifest
from tests.checkpoint.test_known_chains import EVENTS, NO_SHRINK, Few, read_both, state_of, write_chain
from tests.support.dynamic_streams import streams
from tests.support.shards import shard_of
from tests.support.slowed import sums_of
from tests.tables.dynamic.test_demoted import RULES as DEMOTED
from tests.tables.dynamic.test_records import RULES, in_store

STORE = {"mode": "demote", "store": "memory"}
RULES = {name: rules for name, rules in {**DEMOTED, **RULES}.items() if rules.mode == "demote"}
STREAMS = streams(RULES, num_steps=st.just(20))


def check_chain(ranks, folder, stream, events, written_by, read_by):
    """Random streams: any chain is what a full checkpoint of the same step is, on other ranks, in another store."""
    events = [*events, "step", "step", "increment"]
    elsewhere = in_store(stream, f"file:{folder / 'records'}")
    if written_by == 1:
        steps = write_chain(Mesh(), folder, stream, events)
    else:
        steps = ranks.run(write_chain, folder, stream, events, world_size=written_by)[0]
    if read_by == 1:
        read_both(Mesh(), folder, elsewhere, steps)
    else:
        ranks.run(read_both, folder, elsewhere, steps, world_size=read_by)
    found, expected = Series(folder / "found"), Series(folder / "expected")
    for step in steps[1::2]:
        compact(found.at(step))
        verify(found.at(step))
        if written_by == 1:  # as it is compacted
            assert sums_of(found.at(step)) == sums_of(expected.at(step))
    read_both(Mesh(), folder, stream, steps)  # increments of what was compacted too


@settings(max_examples=4, deadline=None, phases=NO_SHRINK)
@given(stream=STREAMS, events=st.lists(st.sampled_from(EVENTS), min_size=3, max_size=8))
def test_a_chain_is_read_as_a_full_one(tmp_path_factory, stream, events):
    check_chain(None, tmp_path_factory.mktemp("chains"), stream, events, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("written_by, read_by", [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_a_chain_is_read_on_other_ranks(ranks, tmp_path_factory, written_by, read_by):
    @settings(max_examples=12, deadline=None, phases=NO_SHRINK)
    @given(stream=STREAMS, events=st.lists(st.sampled_from(EVENTS), min_size=3, max_size=12))
    def check(stream, events):
        check_chain(ranks, tmp_path_factory.mktemp("chains"), stream, events, written_by, read_by)

    check()


# One table of two ids, of which the store has two others where it has a limit


def spec(**rules):
    return Few.spec(dynamic=Dynamic(**{"capacity": 2, "shards": 1, **STORE, **rules}))


@pytest.fixture
def few(tmp_path):
    return Few(tmp_path, dynamic=spec().dynamic)


def numbers_of(series):
    """Of each checkpoint: ids that were seen and that are gone, records that came and that left."""
    found = []
    for step in series.steps():
        (part,) = read_manifest(series.at(step)).tables["user"].known.parts
        found.append((part.num_ids, part.num_removed, part.num_demoted, part.num_demoted_removed))
    return found


def read(folder, table):
    embeddings = EmbeddingCollection([table])
    checkpoint.load(folder, embeddings)
    return state_of(embeddings)


def test_ids_that_come_and_go_between_two_checkpoints(few):
    wanders = [(3,), (4, 1), (2, 3, 1), (1, 2, 1, 2, 3), ()]
    few.see(1, 2)
    few.chains.write(1, "full")
    for number, ids in enumerate(wanders, start=2):
        few.see(*ids)
        few.chains.write(number, "increment")
    assert numbers_of(few.chains.found) == [
        (2, 0, 0, 0),
        (1, 1, 1, 0),  # 2, 3 | 1
        (2, 2, 2, 1),  # 4, 1 | 2, 3: 1 has come back
        (2, 1, 2, 1),  # 3, 1 | 4, 2: 2 has come back, and left anew
        (2, 1, 1, 1),  # 2, 3 | 4, 1: 3 had left between, and is where it was
        (0, 0, 0, 0),
    ]
    for step in few.chains.found.steps():
        found, expected = (read(each.at(step), spec()) for each in (few.chains.found, few.chains.expected))
        assert found == expected
    for step in few.chains.found.steps()[1:]:
        assert compact(few.chains.found.at(step))
        assert sums_of(few.chains.found.at(step)) == sums_of(few.chains.expected.at(step))


def test_who_is_forgotten_is_a_tombstone_and_the_order_stays(tmp_path):
    table = spec(store_capacity=3)
    few = Few(tmp_path, dynamic=table.dynamic)
    few.see(9, 3, 7, 1, 5)
    few.chains.write(1, "full")  # 1, 5 | 9, 3, 7
    few.see(9)
    few.chains.write(2, "increment")  # 5, 9 | 3, 7, 1
    few.see(3, 7, 8)
    few.chains.write(3, "increment")  # 7, 8 | 5, 9, 3: 1 is forgotten
    few.see(2)
    few.chains.write(4, "increment")  # 8, 2 | 9, 3, 7: 5 is forgotten
    assert numbers_of(few.chains.found) == [(2, 0, 3, 0), (1, 1, 1, 1), (2, 2, 3, 2), (1, 1, 1, 1)]
    manifest = read_manifest(few.chains.found.at(4))
    ids = np.concatenate([ids for ids, *_ in SavedKnown(few.chains.found.at(4), manifest, "user").read(2)])
    assert ids.tolist() == [2, 8, 9, 3, 7]
    other = Few(tmp_path / "other", dynamic=table.dynamic)
    checkpoint.load(few.chains.found.at(4), other.embeddings)
    assert state_of(other.embeddings) == state_of(few.embeddings)
    for each in (few, other):
        each._seen = 10
        each.see(4, 7, 6)  # 7, 6 | 2, 8, 4: who is forgotten next, and comes back
    assert state_of(other.embeddings) == state_of(few.embeddings)


def test_records_that_steps_write_over_are_those_of_the_moment(few):
    few.see(1, 2)
    few.chains.write(1, "full")
    few.see(3, 4)
    few.step = lambda: few.see(1, 2, 5, 6)  # 1 and 2 come back, are updated, and go again
    few.chains.write(2, "background")
    few.chains.write(3, "increment")
    for step in few.chains.found.steps():
        assert read(few.chains.found.at(step), spec()) == read(few.chains.expected.at(step), spec())


def test_records_that_were_read_are_counted(few, tmp_path):
    few.see(1, 2, 3, 4, 5)
    few.chains.write(1, "full")
    other = Few(tmp_path / "other", dynamic=spec().dynamic)
    checkpoint.load(few.chains.found.at(1), other.embeddings)
    other._seen = 10
    other.chains.write(1, "full")
    other.see(1, 6)
    other.chains.write(2, "increment")
    assert read(other.chains.found.at(2), spec()) == read(other.chains.expected.at(2), spec())


@pytest.fixture
def series(few):
    few.see(1, 2, 3, 4)
    few.chains.write(1, "full")
    few.see(1, 5)
    few.chains.write(2, "increment")
    return few.chains.found


def test_without_tombstones_a_chain_is_refused(few, monkeypatch):
    touched = Demoted.touched

    def blind(self, since):
        put, gone, num_stored = touched(self, since)
        return Touched(put, [ids[:0] for ids in gone], num_stored)

    monkeypatch.setattr(Demoted, "touched", blind)
    few.see(1, 2, 3, 4)
    few.chains.write(1, "full")
    few.see(1)
    few.chains.write(2, "increment")
    with pytest.raises(
        CheckpointError, match=r"'user': shard 0 had demoted 2 ids, and a chain of 2 checkpoints gives 3"
    ):
        read(few.chains.found.at(2), spec())


def test_an_id_that_is_in_two_places_is_refused(series):
    path = series.at(2) / read_manifest(series.at(2)).folder / "user.0.demoted_removed.npy"
    assert np.load(path).tolist() == [1]
    np.save(path, np.array([2]))
    with pytest.raises(CheckpointError, match="has id 1 both in fast memory and demoted; take an older checkpoint"):
        checkpoint.load(series.at(2), EmbeddingCollection([spec()]), verify=False)


@pytest.mark.parametrize(
    "step, change, reason",
    [
        (2, lambda files: files.pop("demoted_removed"), "does not say which ids are not demoted any more"),
        (1, lambda files: files.update(demoted_removed="x.npy"), "says which ids are not demoted any more"),
    ],
)
def test_what_no_increment_can_be_is_refused(series, step, change, reason):
    assert read_manifest(series.at(2)).format == 5
    with pytest.raises(CheckpointError, match=reason):
        changed_manifest(series.at(step), lambda values: change(values["tables"]["user"]["known"]["parts"][0]["files"]))


def test_it_has_little_more_than_the_records_that_were_touched(tmp_path):
    table = Few.spec(dim=64, dynamic=Dynamic(capacity=200, shards=4, **STORE))
    few = Few(tmp_path, dim=64, dynamic=table.dynamic)
    optimizer = EmbeddingOptimizer(few.embeddings)
    for number, ids in enumerate((range(400), [*range(100, 250), *range(500, 550)]), start=1):
        for first in range(0, len(ids), 50):
            batch = SparseBatch.from_bags({"user": [list(ids[first : first + 50])]})
            few.embeddings(batch).values.sum().backward()
            optimizer.step()
        few.chains.write(number, "full" if number == 1 else "increment")
    manifest = read_manifest(few.chains.found.at(2))
    (part,) = manifest.tables["user"].known.parts
    num_bytes = sum(manifest.checksums[file].size_bytes for file in part.files.values())
    assert part.num_demoted > 100
    assert num_bytes < 1.05 * (part.num_ids + part.num_demoted) * (8 + RecordLayout(table).width)


def test_where_the_store_does_not_answer_the_next_is_full(few, monkeypatch):
    def fail(self):
        raise StoreError("no answer")

    changes = ChangedSlots(few.embeddings, "another")
    few.see(1)
    changes.take()
    few.see(2)
    assert changes.take() is not None
    with monkeypatch.context() as patch:
        patch.setattr(OwnedTable, "flush", fail)
        assert changes.take() is None
    assert changes.take() is None
    assert changes.take() is not None
    changes.close()
    assert shard_of(few.embeddings, "user")._owned.flush()._listeners == []


def test_rules_without_a_limit_are_another_table(series, tmp_path):
    with pytest.raises(CheckpointError, match="store_capacity is 0 in the checkpoint and 9 here"):
        read(series.at(2), replace(spec(), dynamic=replace(spec().dynamic, store_capacity=9)))
