"""What is read of a snapshot is what rows were when it was taken, whatever steps do meanwhile."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rowmesh import SGD, AdaGrad, Adam, EmbeddingCollection, EmbeddingOptimizer, RowWiseAdaGrad, TableSpec, checkpoint
from rowmesh._support.faults import arm
from rowmesh.checkpoint import CheckpointWriteError
from rowmesh.checkpoint.background import BackgroundSave
from rowmesh.checkpoint.room import Room
from rowmesh.checkpoint.snapshot import Snapshot, StoreSnapshot
from rowmesh.errors import CheckpointError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.placement import RowRange
from rowmesh.sparse import SparseBatch
from rowmesh.tables import Dynamic, TensorTrain, Tiers, Uniform
from tests.support.shards import shard_of
from tests.support.slowed import held, slowed, sums_of

RULES = {"sgd": SGD(), "adagrad": AdaGrad(), "row_wise_adagrad": RowWiseAdaGrad(), "adam": Adam()}


@st.composite
def cases(draw):
    """Tables, as plain values; ranks make them."""
    tables = [
        {
            "name": f"t{number}",
            "num_rows": draw(st.sampled_from([1, 7, 40, 90])),
            "dim": draw(st.sampled_from([3, 16])),
            "rule": draw(st.sampled_from(sorted(RULES))),
            "storage": draw(st.sampled_from(["dense", "dense", "tiered"])),
            "bfloat16": draw(st.booleans()),
        }
        for number in range(draw(st.integers(1, 3)))
    ]
    return {
        "tables": tables,
        "has_cores": draw(st.booleans()),
        "transport": draw(st.sampled_from(["one_sided", "collective"])),
        "point": draw(st.sampled_from(["snapshot.read", "snapshot.copied"])),
        # For none of the rows, for some shards of 8, for all.
        "copy_bytes": draw(st.sampled_from([0, 1 << 10, 1 << 20])),
        "steps": draw(st.integers(1, 4)),
        "seed": draw(st.integers(0, 99)),
    }


def tables_of(case):
    found = [
        TableSpec(
            name=each["name"],
            num_rows=each["num_rows"],
            dim=each["dim"],
            optimizer=RULES[each["rule"]],
            storage=each["storage"],
            dtype=torch.bfloat16 if each["bfloat16"] else torch.float32,
        )
        for each in case["tables"]
    ]
    if case["has_cores"]:
        train = {"storage": "tensor_train", "tensor_train": TensorTrain(rank=2), "optimizer": AdaGrad()}
        found.append(TableSpec(name="cores", num_rows=60, dim=4, **train))
    return found


class Training:
    """Steps on random batches."""

    def __init__(self, mesh, case):
        self._mesh, self.tables = mesh, tables_of(case)
        self.embeddings = EmbeddingCollection(
            self.tables,
            mesh=mesh,
            transport="auto" if mesh.world_size == 1 else case["transport"],
            tiers=Tiers(fast_rows=64, fast_share=0.01),
            device=case.get("device", "cpu"),
        )
        self._optimizer = EmbeddingOptimizer(self.embeddings)
        self._draw = np.random.default_rng([case["seed"], mesh.rank])

    def step(self):
        ids = [self._draw.integers(table.num_rows, size=12) for table in self.tables]
        lengths = [np.bincount(np.arange(len(each)) % 4, minlength=4) for each in ids]
        batch = SparseBatch(
            features=tuple(table.name for table in self.tables),
            ids=torch.from_numpy(np.concatenate(ids)),
            batch_size=4,
            jagged_offsets=torch.from_numpy(np.concatenate([[0], *lengths]).cumsum()),
        )
        self._optimizer.zero_grad()
        values = self.embeddings(batch).values
        (values.float() * torch.linspace(-1, 1, values.shape[1], device=values.device)).sum().backward()
        self._optimizer.step()


def save_both_ways(mesh, folder, case):
    """Saves at once and in the background, at the same step; returns how many pre-images there were."""
    training = Training(mesh, case)
    training.step()
    checkpoint.save(folder / "sync", training.embeddings, {"step": 1}, peers=mesh.peers)
    peers = mesh.with_process_group("checkpoints").peers
    with slowed(case["point"]) as gate:
        state = {"step": torch.ones(1)}
        room = Room(case["copy_bytes"])
        save = BackgroundSave(folder / "async", training.embeddings, state, peers=peers, room=room)
        state["step"] += 1
        for _ in range(case["steps"]):
            training.step()
            gate.step()
        gate.open()
        assert save.wait()
    num_saved = save.snapshot.num_saved
    assert room.copies.held_bytes <= case["copy_bytes"]
    training.step()  # costs nothing more
    assert save.snapshot.num_saved == num_saved
    assert checkpoint.read_manifest(folder / "async").world_size == mesh.world_size
    training.embeddings.close()
    return num_saved


@pytest.mark.parametrize("world_size", [1, 2])
@settings(max_examples=5, deadline=None)
@given(case=cases())
def test_a_checkpoint_in_the_background_is_that_of_its_step(ranks, tmp_path_factory, world_size, case):
    folder = tmp_path_factory.mktemp("checkpoints")
    assert sum(ranks.run(save_both_ways, folder, case, world_size=world_size)) > 0
    assert sums_of(folder / "async") == sums_of(folder / "sync")
    saved = checkpoint.load(folder / "async", EmbeddingCollection(tables_of(case)))
    assert saved == {"step": torch.ones(1)}


PLAIN = {
    "tables": [
        {"name": "item", "num_rows": 40, "dim": 3, "rule": "adagrad", "storage": "dense", "bfloat16": False},
        {"name": "user", "num_rows": 90, "dim": 3, "rule": "adam", "storage": "tiered", "bfloat16": False},
    ],
    "has_cores": False,
    "transport": "one_sided",
    "point": "snapshot.read",
    "copy_bytes": 1 << 20,
    "steps": 3,
    "seed": 0,
}


def save_amid_a_migration(mesh, folder):
    """The plan changes while a checkpoint is written, and steps go on under the new one."""
    training = Training(mesh, {**PLAIN, "tables": PLAIN["tables"][:1]})
    embeddings, peers = training.embeddings, mesh.with_process_group("checkpoints").peers
    training.step()
    checkpoint.save(folder / "sync", embeddings, {}, peers=mesh.peers)
    (table,) = embeddings.plan.tables
    ranges = (RowRange(0, 5, "replicated"), RowRange(5, table.shape.num_rows, shift=1))
    with slowed("snapshot.read") as gate:
        save = BackgroundSave(folder / "async", embeddings, {}, peers=peers)
        gate.step()
        embeddings.migrate(replace(embeddings.plan, tables=(replace(table, ranges=ranges),)))
        training.step()
        gate.open()
        assert save.wait()
    embeddings.close()


def save_under_copies(mesh, folder):
    """Rows that this rank owns have gaps between their slots: all ranks have copies of them."""
    training = Training(mesh, {**PLAIN, "tables": PLAIN["tables"][:1]})
    (table,) = training.embeddings.plan.tables
    ranges = (RowRange(0, 25, "replicated"), RowRange(25, table.shape.num_rows, shift=1))
    training.embeddings.migrate(replace(training.embeddings.plan, tables=(replace(table, ranges=ranges),)))
    checkpoint.save(folder / "sync", training.embeddings, {}, peers=mesh.peers)
    with slowed("snapshot.copied") as gate:
        save = BackgroundSave(
            folder / "async", training.embeddings, {}, peers=mesh.with_process_group("checkpoints").peers
        )
        training.step()
        gate.step()
        gate.open()
        assert save.wait()
    training.embeddings.close()


def test_rows_with_copies_are_as_they_were(ranks, tmp_path):
    ranks.run(save_under_copies, tmp_path, world_size=2)
    assert sums_of(tmp_path / "async") == sums_of(tmp_path / "sync")


def test_a_migration_changes_nothing_of_it(ranks, tmp_path):
    ranks.run(save_amid_a_migration, tmp_path, world_size=2)
    assert sums_of(tmp_path / "async") == sums_of(tmp_path / "sync")


@pytest.mark.parametrize("point", ["snapshot.read", "snapshot.copied"])
def test_without_pre_images_it_is_not(ranks, tmp_path, point):
    """That updates fall into the time of writing: else the equality above says nothing."""
    with mock.patch.object(StoreSnapshot, "preserve", return_value=None):
        save_both_ways(Mesh(), tmp_path, {**PLAIN, "point": point})
    found, expected = sums_of(tmp_path / "async"), sums_of(tmp_path / "sync")
    for table in ("item", "user"):
        assert any(found[name] != expected[name] for name in found if name.startswith(table))


def num_threads():
    return sum(thread.name.startswith("rowmesh checkpoint") for thread in threading.enumerate())


@pytest.mark.parametrize("fault", ["checkpoint.write_rows@2=ENOSPC", "checkpoint.publish=ENOSPC", "snapshot.read=EIO"])
def test_a_failed_one_leaves_nothing_and_training_goes_on(tmp_path, fault):
    training = Training(Mesh(), PLAIN)
    with arm(fault):
        save = BackgroundSave(tmp_path / "model", training.embeddings, {})
        with pytest.raises(CheckpointWriteError, match="rank 0 cannot write"):
            save.wait()
    assert save.is_done
    assert num_threads() == 0
    assert not (tmp_path / "model").exists()
    training.step()
    assert save.snapshot.num_saved == 0
    assert BackgroundSave(tmp_path / "model", training.embeddings, {}).wait()
    training.embeddings.close()


def cancel(mesh, folder):
    """Ends one that is held at its first shard, on all ranks."""
    training = Training(mesh, PLAIN)
    peers = mesh.with_process_group("cancelled checkpoints").peers  # of no use after it
    with slowed("snapshot.read"):
        save = BackgroundSave(folder, training.embeddings, {}, peers=peers)
        training.step()
        assert not save.is_done
        save.cancel()
    assert num_threads() == 0
    with pytest.raises((CheckpointError, RuntimeError)):
        save.wait()
    training.step()
    training.embeddings.close()


def test_one_that_is_cancelled_ends_where_all_rows_were_read_ahead(tmp_path):
    training, is_closed = Training(Mesh(), DENSE), threading.Event()
    with (
        mock.patch("rowmesh.checkpoint.snapshot.SHARD_ROWS", 8),
        mock.patch("rowmesh.checkpoint.snapshot.AHEAD_BYTES_PER_S", 1.0),  # the disk waits until all are copied
        arm(point="snapshot.closed", action=is_closed.set),
        held("checkpoint.write_rows") as has_come,
    ):
        save = BackgroundSave(tmp_path / "model", training.embeddings, {}, room=Room(1 << 20))
        assert has_come.wait(60)
        thread = threading.Thread(target=save.cancel)
        thread.start()
        assert is_closed.wait(60)
    thread.join()
    with pytest.raises(RowmeshError, match="closed"):
        save.wait()
    assert not (tmp_path / "model").exists()
    training.embeddings.close()


DENSE = {**PLAIN, "tables": PLAIN["tables"][:1]}


def test_rows_are_read_ahead_of_the_disk(tmp_path):
    """While the disk stands still steps save no rows where there is memory for all, else those that are not copied."""
    training = Training(Mesh(), DENSE)
    checkpoint.save(tmp_path / "sync", training.embeddings, {})
    for copy_bytes, is_free in ((1 << 20, True), (512, False), (0, False)):
        with (
            mock.patch("rowmesh.checkpoint.snapshot.SHARD_ROWS", 8),
            mock.patch("rowmesh.checkpoint.snapshot.AHEAD_BYTES_PER_S", 1.0),  # the disk waits until all are copied
            held("checkpoint.write_rows") as has_come,
        ):
            save = BackgroundSave(tmp_path / "async", training.embeddings, {}, room=Room(copy_bytes))
            assert has_come.wait(60)
            for _ in range(5):
                training.step()
        assert save.wait()
        assert (save.snapshot.num_saved == 0) == is_free
        assert (save.snapshot.num_behind == 0) == is_free
        assert sums_of(tmp_path / "async") == sums_of(tmp_path / "sync")
        checkpoint.save(tmp_path / "sync", training.embeddings, {})
    training.embeddings.close()


def test_memory_of_a_written_shard_is_for_the_next():
    training, num_read = Training(Mesh(), DENSE), threading.Semaphore(0)
    with (
        mock.patch("rowmesh.checkpoint.snapshot.SHARD_ROWS", 8),
        arm(point="snapshot.copied", action=num_read.release),
    ):
        snapshot = Snapshot(training.embeddings, room=Room(copy_bytes=300))  # a shard and its state take 256
        snapshot.read_ahead()
        for shard in shard_of(snapshot, "item").rows:
            assert num_read.acquire(timeout=60)
            assert not num_read.acquire(blocking=False)
            assert len(shard.values) == 8
            shard.forget()
        snapshot.close()
    training.embeddings.close()


def test_the_second_of_two_dynamic_tables_may_have_more_rows():
    rules = {"dim": 2, "storage": "dynamic", "dynamic": Dynamic(capacity=20, shards=1), "initializer": Uniform(bound=1)}
    embeddings = EmbeddingCollection([TableSpec(name="a", **rules), TableSpec(name="b", **rules)])
    embeddings(SparseBatch.from_bags({"a": [[1]], "b": [[*range(9)]]}))
    snapshot = Snapshot(embeddings)
    for name, count in (("a", 1), ("b", 9)):
        assert [len(piece.values) for piece in shard_of(snapshot, name).rows] == [count]
    snapshot.close()
    embeddings.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_that_is_cancelled_leaves_nothing(ranks, tmp_path, world_size):
    ranks.run(cancel, tmp_path / "model", world_size=world_size)
    assert not (tmp_path / "model").exists()


def fail_on_one_rank(mesh, folder, what, error, reason, kind):
    """One rank cannot make a snapshot, or begin a thread; all learn it, and the next is written."""
    training = Training(mesh, PLAIN)
    peers, embeddings = mesh.with_process_group("checkpoints").peers, training.embeddings
    fault = mock.patch(f"rowmesh.checkpoint.{what}", side_effect=error) if mesh.rank == 1 else contextlib.nullcontext()
    with fault:
        save = BackgroundSave(folder, embeddings, {}, peers=peers)
    training.step()
    with pytest.raises(CheckpointError, match=rf"rank 1 cannot write the checkpoint in .*: {reason}") as failure:
        save.wait()
    assert failure.type is kind
    assert BackgroundSave(folder, embeddings, {}, peers=peers).wait()
    embeddings.close()


@pytest.mark.parametrize(
    ("what", "error", "reason", "kind"),
    [
        ("snapshot.StoreSnapshot.open", RuntimeError("can't begin"), "can't begin", CheckpointError),
        ("snapshot.StoreSnapshot.open", MemoryError(), "Cannot allocate memory", CheckpointWriteError),
        ("background.Worker.start", RuntimeError("can't start new thread"), "can't start", CheckpointWriteError),
    ],
)
def test_where_one_rank_cannot_begin_all_learn_it(ranks, tmp_path, what, error, reason, kind):
    """A lack of memory or threads may pass."""
    ranks.run(fail_on_one_rank, tmp_path / "model", what, error, reason, kind, world_size=2)


def test_rows_are_as_they_were_and_read_once():
    training = Training(Mesh(), PLAIN)
    before = [piece.values.clone() for piece in training.embeddings.local_rows("item")]
    snapshot = Snapshot(training.embeddings)
    training.step()
    (shard,) = shard_of(snapshot, "item").rows
    assert torch.equal(shard.values, torch.cat(before))
    num_saved = snapshot.num_saved
    assert num_saved > 0
    assert all(len(each.values) for each in shard_of(snapshot, "user").rows)
    training.step()
    assert snapshot.num_saved == num_saved, "rows that were read, their states with them, cost nothing more"
    shard.forget()
    with pytest.raises(AssertionError, match="read once"):
        _ = shard.values
    snapshot.close()
    with pytest.raises(RowmeshError, match="closed"):
        _ = shard.state["sum"]
    training.embeddings.close()
