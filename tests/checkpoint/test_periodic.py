"""`rowmesh.Checkpoints`: a loop of one's own that is killed and taken up again ends as one that was not."""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import time
import weakref
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import rowmesh
from rowmesh import Adam, Checkpoints, EmbeddingCollection, Normal, RowWiseAdaGrad, SparseBatch, TableSpec
from rowmesh._support.faults import arm
from rowmesh.checkpoint import read_manifest
from rowmesh.checkpoint.series import Series
from rowmesh.cli import checkpoint
from rowmesh.collection.averaged_rows import AveragedRows
from rowmesh.errors import CheckpointError, ConfigurationError, RowmeshError, UnreadableError
from rowmesh.mesh import Mesh
from rowmesh.tables import Dynamic
from tests.checkpoint.test_saving import STORED, Job, assert_same
from tests.support.prepared import change_manifest
from tests.support.ranks import RankPool

STEPS = 12
OPTIONS = {
    "between steps": {},
    "increments": {"incremental": 2},
    "beside steps": {"asynchronous": True},
    "increments beside steps": {"asynchronous": True, "incremental": 3, "copy_bytes": 0},
}


def loop(job, folder, last_step=STEPS, options=None):
    """Trains with checkpoints after every second step; returns where it began, and the values of that."""
    state = {name: part for name, part in job.state.items() if name != "step"}
    with Checkpoints(folder, state, every_steps=2, **(options or {})) as checkpoints:
        saved = checkpoints.resume()
        assert saved.get("seen", 0) == 8 * checkpoints.last
        first = job.step = checkpoints.last
        for step in range(first, last_step):
            job.train(1)
            assert checkpoints.step(step + 1, {"seen": 8 * (step + 1)}) == ((step + 1) % 2 == 0)
    return first


def live_three_times(mesh, folder, options):
    began = []
    for last_step in (5, 8, STEPS):
        job = Job(mesh, seed=last_step)  # another model, until it is loaded
        began.append(loop(job, folder, last_step, options))
        if last_step < STEPS:
            job.close()
    return began, job.everything()


def live_once(mesh):
    return Job(mesh, seed=5).train(STEPS).everything()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_loop_that_is_taken_up_again_ends_as_one_that_was_not(ranks: RankPool, tmp_path, options, world_size):
    plain = ranks.run(live_once, world_size=world_size)
    lives = ranks.run(live_three_times, tmp_path, options, world_size=world_size)
    for (began, found), expected in zip(lives, plain, strict=True):
        assert began == [0, 4, 8]
        assert_same(found, expected)
    assert Series(tmp_path).steps()[-2:] == [10, 12]
    parents = [read_manifest(Series(tmp_path).at(step)).parent for step in (10, 12)]
    assert [parent is not None for parent in parents] == ([False, True] if "incremental" in options else [False] * 2)


def go_on(mesh, folder, options):
    job = Job(mesh, seed=9)
    began = loop(job, folder, STEPS, options)
    return began, job.everything()


def test_another_number_of_ranks_goes_on(ranks: RankPool, tmp_path):
    options = {"incremental": 5, "asynchronous": True}
    ranks.run(go_on_until_6, tmp_path, options)
    (began, found), *others = ranks.run(go_on, tmp_path, options, world_size=4)
    merged = found | {name: value for _, each in others for name, value in each.items()}
    (expected,) = ranks.run(live_once, world_size=1)
    assert began == 6
    for name, values in expected.items():
        for key, value in values.items():
            torch.testing.assert_close(merged[name][key], value, rtol=1e-5, atol=1e-6)


def go_on_until_6(mesh, folder, options):
    job = Job(mesh, seed=5)
    loop(job, folder, 6, options)
    job.close()


def dynamic_job(**rules):
    options = {"storage": "dynamic", "dynamic": Dynamic(capacity=8, shards=2, **rules), "optimizer": Adam(lr=0.1)}
    options["initializer"] = Normal(std=0.5)
    return Job(Mesh(), tables=(TableSpec(name="page", num_rows=None, dim=4, **options),))


def train_on(job, step):
    ids = torch.tensor([[(7 * step + each) % 23 for each in range(4)]])
    job.dense_optimizer.zero_grad()
    job.model(SparseBatch.from_dense(["page"], ids)).square().mean().backward()
    job.dense_optimizer.step()
    job.sparse_optimizer.step()


@pytest.mark.parametrize(
    "rules", [{}, {"mode": "demote", "store": "memory", "store_capacity": 6}], ids=["drop", "demote"]
)
def test_increments_of_dynamic_tables_forget_what_they_evict(tmp_path, capsys: pytest.CaptureFixture[str], rules):
    job = dynamic_job(**rules)
    state = {"model": job.model, "dense": job.dense_optimizer, "sparse": job.sparse_optimizer}
    with Checkpoints(tmp_path, state, every_steps=3, incremental=9, keep_last=9) as checkpoints:
        for step in range(9):
            train_on(job, step)
            checkpoints.step(step + 1)
    checkpoint.show(tmp_path)
    out = capsys.readouterr().out
    assert " ids changed, " in out
    assert (" records stored, " in out) == bool(rules)
    other = dynamic_job(**rules)
    with Checkpoints(
        tmp_path, {"model": other.model, "dense": other.dense_optimizer, "sparse": other.sparse_optimizer}
    ) as again:
        assert again.resume() == {}
        assert again.last == 9
    for step in range(9, 14):
        train_on(job, step)
        train_on(other, step)
    ids = torch.arange(23)[None]
    with torch.no_grad():
        both = [each.network.embeddings(SparseBatch.from_dense(["page"], ids)).values for each in (job, other)]
    assert both[0].equal(both[1])


def test_each_of_several_knows_what_changed_since_its_own(tmp_path):
    job = Job(Mesh(), tables=STORED)
    state = {"model": job.model, "sparse": job.sparse_optimizer}
    often = Checkpoints(tmp_path / "often", state, every_steps=1, incremental=9)
    seldom = Checkpoints(tmp_path / "seldom", state, every_steps=4, incremental=9)
    with often, seldom:
        for step in range(8):
            job.train(1)
            often.step(step + 1)
            seldom.step(step + 1)
    for folder in ("often", "seldom"):
        other = Job(Mesh(), seed=7, tables=STORED)
        assert Checkpoints(tmp_path / folder, {"model": other.model, "sparse": other.sparse_optimizer}).resume() == {}
        assert_same({name: each for name, each in other.everything().items() if ":" in name}, job.everything())


def one_table():
    return EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4, optimizer=RowWiseAdaGrad(lr=0.1))])


def test_those_that_are_not_to_stay_go(tmp_path):
    with Checkpoints(tmp_path, {"tables": one_table()}, every_steps=2, keep_last=2, keep_every=6) as checkpoints:
        for step in range(1, 16):
            checkpoints.step(step)
        assert checkpoints.last == 14
    assert Series(tmp_path).steps() == [6, 12, 14]


def test_a_damaged_one_is_said_and_the_one_before_taken(tmp_path, caplog: pytest.LogCaptureFixture):
    with Checkpoints(tmp_path, {"tables": one_table()}, every_steps=2) as checkpoints:
        for step in range(1, 7):
            checkpoints.step(step, {"at": step})
    for rows in Series(tmp_path).at(6).rglob("*.npy"):
        rows.write_bytes(rows.read_bytes()[:-1] + b"?")
    with caplog.at_level(logging.WARNING, "rowmesh"), Checkpoints(tmp_path, {"tables": one_table()}) as checkpoints:
        assert checkpoints.resume() == {"at": 4}
        checkpoints.write(5)
    assert "not resumed from step 6" in caplog.text
    assert Series(tmp_path).steps() == [4, 5]


def test_where_all_are_damaged_nothing_is_begun(tmp_path):
    with Checkpoints(tmp_path, {"tables": one_table()}) as checkpoints:
        checkpoints.write(1)
    for rows in Series(tmp_path).at(1).rglob("*.npy"):
        rows.write_bytes(b"")
    with Checkpoints(tmp_path, {"tables": one_table()}) as checkpoints:
        with pytest.raises(CheckpointError, match=r"step-000000001"):
            checkpoints.resume()
        with pytest.raises(CheckpointError, match=r"has checkpoints, the newest after step 1; call resume\(\)"):
            checkpoints.write(2)
    assert Series(tmp_path).steps() == [1]


class Part:
    """A part of a state that can refuse what is loaded."""

    refusal: Exception | None = None

    def state_dict(self):
        return {"at": 1}

    def load_state_dict(self, state):
        if self.refusal is not None:
            raise self.refusal


def sharing(fitting):
    """Another part than what the checkpoints have."""
    return {**fitting, "schedule": Part()}


def refusing(fitting):
    part = Part()
    part.refusal = ValueError("not now")
    return {**fitting, "part": part}


def with_other_rows(fitting):
    return {**fitting, "tables": EmbeddingCollection([TableSpec(name="item", num_rows=11, dim=4)])}


def with_other_tables(fitting):
    return {**fitting, "tables": EmbeddingCollection([TableSpec(name="page", num_rows=10, dim=4)])}


@pytest.mark.parametrize("change", [sharing, refusing, with_other_rows, with_other_tables])
def test_one_that_does_not_fit_is_an_error_and_stays(tmp_path, change):
    def state():
        return {"tables": one_table(), "part": Part()}

    with Checkpoints(tmp_path, state(), every_steps=1, incremental=1, keep_last=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.step(step)
    with (
        Checkpoints(tmp_path, change(state())) as checkpoints,
        pytest.raises(
            CheckpointError, match=r"cannot go on from .*step-000000003, .*\. No checkpoint was removed"
        ) as error,
    ):
        checkpoints.resume()
    assert type(error.value) is CheckpointError
    assert Series(tmp_path).steps() == [1, 2, 3]
    with Checkpoints(tmp_path, state()) as checkpoints:
        checkpoints.resume()
        assert checkpoints.last == 3


def test_what_no_loop_wrote_is_not_gone_on_from(tmp_path):
    rowmesh.save(Series(tmp_path).at(3), {"tables": one_table()})
    with (
        Checkpoints(tmp_path, {"tables": one_table()}) as checkpoints,
        pytest.raises(CheckpointError, match=r"step-000000003, which no loop wrote: random states are missing"),
    ):
        checkpoints.resume()
    assert Series(tmp_path).steps() == [3]


def of_a_later_version(manifest):
    change_manifest(manifest, lambda values: values.update(format=99))


@pytest.mark.parametrize("step", [2, 3])  # the newest, and what it adds to
def test_one_of_a_later_version_stays(tmp_path, step):
    with Checkpoints(tmp_path, {"tables": one_table()}, every_steps=1, incremental=1, keep_last=3) as checkpoints:
        for each in (1, 2, 3):
            checkpoints.step(each)
    assert read_manifest(Series(tmp_path).at(3)).parent is None
    of_a_later_version(Series(tmp_path).at(step) / "manifest.json")
    if step == 2:
        (tmp_path / "step-000000003" / "manifest.json").unlink()
    with (
        Checkpoints(tmp_path, {"tables": one_table()}) as checkpoints,
        pytest.raises(CheckpointError, match=r"has format 99; .*No checkpoint was removed"),
    ):
        checkpoints.resume()
    assert (Series(tmp_path).at(step) / "manifest.json").exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ENOMEM])
@pytest.mark.parametrize("step", [1, 2], ids=["parent", "newest"])
def test_one_that_cannot_be_read_now_stays(tmp_path, monkeypatch: pytest.MonkeyPatch, number, step):
    job = Job(Mesh(), tables=STORED)
    with Checkpoints(tmp_path, {"model": job.model}, every_steps=1, incremental=1) as checkpoints:
        for each in (1, 2):
            job.train(1)
            checkpoints.step(each)
    assert read_manifest(Series(tmp_path).at(2)).parent is not None
    refused, opened = str(Series(tmp_path).at(step) / "manifest.json"), os.open

    def refuse(path, *arguments, **options):
        if str(path) == refused:
            raise OSError(number, os.strerror(number), refused)
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with (
        Checkpoints(tmp_path, {"model": Job(Mesh(), tables=STORED).model}) as checkpoints,
        pytest.raises(UnreadableError, match=rf"step-000000002.*{os.strerror(number)}.*No checkpoint was removed"),
    ):
        checkpoints.resume()
    monkeypatch.undo()
    assert Series(tmp_path).steps() == [1, 2]
    with Checkpoints(tmp_path, {"model": Job(Mesh(), tables=STORED).model}) as checkpoints:
        checkpoints.resume()
        assert checkpoints.last == 2


def refuse_on_rank_1(mesh, folder, kind):
    """One rank's part does not fit; returns what each rank got, and where all of them go on then."""
    part, embeddings = Part(), EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4)], mesh=mesh)
    with Checkpoints(folder, {"tables": embeddings, "part": part}) as checkpoints:
        if mesh.rank == 1:
            part.refusal = kind("not now")
        try:
            checkpoints.resume()
        except (CheckpointError, kind) as error:
            told = type(error).__name__
        part.refusal = None
        checkpoints.resume()
        return told, checkpoints.last


@pytest.mark.parametrize("kind", [ValueError, OSError])
def test_where_one_rank_cannot_load_one_all_learn_it_and_it_stays(ranks: RankPool, tmp_path, kind):
    with Checkpoints(tmp_path, {"tables": one_table(), "part": Part()}) as checkpoints:
        for step in (1, 2):
            checkpoints.write(step)
    told = "CheckpointError" if kind is ValueError else kind.__name__
    assert ranks.run(refuse_on_rank_1, tmp_path, kind) == [("CheckpointError", 2), (told, 2)]


def test_one_that_is_written_elsewhere_and_fails_costs_none(tmp_path):
    embeddings = one_table()
    with Checkpoints(tmp_path / "series", {"tables": embeddings}) as checkpoints:
        for step in (2, 3):
            checkpoints.write(step)
        with arm("checkpoint.write_rows=ENOSPC"):
            saving = rowmesh.async_save(tmp_path / "elsewhere", {"tables": embeddings})
            while not saving.is_done:
                time.sleep(0.01)
        with pytest.raises(CheckpointError, match="elsewhere"):  # nobody waited
            checkpoints.resume()
        checkpoints.resume()
        assert checkpoints.last == 3
    assert Series(tmp_path / "series").steps() == [2, 3]


def test_one_that_is_being_written_is_resumed_from(tmp_path):
    with late(), Checkpoints(tmp_path, {"tables": small()}, asynchronous=True) as checkpoints:
        checkpoints.write(1)
        checkpoints.write(2)
        checkpoints.resume()
        assert checkpoints.last == 2
    assert Series(tmp_path).steps() == [1, 2]


def test_the_command_line_shows_them(tmp_path, capsys: pytest.CaptureFixture[str]):
    with Checkpoints(tmp_path, {"tables": one_table()}, every_steps=1, incremental=1) as checkpoints:
        checkpoints.step(1)
        checkpoints.step(2, {"progress": 3})
    checkpoint.list_(tmp_path)
    checkpoint.verify(tmp_path)
    checkpoint.show(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["1", "2"]
    assert [line.split()[0] for line in lines[2:]] == ["whole"] * 2 + ["checkpoint", "step", "adds", "table", "beside"]
    assert lines[-1].split() == ["beside", "progress,", "rowmesh._support.random_states"]


def test_checkpoints_of_another_loop_are_not_taken_for_its_own(tmp_path):
    with Checkpoints(tmp_path, {"tables": one_table()}) as checkpoints:
        checkpoints.write(100)
    with (
        Checkpoints(tmp_path, {"tables": one_table()}, every_steps=1) as checkpoints,
        pytest.raises(CheckpointError, match=r"after step 100; call resume\(\) to go on"),
    ):
        checkpoints.step(1)
    assert Series(tmp_path).steps() == [100]


def test_a_second_loop_is_kept_out_until_the_first_ends(tmp_path):
    def again() -> Checkpoints:
        return Checkpoints(tmp_path / "series", {"tables": one_table()})

    with again() as checkpoints:
        assert checkpoints.resume() == {}
        for call in (again().resume, lambda: again().write(1)):
            with pytest.raises(RowmeshError, match=r"another run or loop has its checkpoints in .*series; wait for it"):
                call()
        checkpoints.write(2)
    with again() as checkpoints:
        checkpoints.resume()
        assert checkpoints.last == 2
    assert [path.name for path in (tmp_path / "series").iterdir()] == ["step-000000002"]


def test_an_asynchronous_loop_without_a_block_lets_go_of_everything(tmp_path):
    table = one_table()
    checkpoints = Checkpoints(tmp_path / "series", {"tables": table}, asynchronous=True)
    checkpoints.resume()
    checkpoints.write(1)
    checkpoints.close()
    with Checkpoints(tmp_path / "series", {"tables": one_table()}) as others:
        others.resume()
        assert others.last == 1
    checkpoints = Checkpoints(tmp_path / "other", {"tables": table}, asynchronous=True)
    checkpoints.write(1)
    kept = weakref.ref(table)
    while checkpoints._writer.under_way is not None and not checkpoints._writer.is_done:
        time.sleep(0.01)
    del checkpoints, table
    gc.collect()
    assert kept() is None


def test_a_loop_that_writes_nothing_leaves_no_folder(tmp_path):
    with Checkpoints(tmp_path / "series", {"tables": one_table()}) as checkpoints:
        checkpoints.resume()
    assert not (tmp_path / "series").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "series").write_text("no folder")
    with (
        Checkpoints(tmp_path / "series", {"tables": one_table()}) as checkpoints,
        pytest.raises(CheckpointError, match=r"cannot write in .*series: "),
    ):
        checkpoints.resume()


def fail_beside_steps(mesh, folder):
    job = Job(mesh, tables=STORED)
    state = {"model": job.model}
    with Checkpoints(folder, state, every_steps=1, asynchronous=True, incremental=5) as checkpoints:
        checkpoints.step(1)
        checkpoints.wait()
        with arm("checkpoint.write_rows=ENOSPC" if mesh.rank == 1 else ""):
            job.train(1)
            checkpoints.step(2)
            job.train(1)
            while not checkpoints._writer.is_done:
                time.sleep(0.01)
        with pytest.raises(CheckpointError, match=r"rank 1 cannot write the checkpoint .*No space left"):
            checkpoints.step(3)
        checkpoints.step(4)  # said once: the next is written
        rowmesh.async_save(folder / "beside", state).wait()  # waits for its turn
        assert checkpoints.last == 4
    return Series(folder).steps(), read_manifest(Series(folder).at(4)).parent


def test_one_that_cannot_be_written_is_raised_on_every_rank_and_the_next_is(ranks: RankPool, tmp_path: Path):
    assert ranks.run(fail_beside_steps, tmp_path) == [([1, 4], None)] * 2


def no_memory():
    raise MemoryError


def no_luck():
    raise KeyError("no luck")


def fail_once(mesh, folder, point, action, asynchronous):
    """One rank meets an error of any kind; returns what the next calls raise, and which checkpoints there are."""
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=50, dim=4)], mesh=mesh)
    options = {"every_steps": 1, "asynchronous": asynchronous, "incremental": 3, "keep_last": 9}
    failures = []
    with Checkpoints(folder, {"tables": embeddings}, **options) as checkpoints:
        checkpoints.step(1)
        checkpoints.wait()
        if mesh.rank == 0:
            Series(folder).at(0).mkdir()  # something to be removed
        for step in (2, 3, 4):
            with arm(point=point, action=action) if mesh.rank == 0 and step == 2 else arm(""):
                try:
                    checkpoints.step(step)
                    checkpoints.wait()
                except Exception as error:
                    failures.append(type(error).__name__)
        rowmesh.load(Series(folder).at(4), {"tables": embeddings})
        assert checkpoints.last == 4
    embeddings.close()
    return failures, Series(folder).steps()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["between steps", "beside steps"])
@pytest.mark.parametrize(
    ("point", "action", "kind"),
    [
        ("checkpoint.write_dense", no_memory, "CheckpointWriteError"),
        ("checkpoint.write_dense", no_luck, "CheckpointError"),
        ("checkpoint.prune", no_memory, ""),
    ],
)
def test_after_an_error_of_any_kind_the_next_is_written(ranks: RankPool, tmp_path, point, action, kind, asynchronous):
    found = ranks.run(fail_once, tmp_path, point, action, asynchronous)
    assert found == [([kind] if kind else [], [1, 3, 4] if kind else [1, 2, 3, 4])] * 2


def refuse_an_increment(mesh, folder):
    """One rank has no memory for what it has to write of an increment; returns what each rank is told."""
    job, said = Job(mesh, tables=STORED), []
    with Checkpoints(folder, {"model": job.model}, every_steps=1, incremental=5, keep_last=9) as checkpoints:
        for step in (1, 2, 3, 4):
            job.train(1)
            is_short = mesh.rank == 1 and step == 2
            point = "rowmesh.checkpoint.snapshot.StoreSnapshot.open"
            try:
                with mock.patch(point, side_effect=MemoryError()) if is_short else nullcontext():
                    checkpoints.step(step)
            except CheckpointError as error:
                said.append(str(error))
    job.close()
    return said, Series(folder).steps()


def test_an_increment_that_one_rank_has_no_memory_for_fails_on_all(ranks: RankPool, tmp_path):
    (own, steps), others = ranks.run(refuse_an_increment, tmp_path)
    assert (own, steps) == others
    assert len(own) == 1
    assert "rank 1 cannot write the checkpoint in" in own[0]
    assert "Cannot allocate memory; free memory" in own[0]
    assert steps == [1, 3, 4]


def test_where_memory_is_short_for_what_changed_the_next_is_full(tmp_path, monkeypatch: pytest.MonkeyPatch):
    job = Job(Mesh(), tables=STORED)
    with Checkpoints(tmp_path, {"model": job.model}, every_steps=1, incremental=9, keep_last=9) as checkpoints:
        for step in (1, 2, 3, 4):
            job.train(1)
            with monkeypatch.context() as patch:
                if step == 2:
                    patch.setattr("rowmesh.checkpoint.changes._on_host", lambda marks: no_memory())
                checkpoints.step(step)
    depths = [read_manifest(Series(tmp_path).at(step)).depth for step in (1, 2, 3, 4)]
    assert depths == [0, 0, 0, 1]


class LoopError(Exception):
    """What ends a loop."""


def test_a_loop_that_fails_leaves_what_was_written(tmp_path):
    def fail():
        with Checkpoints(tmp_path, {"tables": one_table()}, asynchronous=True) as checkpoints:
            checkpoints.write(1)
            checkpoints.wait()
            checkpoints.write(2)
            raise LoopError

    with pytest.raises(LoopError):
        fail()
    assert 1 in Series(tmp_path).steps()
    assert all((path / "manifest.json").exists() for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_steps": -1}, r"every_steps is -1; it must be a whole number, 0 or more"),
        ({"keep_last": 0}, r"keep_last is 0; it must be a whole number, 1 or more"),
        ({"incremental": 0.5}, r"incremental is 0.5"),
        ({"incremental": True}, r"incremental is True"),
    ],
)
def test_mistakes_are_named(tmp_path, options, message):
    with pytest.raises(ConfigurationError, match=message):
        Checkpoints(tmp_path, {"tables": one_table()}, **options)


def test_plain_values_belong_to_steps(tmp_path):
    with pytest.raises(ConfigurationError, match=r"'step' is a plain value, and changes; give such to step\(\)"):
        Checkpoints(tmp_path, {"tables": one_table(), "step": 3})
    with (
        Checkpoints(tmp_path, {"tables": one_table()}) as checkpoints,
        pytest.raises(ConfigurationError, match=r"'tables' is a value and a part of the state too"),
    ):
        checkpoints.write(1, {"tables": 3})


def small(value=0.0):
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=50, dim=4)])
    for piece in embeddings.held_rows("item"):
        piece.values.fill_(value)
    return embeddings


def rows_of(embeddings):
    return torch.cat([piece.values.clone() for piece in embeddings.held_rows("item")])


def train_with_dropout(mesh, folder, last_step):
    """Ranks draw other numbers, and update rows by them."""
    random.seed(mesh.rank)
    np.random.seed(mesh.rank)
    torch.manual_seed(mesh.rank)
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=50, dim=4)], mesh=mesh)
    dropout, sparse = torch.nn.Dropout(0.5), rowmesh.EmbeddingOptimizer(embeddings)
    parts = {"embeddings": embeddings, "sparse": sparse}
    losses = []
    with Checkpoints(folder, parts, every_steps=3) as checkpoints:
        checkpoints.resume()
        for step in range(checkpoints.last, last_step):
            vectors = embeddings(SparseBatch.from_bags({"item": [[step], [step + 9]]}))["item"]
            sparse.zero_grad()
            loss = dropout(vectors).pow(2).sum()
            loss.backward()
            losses.append((loss.item(), np.random.random(), random.random()))
            sparse.step()
            checkpoints.step(step + 1)
    embeddings.close()
    return losses


@pytest.mark.parametrize("world_size", [1, 2])
def test_random_numbers_go_on_where_they_were(ranks: RankPool, tmp_path, world_size):
    def lives(name, *last_steps):
        return [ranks.run(train_with_dropout, tmp_path / name, last, world_size=world_size) for last in last_steps]

    random_before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    ((untouched,), (_, resumed)) = lives("untouched", 9), lives("killed", 5, 9)
    assert resumed == [losses[3:] for losses in untouched]
    random.setstate(random_before[0])
    np.random.set_state(random_before[1])
    torch.set_rng_state(random_before[2])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_of_the_same_step_stays(tmp_path, options):
    with Checkpoints(tmp_path, {"embeddings": small()}, every_steps=2, keep_last=1, **options) as checkpoints:
        checkpoints.resume()
        for step in range(1, 5):
            checkpoints.step(step)
        checkpoints.wait()
        with arm("checkpoint.prepare=ENOSPC"):
            checkpoints.write(4)
        checkpoints.wait()
        assert checkpoints.last == 4
    with Checkpoints(tmp_path, {"embeddings": small()}) as checkpoints:
        checkpoints.resume()
        assert checkpoints.last == 4


def test_steps_that_cannot_come_are_refused(tmp_path):
    with Checkpoints(tmp_path, {"embeddings": small()}, every_steps=2) as checkpoints:
        for step in range(1, 7):
            checkpoints.step(step)
        for call in (checkpoints.step, checkpoints.write):
            with pytest.raises(ConfigurationError, match=r"step 1 comes after 6.*count steps over all epochs"):
                call(1)
            with pytest.raises(ConfigurationError, match=r"the step is 8\.0; it must be a whole number"):
                call(8.0)
        assert checkpoints.step(np.int64(8))
    assert Series(tmp_path).steps() == [6, 8]


@contextmanager
def late(seconds=0.3):
    """Rows are read late: what does not wait for them comes before."""
    with arm(point="snapshot.read", action=lambda: time.sleep(seconds)):
        yield


@pytest.mark.parametrize("how", ["load", "load_state_dict", "averages"])
def test_rows_that_are_set_meanwhile_are_not_written(tmp_path, how):
    embeddings, other = small(2.0), small(3.0)
    rowmesh.save(tmp_path / "other", {"embeddings": other})
    averages = AveragedRows(embeddings, 0.5)
    averages.update()
    for piece in embeddings.held_rows("item"):
        piece.values.fill_(1.0)
    with late(), Checkpoints(tmp_path / "series", {"embeddings": embeddings}, asynchronous=True) as checkpoints:
        checkpoints.write(1)
        if how == "load":
            rowmesh.load(tmp_path / "other", {"embeddings": embeddings})
        elif how == "load_state_dict":
            embeddings.load_state_dict(other.state_dict())
        else:
            with averages.applied():
                assert rows_of(embeddings).eq(2.0).all()
        assert rows_of(embeddings).eq(1.0 if how == "averages" else 3.0).all()
    with Checkpoints(tmp_path / "series", {"embeddings": other}) as checkpoints:
        checkpoints.resume()
    assert rows_of(other).eq(1.0).all()
