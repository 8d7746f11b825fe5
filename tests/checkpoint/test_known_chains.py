"""Increments of dynamic tables are read as a full checkpoint of the same step, without the ids that are gone by then;
and what is written while training goes on is what they knew when it began."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import Phase, assume, given, settings

import rowmesh
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec, checkpoint
from rowmesh.checkpoint import CheckpointError, read_manifest
from rowmesh.checkpoint.background import BackgroundSave
from rowmesh.checkpoint.compact import compact
from rowmesh.checkpoint.rows import SavedKnown
from rowmesh.checkpoint.series import Series, verify
from rowmesh.checkpoint.snapshot import StoreSnapshot
from rowmesh.mesh import Mesh
from rowmesh.tables import Dynamic, Uniform
from rowmesh.tables.dynamic.records import KnownCopy
from rowmesh.tables.dynamic.table_shard import DynamicShard
from tests.checkpoint.test_chain import Chains, changed_manifest
from tests.exchange.resolve.test_resolver import RULES
from tests.support.dynamic import Stream, known_of, make
from tests.support.dynamic_streams import streams
from tests.support.shards import shard_of
from tests.support.slowed import slowed, sums_of
from tests.tables.dynamic.test_demoted import RULES as DEMOTED
from tests.tables.dynamic.test_records import train_on

NO_SHRINK = [Phase.explicit, Phase.generate]
EVENTS = ("step", "step", "increment", "background", "full", "look")


class Training:
    """Steps on the batches of a stream."""

    def __init__(self, mesh, stream):
        self.embeddings, self._mesh, self._stream, self._done = make(mesh, stream), mesh, stream, 0
        self.tables = self.embeddings.tables

    def step(self):
        train_on(self.embeddings, self._stream, [self._done], self._mesh)
        self._done += 1

    def look(self):
        """Ids are counted and admitted, and no row is updated: an optimizer that skips a step."""
        self.embeddings(self._stream.batch(self._done, self._mesh.rank, is_dynamic=True))
        self._done += 1


def write_chain(mesh, folder, stream, events):
    training = Training(mesh, stream)
    chains = Chains(mesh, folder, training)
    for number, event in enumerate(["full", *events], start=1):
        if event in ("step", "look"):
            getattr(training, event)()
        else:
            chains.write(number, event)
    training.embeddings.close()
    return chains.steps


def state_of(embeddings):
    """All that this rank knows, in fast memory or demoted, by table and kind: bytes."""
    found = {}
    for table in embeddings.tables:
        if table.storage == "dynamic":
            shard = shard_of(embeddings, table.name, "held")
            for kind, array in shard.arrays:
                found[table.name, kind] = array.tobytes()
            for number, piece in enumerate(piece for pieces in shard.pieces.values() for piece in pieces):
                found |= {
                    (table.name, kind, number): each.numpy().tobytes()
                    for kind, each in [("values", piece.values), *piece.state.items()]
                }
    return found


def read_both(mesh, folder, stream, steps):
    """Reads every checkpoint of both series."""
    embeddings = make(mesh, stream)
    for step in steps:
        states = []
        for name in ("found", "expected"):
            embeddings.barrier()
            assert checkpoint.load(Series(folder / name).at(step), embeddings) == {"step": step}
            embeddings.barrier()
            states.append(state_of(embeddings))
        assert states[0] == states[1], step
    embeddings.close()


@pytest.mark.parametrize("written_by, read_by", [(2, 3), pytest.param(1, 2, marks=pytest.mark.slow)])
@settings(max_examples=3, deadline=None, phases=NO_SHRINK)
@given(stream=streams(RULES, num_steps=st.just(20)), events=st.lists(st.sampled_from(EVENTS), min_size=3, max_size=8))
def test_a_chain_is_read_as_a_full_one(ranks, tmp_path_factory, written_by, read_by, stream, events):
    folder = tmp_path_factory.mktemp("chains")
    events = [*events, "step", "step", "increment"]
    steps = ranks.run(write_chain, folder, stream, events, world_size=written_by)[0]
    ranks.run(read_both, folder, stream, steps, world_size=read_by)
    series = Series(folder / "found")
    for step in steps[1::2]:
        assert compact(series.at(step)) == (read_manifest(series.at(step)).replaces is not None)
        verify(series.at(step))
    ranks.run(read_both, folder, stream, steps, world_size=1)  # increments of what was compacted too


def save_both_ways(mesh, folder, stream, point):
    """Saves at once and in the background, at the same step; returns how many pre-images there were."""
    training = Training(mesh, stream)
    for _ in range(4):
        training.step()
    checkpoint.save(folder / "sync", training.embeddings, {"step": 1}, peers=mesh.peers)
    peers = mesh.with_process_group("checkpoints").peers
    with slowed(point, shard_rows=2) as gate:
        save = BackgroundSave(folder / "async", training.embeddings, {"step": 1}, peers=peers)
        for _ in range(4):
            training.step()  # which evicts ids, and gives their frames to others
            gate.step()
        gate.open()
        assert save.wait()
    training.embeddings.close()
    return save.snapshot.num_saved


@pytest.mark.parametrize("world_size, point", [(1, "snapshot.read"), (2, "snapshot.copied")])
@settings(max_examples=5, deadline=None, phases=NO_SHRINK)
@given(stream=streams({**RULES, **{f"{name}, demoted": DEMOTED[name] for name in DEMOTED}}, num_steps=st.just(8)))
def test_what_is_written_beside_steps_is_of_one_moment(ranks, tmp_path_factory, world_size, point, stream):
    assume(stream.fits(world_size))
    folder = tmp_path_factory.mktemp("checkpoints")
    ranks.run(save_both_ways, folder, stream, point, world_size=world_size)
    assert sums_of(folder / "async") == sums_of(folder / "sync")


STREAM = Stream(rules=(("user", RULES["lru"]), ("item", RULES["lfu"])), num_steps=8)


def test_a_frame_that_is_used_again_is_a_change_like_another(tmp_path, monkeypatch):
    """Without pre-images rows would be those of other ids, with index and scores of the moment: a test of the tests."""
    assert save_both_ways(Mesh(), tmp_path, STREAM, "snapshot.read") > 0
    assert sums_of(tmp_path / "async") == sums_of(tmp_path / "sync")
    monkeypatch.setattr(StoreSnapshot, "preserve", lambda *_: None)
    save_both_ways(Mesh(), tmp_path / "blind", STREAM, "snapshot.read")
    found, expected = sums_of(tmp_path / "blind" / "async"), sums_of(tmp_path / "blind" / "sync")
    assert {name for name in found if found[name] != expected[name]} >= {"user.0.values.npy", "user.0.sum.npy"}
    assert all(found[name] == expected[name] for name in found if "ids" in name or "scores" in name)


def test_they_are_saved_beside_a_loop_of_ones_own(tmp_path):
    few, read = Few(tmp_path), EmbeddingCollection([Few.spec()])
    few.see(-3, 5)
    saving = rowmesh.async_save(tmp_path / "model", {"embeddings": few.embeddings})
    few.see(7)
    saving.wait()
    rowmesh.load(tmp_path / "model", {"embeddings": read})
    assert sorted(known_of(read, "user")) == [-3, 5]


# Ids that are gone

RULE = Dynamic(capacity=4, shards=2)


class Few:
    """A table of four ids, looked up one after the other."""

    def __init__(self, folder, **options):
        self.tables = [self.spec(**options)]
        self.embeddings = EmbeddingCollection(self.tables)
        self._optimizer, self._seen = EmbeddingOptimizer(self.embeddings), 0
        self.chains = Chains(Mesh(), folder, self)

    @staticmethod
    def spec(**options):
        rules = {"name": "user", "dim": 3, "storage": "dynamic", "dynamic": RULE, "initializer": Uniform(bound=0.1)}
        return TableSpec(**{**rules, **options})

    def see(self, *ids):
        for i in ids:
            self._optimizer.zero_grad()
            self.embeddings(replace(SparseBatch.from_bags({"user": [[i]]}), time=self._seen)).values.sum().backward()
            self._seen += 1
            self._optimizer.step()


def ids_of(folder):
    embeddings = EmbeddingCollection([Few.spec()])
    checkpoint.load(folder, embeddings)
    return known_of(embeddings, "user")


@pytest.fixture
def series(tmp_path):
    """Steps 1, full, to 3: ids leave, and one comes back."""
    few = Few(tmp_path)
    few.see(*range(4))
    few.chains.write(1, "full")
    few.see(4, 5, 6)
    few.chains.write(2, "increment")
    few.see(0, 1, 6)
    few.chains.write(3, "increment")
    return Series(tmp_path / "found")


def test_ids_that_left_are_gone_and_those_that_came_back_are_new(series, tmp_path):
    expected = Series(tmp_path / "expected")
    removed = []
    for step in series.steps():
        assert ids_of(series.at(step)) == ids_of(expected.at(step))
        (part,) = read_manifest(series.at(step)).tables["user"].known.parts
        removed.append(part.num_removed)
    assert removed[0] == 0
    assert removed[1] > 0
    assert set(ids_of(series.at(1))) - set(ids_of(series.at(2)))


def test_without_tombstones_a_chain_is_refused(tmp_path, monkeypatch):
    """Deltas without deletions: rows of ids that are gone, for ever."""
    changed = DynamicShard.changed

    def blind(self, before, marks):
        return KnownCopy(self._owned.shards, changed(self, before, marks).frames, np.empty(0, np.int64))

    monkeypatch.setattr(DynamicShard, "changed", blind)
    few = Few(tmp_path)
    few.see(*range(4))
    few.chains.write(1, "full")
    few.see(4, 5, 6)
    few.chains.write(2, "increment")
    with pytest.raises(CheckpointError, match=r"'user': shard \d knew \d ids, and a chain of 2 checkpoints gives \d"):
        ids_of(Series(tmp_path / "found").at(2))


def test_an_increment_has_what_was_seen_alone(tmp_path):
    few = Few(tmp_path, dynamic=Dynamic(capacity=200, shards=4))
    few.see(*range(50))
    few.chains.write(1, "full")
    few.see(3, 4)
    few.chains.write(2, "increment")
    few.chains.write(3, "increment")
    numbers = []
    for step in (1, 2, 3):
        (part,) = read_manifest(few.chains.found.at(step)).tables["user"].known.parts
        numbers.append((part.num_ids, part.num_removed))
    assert numbers == [(50, 0), (2, 0), (0, 0)]


def test_a_row_that_is_updated_after_the_checkpoint_is_a_change(tmp_path):
    """Its id was seen before: the last step alone does not tell."""
    few = Few(tmp_path)
    few.see(1, 2)
    few.embeddings(SparseBatch.from_bags({"user": [[1]]})).values.sum().backward()
    few.chains.write(1, "full")
    few._optimizer.step()
    few.chains.write(2, "increment")
    assert ids_of(few.chains.found.at(2)) == ids_of(few.chains.expected.at(2))
    assert ids_of(few.chains.found.at(1)) != ids_of(few.chains.found.at(2))


def test_compaction_drops_what_is_gone(series, tmp_path):
    assert compact(series.at(3))
    series.prune(keep_last=1)
    assert series.steps() == [3]
    (part,) = read_manifest(series.at(3)).tables["user"].known.parts
    assert (part.num_ids, part.num_removed) == (4, 0)
    found, expected = sums_of(series.at(3)), sums_of(tmp_path / "expected" / series.at(3).name)
    assert found == expected


@pytest.mark.parametrize(
    "rules",
    [{"admit_after": 2, "sketch_width": 4}, {"ttl_seconds": 60}, {"admit_after": 2}],
    ids=["sketch", "seconds", "counts"],
)
def test_all_that_is_known_is_compacted(tmp_path, rules):
    few = Few(tmp_path, dynamic=replace(RULE, **rules))
    few.see(*range(4))
    few.chains.write(1, "full")
    few.see(1, 4, 4)
    few.chains.write(2, "increment")
    series = Series(tmp_path / "found")
    assert compact(series.at(2))
    assert sums_of(series.at(2)) == sums_of(tmp_path / "expected" / series.at(2).name)


def test_ids_of_a_chain_are_exported(series, tmp_path):
    of_both = []
    for folder in (series.at(3), tmp_path / "expected" / series.at(3).name):
        chunks = list(SavedKnown(folder, read_manifest(folder), "user").read(1 << 16))
        of_both.append([np.concatenate(each).tobytes() for each in zip(*chunks, strict=True)])
    assert of_both[0] == of_both[1]


def test_other_rules_than_the_parent_s_are_refused(series):
    manifest = read_manifest(series.at(2))
    table = manifest.tables["user"]
    other = replace(table, known=replace(table.known, rules={**table.known.rules, "eviction": "lfu"}))
    (series.at(2) / "manifest.json").write_text(replace(manifest, tables={"user": other}).to_json())
    with pytest.raises(CheckpointError, match=r"and has other tables: .*eviction lfu"):
        ids_of(series.at(2))


@pytest.mark.parametrize(
    "step, change, reason",
    [
        (2, lambda part: part["files"].pop("removed"), "does not say which ids are gone"),
        (1, lambda part: part["files"].update(removed="x.npy"), "says which ids are gone"),
        (2, lambda part: part.update(num_shards=1), r"files hold shards \[0\], and it has 2"),
    ],
)
def test_what_no_increment_can_be_is_refused(series, step, change, reason):
    with pytest.raises(CheckpointError, match=reason):
        changed_manifest(series.at(step), lambda values: change(values["tables"]["user"]["known"]["parts"][0]))


def test_an_id_that_is_twice_is_refused(series):
    folder = series.at(3)
    path = folder / read_manifest(folder).folder / "user.0.ids.npy"
    ids, sizes = np.load(path), np.load(path.with_name("user.0.shards.npy"))
    at = int(np.argmax(sizes[:, 0] > 1))
    first = int(sizes[:at, 0].sum())
    ids[first + 1] = ids[first]
    np.save(path, ids)
    with pytest.raises(CheckpointError, match=rf"an id of shard {at} is twice"):
        checkpoint.load(folder, EmbeddingCollection([Few.spec()]), verify=False)


def test_bfloat16_rows_of_a_chain(tmp_path):
    few = Few(tmp_path, dtype=torch.bfloat16)
    few.see(*range(4))
    few.chains.write(1, "full")
    few.see(3, 9)
    few.chains.write(2, "increment")
    embeddings, states = EmbeddingCollection(few.tables), []
    for series in (few.chains.found, few.chains.expected):
        checkpoint.load(series.at(2), embeddings)
        piece = embeddings.known_rows("user")
        states.append((piece.ids.tolist(), piece.values.float().tolist()))
    assert states[0] == states[1]
    assert compact(few.chains.found.at(2))
    assert sums_of(few.chains.found.at(2)) == sums_of(few.chains.expected.at(2))


def test_ranks_without_shards_write_nothing(ranks, tmp_path):
    """And replicas save one of them."""
    stream = Stream(rules=(("user", RULES["one shard"]), ("item", RULES["lru"])), num_steps=8)
    steps = ranks.run(write_chain, tmp_path, stream, ["step", "increment", "step", "background"], world_size=2)[0]
    ranks.run(read_both, tmp_path, stream, steps, world_size=1)
