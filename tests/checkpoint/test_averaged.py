"""Replicas that are averaged change rows without updates; snapshots and increments have those rows too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rowmesh import Adam, EmbeddingCollection, EmbeddingOptimizer, TableSpec, checkpoint
from rowmesh.checkpoint.background import BackgroundSave
from rowmesh.checkpoint.changes import ChangedSlots
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.sparse import SparseBatch
from rowmesh.tables import Dynamic, Uniform
from tests.support.slowed import slowed, sums_of


def dynamic(**rules):
    initializer = Uniform(bound=1)
    return TableSpec(name="id", dim=3, storage="dynamic", dynamic=Dynamic(shards=2, **rules), initializer=initializer)


DYNAMIC = dynamic(capacity=50)
DEMOTING = dynamic(capacity=24, ttl_steps=3, mode="demote", store="memory", store_capacity=30)
DENSE = [TableSpec(name="item", num_rows=400, dim=3), TableSpec(name="user", num_rows=90, dim=5, optimizer=Adam())]


class Training:
    """Ranks that are replicas of all rows, and step on random batches."""

    def __init__(self, mesh, *, is_whole, table=DYNAMIC):
        tables = [*DENSE, *([] if is_whole else [table])]
        how = Synchronization("average", every=2, dense=is_whole)
        self.embeddings = EmbeddingCollection(tables, mesh=mesh, replicas=mesh.world_size, synchronization=how)
        self._optimizer, self._draw = EmbeddingOptimizer(self.embeddings), np.random.default_rng(mesh.rank)

    def step(self, count=1):
        for _ in range(count):
            self._optimizer.zero_grad()
            bags = {table.name: self._draw.integers(60, size=(4, 3)).tolist() for table in self.embeddings.tables}
            self.embeddings(SparseBatch.from_bags(bags)).values.sum().backward()
            self._optimizer.step()

    def rows(self):
        """Of every store: values and states."""
        stores = [exchange.arena for exchange in self.embeddings.engine.exchanges]
        return {id(each): torch.cat([part.flatten(1) for part in parts(each)], 1) for each in stores}


def parts(arena):
    return [arena.rows, *(state.unsqueeze(-1) if state.dim() == 1 else state for state in arena.state.values())]


def save_both_ways(mesh, folder, is_whole, table):
    training = Training(mesh, is_whole=is_whole, table=table)
    training.step(3)  # between two averages
    checkpoint.save(folder / "sync", training.embeddings, {}, peers=mesh.peers)
    peers = mesh.with_process_group("checkpoints").peers
    with slowed("snapshot.copied", shard_rows=16) as gate:
        save = BackgroundSave(folder / "async", training.embeddings, {}, peers=peers)
        for _ in range(5):
            training.step()
            gate.step()
        gate.open()
        assert save.wait()
    training.embeddings.close()
    return save.snapshot.num_saved


def note_changes(mesh, is_whole):
    training = Training(mesh, is_whole=is_whole)
    changes = ChangedSlots(training.embeddings)
    assert changes.take() is None
    found = []
    for _ in range(3):
        before = training.rows()
        training.step(3)
        changed = changes.take()
        assert changed is not None
        after = training.rows()
        for store, marks in changed.marks.items():  # of slots that this rank saves
            slots = (after[store] != before[store])[: len(marks)].any(1).nonzero().flatten().numpy()
            assert marks[slots].all()
            found.append(len(slots))
    changes.close()
    training.embeddings.close()
    return found


CASES = pytest.mark.parametrize("world_size, is_whole", [(2, False), (3, False), (2, True)])


@pytest.mark.parametrize(
    "world_size, is_whole, table",
    [(2, False, DYNAMIC), (3, False, DYNAMIC), (2, True, DYNAMIC), (2, False, DEMOTING)],
    ids=["2-False", "3-False", "2-True", "demoting"],
)
def test_a_checkpoint_beside_averages_is_that_of_its_step(ranks, tmp_path, world_size, is_whole, table):
    assert sum(ranks.run(save_both_ways, tmp_path, is_whole, table, world_size=world_size)) > 30
    assert sums_of(tmp_path / "async") == sums_of(tmp_path / "sync")


@CASES
def test_rows_that_are_averaged_are_noted(ranks, world_size, is_whole):
    for found in ranks.run(note_changes, is_whole, world_size=world_size):
        assert min(found) > 10
