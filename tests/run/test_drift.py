"""Traffic that moves makes ranks migrate once; traffic that stays makes them stay."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.exchange.shard_group import ShardGroups
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.placement.drift import Planner, Proposal
from rowmesh.placement.request import Request
from rowmesh.placement.topology import Topology
from rowmesh.run import drift as module
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.config import DriftConfig
from rowmesh.run.drift import Drift
from rowmesh.run.resolve import resolve
from rowmesh.run.run_folder import RunFolder
from rowmesh.run.trainer import Trainer
from rowmesh.tables import Dynamic, TableSpec, Uniform
from rowmesh.tables.update_rules import RowWiseAdaGrad
from tests.support.behaviour import rows_of

TABLES = (TableSpec(name="item", num_rows=2000, dim=4, optimizer=RowWiseAdaGrad(lr=0.1)),)
CHECK_EVERY, NUM_STEPS = 20, 200


def a_batch(rank, step, moves):
    """Most samples read one of 100 hot rows; after a third of the steps these may be others."""
    generator = np.random.default_rng((rank, step))
    hot = np.arange(1000, 1100) if moves and step >= NUM_STEPS // 3 else np.arange(100)
    ids = np.where(generator.random(64) < 0.8, generator.choice(hot, 64), generator.integers(0, 2000, 64))
    return SparseBatch.from_dense(("item",), torch.from_numpy(ids[None, :]))


def train(mesh, transport, moves, follows):
    """Messages, the coverage of the last interval, the rows by number."""
    shape = TableShape.of(TABLES[0])
    plan = Plan((TablePlan(shape, (RowRange(0, 100, "replicated"), RowRange(100, 2000))),), 2, 2)
    collection = EmbeddingCollection(TABLES, mesh=mesh, transport=transport, plan=plan)
    optimizer = EmbeddingOptimizer(collection)
    planner = None
    if mesh.rank == 0:
        request = Request(batch_size=64, mode="infer", extra_memory=0.1)
        planner = Planner(plan, "cyclic", Topology.uniform(2), request)
    drift = Drift(collection, planner, DriftConfig(check_every=CHECK_EVERY, sample_every=2)) if follows else None
    messages = []
    for step in range(NUM_STEPS):
        batch = a_batch(mesh.rank, step, moves)
        optimizer.zero_grad()
        collection(batch).values.square().sum().backward()
        optimizer.step()
        if drift is not None and (text := drift.after_step(batch)):
            messages.append(text)
        if planner is not None:
            planner.wait()  # however slow, it is taken over at the next check
    coverage = drift.measured.coverage if drift is not None else 0.0
    if drift is not None:
        drift.close()
    rows = {
        row: value
        for piece in collection.local_rows("item")
        for row, value in zip(piece.rows, piece.values.clone(), strict=True)
    }
    assert len(rows_of(collection)) == 2
    collection.close()
    return messages, coverage, rows


@pytest.mark.parametrize("transport", ["one_sided", pytest.param("collective", marks=pytest.mark.slow)])
def test_a_hot_set_that_moves_is_followed_once(ranks, transport):
    results = ranks.run(train, transport, True, True, world_size=2)
    messages = results[0][0]
    assert len(messages) == 1, messages
    # each rank reports its own time
    assert [text.rpartition(" moved in ")[0] for text in results[1][0]] == [messages[0].rpartition(" moved in ")[0]]
    assert messages[0].startswith("coverage ")
    assert "rows (" in messages[0]
    assert results[0][1] > 0.75
    plain = ranks.run(train, transport, True, False, world_size=2)
    followed, expected = ({**a[2], **b[2]} for a, b in (results, plain))
    assert all(torch.equal(followed[row], expected[row]) for row in range(2000))


def test_traffic_that_stays_moves_nothing(ranks):
    for messages, coverage, _ in ranks.run(train, "one_sided", False, True, world_size=2):
        assert messages == []
        assert coverage > 0.75


@pytest.mark.parametrize(
    ("storage", "why"),
    [
        ("tiered", "tables ['item'] are tiered, and rows of such cannot migrate"),
        ("dense", "no room; the old plan goes on"),
    ],
)
def test_a_plan_that_cannot_be_taken_over_is_reported_and_left(monkeypatch, storage, why):
    collection = EmbeddingCollection([replace(TABLES[0], storage=storage)])
    plan, drift = collection.plan, Drift(collection, None, DriftConfig())
    monkeypatch.setattr(ShardGroups, "allocate", no_room)
    assert drift._follow(Proposal(plan, "a new plan")).startswith(f"; a new plan: not taken over, {why}")
    assert collection.plan is plan
    drift.close()


def no_room(groups, outcome):
    raise MemoryError(f"no room{outcome}")


def test_a_run_that_fails_while_planning_leaves_no_thread(config_file, monkeypatch):
    def planning(task, job):
        planner = Planner(job.embeddings.plan, "cyclic", Topology.uniform(1), Request(batch_size=64))
        monkeypatch.setattr(planner, "_propose", lambda sketch: time.sleep(0.3))
        planner.begin()
        return Drift(job.embeddings, planner, DriftConfig())

    def fail(trainer, batch):
        raise RowmeshError("no more")

    monkeypatch.setattr(module, "_configured", planning)
    monkeypatch.setattr(Trainer, "train_step", fail)
    with pytest.raises(RowmeshError, match="no more"):
        run_training(resolve(config_file))
    assert "rowmesh-planner" not in [thread.name for thread in threading.enumerate()]


def test_a_run_keeps_the_plan_it_came_to_and_the_first(config_file, tmp_path, monkeypatch, capsys):
    def follow(trainer, *_):
        plan = trainer.job.embeddings.plan
        halves = (
            TablePlan(table.shape, (RowRange(0, 1, "replicated"), RowRange(1, table.shape.num_rows)))
            for table in plan.tables
        )
        trainer.job.embeddings.migrate(Plan(tuple(halves), 1, 1, "halves"))

    monkeypatch.setattr("rowmesh.run.loop.train", follow)
    run_training(resolve(config_file))
    run = RunFolder(tmp_path / "run")
    assert (Plan.load(run.plan).strategy, Plan.load(run.first_plan).strategy) == ("halves", "cyclic")
    capsys.readouterr()
    run_evaluation(run.path)
    assert f"plan      halves, {run.plan}, as in training: " in capsys.readouterr().out
    run_training(resolve(config_file), overwrite=True)  # what a run wrote, another may replace


def test_a_run_that_keeps_its_plan_has_no_other(config_file, tmp_path, monkeypatch):
    monkeypatch.setattr("rowmesh.run.loop.train", lambda *_: None)
    run_training(resolve(config_file))
    assert not RunFolder(tmp_path / "run").first_plan.exists()


@pytest.mark.parametrize("enabled", ["on", "auto"])
def test_dynamic_tables_are_not_followed(enabled):
    rules = {"storage": "dynamic", "dynamic": Dynamic(capacity=9), "initializer": Uniform(bound=0.1)}
    table = TableSpec(name="item", dim=4, **rules)
    hot = TablePlan(TableShape("hot", 9, 16, 16), (RowRange(0, 9, "replicated"),))
    collection = SimpleNamespace(plan=Plan((hot,), 2, 2), tables=(table,))
    drift = SimpleNamespace(enabled=enabled)
    config = SimpleNamespace(placement=SimpleNamespace(drift=drift))
    job = SimpleNamespace(config=config, embeddings=collection, mesh=SimpleNamespace(world_size=2))
    if enabled == "auto":
        assert module._configured(SimpleNamespace(), job) is None
    else:
        with pytest.raises(ConfigurationError, match=r"cannot follow tables \['item'\], which are dynamic"):
            module._configured(SimpleNamespace(), job)
