"""Increments and what they add to are read as a full checkpoint of the same step; what does not belong is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rowmesh import EmbeddingCollection, TableSpec, checkpoint
from rowmesh.checkpoint import CheckpointError, read_manifest
from rowmesh.checkpoint.background import BackgroundSave, Base, save_increment
from rowmesh.checkpoint.changes import ChangedSlots
from rowmesh.checkpoint.compact import compact
from rowmesh.checkpoint.manifest import Parent
from rowmesh.checkpoint.rows import SavedRows
from rowmesh.checkpoint.series import Series, verify
from rowmesh.checkpoint.snapshot import Snapshot
from rowmesh.mesh import Mesh
from rowmesh.placement import RowRange
from rowmesh.tables.shard import Changed
from tests.checkpoint.test_snapshot import PLAIN, Training, cases, tables_of
from tests.support.prepared import change_manifest
from tests.support.shards import shard_of
from tests.support.slowed import slowed

EVENTS = ("step", "step", "increment", "increment", "background", "set", "full")


class Chains:
    """Writes a checkpoint as an increment and as a full one, in two series."""

    def __init__(self, mesh, folder, training):
        self._mesh, self._training, self._changes = mesh, training, ChangedSlots(training.embeddings)
        self.found, self.expected = Series(folder / "found"), Series(folder / "expected")
        self._peers = mesh.with_process_group("checkpoints").peers
        self._parent = None
        self.steps = []

    def write(self, step, how):
        embeddings, peers = self._training.embeddings, self._mesh.peers
        checkpoint.save(self.expected.at(step), embeddings, {"step": step}, peers=peers)
        changed, place = self._changes.take(), self.found.at(step)
        base = None if changed is None or self._parent is None or how == "full" else Base(self._parent, changed)
        if how == "background":
            with slowed("snapshot.read") as gate:
                save = BackgroundSave(place, embeddings, {"step": step}, peers=self._peers, base=base)
                self._training.step()
                gate.open()
                assert save.wait()
        elif base is None:
            checkpoint.save(place, embeddings, {"step": step}, peers=peers)
        else:
            save_increment(place, embeddings, {"step": step}, base, peers=peers)
        embeddings.barrier()
        manifest = read_manifest(place)
        assert (manifest.parent is None) == (base is None)
        self._parent = Parent(step, manifest.identity, manifest.depth)
        self.steps.append(step)

    def set_rows(self):
        """Sets rows otherwise: the next is full."""
        self._training.embeddings.forget_differences()
        for piece in self._training.embeddings.held_rows(self._training.tables[0].name):
            piece.values.mul_(0.5)
            piece.commit()
        self._training.embeddings.barrier()


def state_of(embeddings):
    """All that this rank owns, by table."""
    found = {}
    for table in embeddings.tables:
        if table.storage == "tensor_train":
            found[table.name] = [tensor.clone() for tensor in embeddings.cores(table.name).tensors.values()]
        else:
            pieces = embeddings.local_rows(table.name)
            found[table.name] = [each.clone() for piece in pieces for each in (piece.values, *piece.state.values())]
    return found


def equal(some, others):
    return all(torch.equal(a, b) for name, each in some.items() for a, b in zip(each, others[name], strict=True))


def write_chain(mesh, folder, case, events):
    training = Training(mesh, case)
    chains = Chains(mesh, folder, training)
    for number, event in enumerate(["full", *events], start=1):
        if event == "step":
            training.step()
        elif event == "set":
            chains.set_rows()
        else:
            chains.write(number, event)
    training.embeddings.close()
    return chains.steps


def read_both(mesh, folder, case, steps):
    """Reads every checkpoint of both series."""
    tables, options = tables_of(case), {} if mesh.world_size == 1 else {"transport": case["transport"]}
    one, other = (EmbeddingCollection(tables, mesh=mesh, seed=seed, **options) for seed in (1, 2))
    for step in steps:
        states = []
        for name, embeddings in (("found", one), ("expected", other)):
            embeddings.barrier()
            assert checkpoint.load(Series(folder / name).at(step), embeddings) == {"step": step}
            embeddings.barrier()
            states.append(state_of(embeddings))
        assert equal(*states), step
    one.close()
    other.close()


@pytest.mark.parametrize("written_by, read_by", [(1, 2), (2, 1)])
@settings(max_examples=3, deadline=None)
@given(case=cases(), events=st.lists(st.sampled_from(EVENTS), min_size=2, max_size=6))
def test_a_chain_is_read_as_a_full_one(ranks, tmp_path_factory, written_by, read_by, case, events):
    folder = tmp_path_factory.mktemp("chains")
    steps = ranks.run(write_chain, folder, case, [*events, "step", "increment"], world_size=written_by)[0]
    ranks.run(read_both, folder, case, steps, world_size=read_by)
    series = Series(folder / "found")
    for step in steps[1::2]:
        assert compact(series.at(step)) == (read_manifest(series.at(step)).replaces is not None)
        verify(series.at(step))
    ranks.run(read_both, folder, case, steps, world_size=written_by)  # increments of what was compacted too


def migrate_between(mesh, folder):
    training = Training(mesh, {**PLAIN, "tables": PLAIN["tables"][:1]})
    chains = Chains(mesh, folder, training)
    chains.write(1, "full")
    training.step()
    chains.write(2, "increment")
    (table,) = training.embeddings.plan.tables
    ranges = (RowRange(0, 5, "replicated"), RowRange(5, table.shape.num_rows, shift=1))
    training.embeddings.migrate(replace(training.embeddings.plan, tables=(replace(table, ranges=ranges),)))
    chains.write(3, "full")
    training.step()
    chains.write(4, "increment")
    training.embeddings.close()


def test_after_a_migration_the_next_is_full(ranks, tmp_path):
    ranks.run(migrate_between, tmp_path, world_size=2)
    series = Series(tmp_path / "found")
    assert [read_manifest(series.at(step)).depth for step in series.steps()] == [0, 1, 0, 1]
    ranks.run(read_both, tmp_path, {**PLAIN, "tables": PLAIN["tables"][:1]}, series.steps(), world_size=2)


CASE = {**PLAIN, "tables": PLAIN["tables"][:1]}


@pytest.fixture
def series(tmp_path):
    """Steps 1, full, to 4, each an increment of the one before."""
    write_chain(Mesh(), tmp_path, CASE, ["increment"] * 3)
    return Series(tmp_path / "found")


@pytest.fixture
def trained(tmp_path):
    """Steps 1, full, 3 and 5."""
    write_chain(Mesh(), tmp_path, CASE, ["step", "increment", "step", "increment"])
    return Series(tmp_path / "found")


def load(folder):
    return checkpoint.load(folder, EmbeddingCollection(tables_of(CASE)))


def test_an_increment_has_the_rows_that_changed_alone(trained):
    (part,) = read_manifest(trained.at(3)).tables["item"].parts
    assert 0 < part.count <= 12
    whole, changed = (read_manifest(trained.at(step)).checksums["item.0.values.npy"].size_bytes for step in (1, 3))
    assert whole - changed == (40 - part.count) * 3 * 4


def test_without_notes_it_lacks_some(trained, tmp_path, monkeypatch):
    """That increments depend on the notes: else the equality above says nothing."""
    monkeypatch.setattr(ChangedSlots, "take", lambda _: Changed({}))
    monkeypatch.setattr("rowmesh.checkpoint.background.Snapshot", lambda source, rank, _: _Nothing(source, rank))
    write_chain(Mesh(), tmp_path / "blind", CASE, ["step", "increment"])
    with pytest.raises(AssertionError):
        read_both(Mesh(), tmp_path / "blind", CASE, [3])


def _Nothing(source, rank):  # noqa: N802
    stores = {id(shard_of(source, "item").store): np.zeros(10**4, np.uint8)}
    return Snapshot(source, rank, Changed(stores))


def test_steps_without_changes_have_no_files_of_rows(series):
    assert set(read_manifest(series.at(2)).checksums) == {"dense.pt"}
    assert load(series.at(4)) == {"step": 4}


def test_single_rows_of_a_chain(trained):
    folder, expected = trained.at(5), trained.folder.with_name("expected") / trained.at(5).name
    both = [SavedRows(each, read_manifest(each), "item").read(range(1, 40, 3)) for each in (folder, expected)]
    assert torch.equal(*both)


def test_a_gap_is_refused(trained):
    shutil.rmtree(trained.at(3))
    with pytest.raises(CheckpointError, match=r"is an increment of step 3, and .*step-000000003 is missing"):
        load(trained.at(5))


def test_a_wrong_parent_is_refused(trained):
    shutil.rmtree(trained.at(3))
    shutil.copytree(trained.at(1), trained.at(3))
    with pytest.raises(CheckpointError, match=r"increment of step 3, but of another one than .*: of files"):
        load(trained.at(5))


def test_a_parent_of_another_digest_is_refused(trained):
    path = trained.at(3) / "manifest.json"
    change_manifest(path, lambda values: values.update(metadata={"other": 1}))
    with pytest.raises(CheckpointError, match=r"increment of step 3, but of another one"):
        load(trained.at(5))


def test_a_damaged_parent_is_refused(trained):
    path = trained.at(3) / read_manifest(trained.at(3)).folder / "item.0.values.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"step-000000003/.*item.0.values.npy is damaged"):
        load(trained.at(5))
    (trained.at(3) / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is an increment of step 3, which cannot be read: .*step-000000003"):
        verify(trained.at(5))


def changed_manifest(folder, change):
    """The manifest of a checkpoint with other values."""
    return read_manifest(change_manifest(folder / "manifest.json", change).parent)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda values: values["tables"]["item"]["parts"][0].update(num_removed=2), "2 ids that are gone"),
        (lambda values: values["tables"]["item"]["parts"][0]["files"].pop("rows"), "does not say which rows changed"),
        (lambda values: values["tables"]["item"]["parts"][0].update(num_changed=41), "40 rows, and 41 that changed"),
        (lambda values: values.update(parent=None), "format 2 is of increments"),
        (lambda values: values.update(format=1), "format 1 is of full ones"),
    ],
)
def test_what_no_increment_can_be_is_refused(trained, change, reason):
    with pytest.raises(CheckpointError, match=reason):
        changed_manifest(trained.at(3), change)


def test_parts_of_an_increment_are_no_full_checkpoint(trained):
    def change(values):
        values["tables"]["item"]["parts"][0]["num_changed"] = 1

    with pytest.raises(CheckpointError, match="part of an increment, and the checkpoint is full"):
        changed_manifest(trained.at(1), change)


@pytest.mark.parametrize("number, reason", [(lambda rows: rows[1], "is twice in"), (lambda _: 40, "has rows .* of 40")])
def test_rows_that_cannot_be_are_refused(trained, number, reason):
    folder = trained.at(5)
    path = folder / read_manifest(folder).folder / "item.0.rows.npy"
    rows = np.load(path)
    rows[0] = number(rows)
    np.save(path, rows)
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.load(folder, EmbeddingCollection(tables_of(CASE)), verify=False)


def test_other_tables_than_the_parent_are_refused(trained):
    manifest = read_manifest(trained.at(5))
    other = replace(manifest.tables["item"], num_rows=50)
    (trained.at(5) / "manifest.json").write_text(replace(manifest, tables={"item": other}).to_json())
    with pytest.raises(CheckpointError, match="and has other tables"):
        checkpoint.load(trained.at(5), EmbeddingCollection([TableSpec(name="item", num_rows=50, dim=4)]))


def test_what_one_that_stays_adds_to_stays(trained, tmp_path):
    trained.prune(keep_last=1)
    assert trained.steps() == [1, 3, 5]
    assert compact(trained.at(3))
    assert not compact(trained.at(3))
    trained.prune(keep_last=1)
    assert trained.steps() == [3, 5]
    assert compact(trained.at(5))
    trained.prune(keep_last=1)
    assert trained.steps() == [5]
    read_both(Mesh(), tmp_path, CASE, [5])
