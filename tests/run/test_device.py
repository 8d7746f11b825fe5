"""Training on a GPU, or where its kernels are interpreted, by configuration."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch
from rowmesh._support import memory
from rowmesh.errors import ConfigurationError
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.placement.drift import Planner
from rowmesh.placement.request import Request
from rowmesh.placement.topology import Topology
from rowmesh.run import steps
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.config import DriftConfig
from rowmesh.run.drift import Drift
from rowmesh.run.resolve import resolve
from rowmesh.tables import TableSpec
from rowmesh.tables.update_rules import RowWiseAdaGrad
from tests.run import test_publications
from tests.run.test_publications import DYNAMIC as PUBLISHED_DYNAMIC
from tests.run.test_resume import BESIDE, INCREMENTS, check_killed, needs_ranks
from tests.support.devices import READ, device_of
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
kernels_of("pool")  # or all are skipped


CORES = ["tables.tensor_train.min_rows=40", 'tables.tensor_train.optimizer.name="adagrad"']
DYNAMIC = ['tables.storage="dynamic"', "tables.dynamic.capacity=300", "tables.dynamic.spare_frames=2000"]
DYNAMIC += ["tables.initializer.name=uniform", "tables.initializer.bound=0.05"]


@pytest.mark.parametrize("overrides", [[], *(pytest.param(each, marks=pytest.mark.slow) for each in (CORES, DYNAMIC))])
def test_a_run_on_a_device_is_the_run_on_the_cpu(config_file, tmp_path, capsys, overrides):
    """And its model is evaluated on either."""
    found = []
    for trained, other in (("cpu", "cuda"), ("cuda", "cpu")):
        own = ["train.steps=2", "data.batch_size=128", f"train.device={trained}", f"run.folder={tmp_path / trained}"]
        own += overrides
        found.append(run_training(resolve(config_file, own)))
        found.append(run_evaluation(tmp_path / trained, ["data.batch_size=512", f"train.device={other}"]))
    assert "train.device=cuda: " in capsys.readouterr().out
    for metrics in found:
        assert metrics.log_loss == pytest.approx(found[0].log_loss, rel=1e-5)
        assert metrics.auc == pytest.approx(found[0].auc, abs=1e-3)


def test_rows_of_tiered_tables_that_the_host_has_must_fit(config_file, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "rooms", lambda: {"": 1000})
    own = ["train.device=cuda", f"run.folder={tmp_path / 'run'}", 'tables.storage="tiered"']
    with pytest.raises(ConfigurationError, match="has 1 kB of memory available"):
        run_training(resolve(config_file, own))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "mode",
    [
        *("pipelined", "tiered", "copies", "exact replicas", "averaged replicas", "cores", "dynamic"),
        "dynamic, averaged replicas, increments beside steps",
    ],
)
def test_a_run_that_is_killed_ends_as_one_that_was_not(ranks, config_file, tmp_path, mode, world_size):
    """With checkpoints beside steps, and increments."""
    if world_size == 1 and needs_ranks(mode):
        pytest.skip("there is one rank")
    options = ["train.device=cuda", "train.steps=7", *BESIDE, *INCREMENTS]
    options += ["tables.dynamic.spare_frames=400"] if "dynamic" in mode else ["data.batch_size=64"]
    options += ["parallel.sync_every=2"] if "averaged" in mode else []
    check_killed(ranks, config_file, tmp_path, mode, world_size, ["loop.step@6=raise"], 2, *options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [[], [*PUBLISHED_DYNAMIC, "tables.dynamic.spare_frames=400"]], ids=["dense", "dynamic"]
)
def test_what_changed_on_a_device_is_published(ranks, config_file, tmp_path, options):
    test_publications.test_readers_have_the_model(ranks, config_file, tmp_path, [*options, "train.device=cuda"], 2)


@pytest.mark.slow
def test_a_run_with_tiered_tables_is_that_with_dense_ones(config_file, tmp_path):
    found = []
    for storage in ("dense", "tiered"):
        own = ["train.steps=2", "data.batch_size=64", "train.device=cuda", f"run.folder={tmp_path / storage}"]
        own += [f'tables.storage="{storage}"', "tiers.fast_share=0.01", "tiers.fast_rows=600"]
        found.append(run_training(resolve(config_file, own)))
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_pipeline_on_a_device_trains_the_same_model(config_file, tmp_path):
    found = []
    for device, own in (("cpu", []), ("cuda", ["pipeline.depth=1", "pipeline.micro_batches=2"])):
        common = ["train.steps=2", "data.batch_size=256", f"train.device={device}", f"run.folder={tmp_path / device}"]
        found.append(run_training(resolve(config_file, [*common, *own])))
    assert found[1].log_loss == pytest.approx(found[0].log_loss, rel=1e-5)


TIERED = ['tables.storage="tiered"', "tiers.fast_share=0.01", "tiers.fast_rows=600"]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], pytest.param(TIERED, marks=pytest.mark.slow)])
def test_a_device_is_timed_for_a_trace_and_for_a_choice(config_file, tmp_path, capsys, monkeypatch, overrides):
    monkeypatch.setattr(steps, "WARM_UP_STEPS", 1)
    monkeypatch.setattr(steps, "MEASURED_STEPS", 1)
    own = ["train.steps=4", "data.batch_size=64", "train.device=cuda", f"run.folder={tmp_path / 'run'}"]
    choice = ['pipeline.depth="auto"', "pipeline.micro_batches=2", "pipeline.sizes=light_ends"]
    choice += ["pipeline.communication_share=auto", "pipeline.trace=true"]
    run_training(resolve(config_file, own + choice + overrides))
    assert "ms a step expected" in capsys.readouterr().out
    check_trace(tmp_path / "run", 4, {"tier": "retrieve"} if overrides else {})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(0 <= json.loads(line)["exposed_share"] <= 1 for line in lines if '"kind": "train"' in line)


def check_trace(run, num_batches, more):
    """Every stage of every batch is there, with an arrow, and each thread does one thing after the other."""
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    threads = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert set(threads.values()) == {"worker", "communication", "compute", "reader", *more}
    spans = [each for each in events if each["ph"] == "X"]
    stages = {"read", "route", "open", "rows", "wait", "compute", "dense", "gradients", "update", *more.values()}
    for stage in stages:
        found = [each["args"]["batch"] for each in spans if each["name"] == stage and each["dur"] >= 0]
        assert len(found) >= num_batches, stage
    for where in threads:
        mine = sorted((each for each in spans if (each["pid"], each["tid"]) == where), key=lambda each: each["ts"])
        for before, after in pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] + 1.0  # µs: of seconds since 1970
    assert {(each["ts"], each["tid"]) for each in events if each["ph"] in "st"} == {
        (each["ts"], each["tid"]) for each in spans
    }


@pytest.mark.slow
def test_ranks_choose_alike(train, tmp_path):
    """Or they would send each other different messages."""
    options = ["train.device=cuda", "data.batch_size=64", "pipeline.depth=auto", "pipeline.micro_batches=auto"]
    run = train("auto", *options, "pipeline.trace=true", "parallel.transport=collective")
    assert "pipeline  off: " in run.out or "ms a step expected" in run.out
    events = json.loads((tmp_path / "auto" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('pipeline.exchange="naive"', "cannot be combined with pipeline.exchange=naive"),
        ("pipeline.verify=true", "cannot be combined with pipeline.verify yet"),
    ],
)
def test_what_needs_the_cpu_is_refused_before_a_run_begins(config_file, tmp_path, override, message):
    with pytest.raises(ConfigurationError, match=message):
        run_training(resolve(config_file, ['train.device="cuda"', override]))
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_an_earlier_run_survives_a_pipeline_that_is_not_possible(config_file, tmp_path):
    run = tmp_path / "run"
    run_training(resolve(config_file, ["train.steps=1", f"run.folder={run}"]))
    model = (run / "model" / "manifest.json").read_text()
    impossible = ["train.device=cuda", "pipeline.depth=1", "pipeline.verify=true", f"run.folder={run}"]
    with pytest.raises(ConfigurationError, match=r"cannot be combined with pipeline\.verify yet"):
        run_training(resolve(config_file, impossible), overwrite=True)
    assert (run / "model" / "manifest.json").read_text() == model


ITEM = TableSpec(name="item", num_rows=60, dim=4, optimizer=RowWiseAdaGrad(lr=0.1))


def follow(mesh, device, transport):
    """Messages and measurements after every step of traffic that moves, and the rows."""
    device = device_of(mesh) if (device, transport) == ("cuda", "one_sided") else device
    shape = TableShape.of(ITEM)
    plan = Plan((TablePlan(shape, (RowRange(0, 10, "replicated"), RowRange(10, 60))),), 2, 2)
    collection = EmbeddingCollection([ITEM], mesh=mesh, transport=transport, plan=plan, device=device)
    optimizer, planner = EmbeddingOptimizer(collection), None
    if mesh.rank == 0:
        planner = Planner(plan, "cyclic", Topology.uniform(2), Request(batch_size=32, mode="infer", extra_memory=0.2))
    drift, found = Drift(collection, planner, DriftConfig(check_every=2, sample_every=1)), []
    for step in range(12):
        generator = np.random.default_rng((mesh.rank, step))
        hot = generator.integers(0, 10, 32) + (30 if step >= 3 else 0)
        items = np.where(generator.random(32) < 0.8, hot, generator.integers(0, 60, 32))
        batch = SparseBatch.from_dense(("item",), torch.from_numpy(items[None]))
        collection(batch).values.square().sum().backward()
        optimizer.step()
        found.append((drift.after_step(batch).rpartition(" in ")[0], drift.measured))
        if planner is not None:
            planner.wait()  # however slow, it is taken over at the next check
    drift.close()
    rows = torch.cat([piece.values for piece in collection.held_rows("item")])
    collection.close()
    return found, rows


@pytest.mark.parametrize(
    "transport", [pytest.param("collective", marks=pytest.mark.slow), pytest.param("one_sided", marks=READ)]
)
def test_traffic_that_moves_is_followed_as_on_the_cpu(ranks, transport):
    runs = [ranks.run(follow, device, transport) for device in ("cuda", "cpu")]
    for (found, rows), (expected, theirs) in zip(*runs, strict=True):
        assert found == expected
        assert [bool(messages) for messages, _ in found].count(True) == 1
        torch.testing.assert_close(rows, theirs)


@pytest.mark.slow
def test_a_pipeline_measures_the_traffic_that_the_cpu_does(train):
    drift = [f"placement.drift.{key}" for key in ("enabled=on", "check_every=1", "sample_every=1", "min_balance=1.0")]
    runs = [
        train(name, "placement.strategy=cyclic", *drift, *own)
        for name, own in (
            ("cpu", ["parallel.transport=collective"]),
            ("gpu", ["train.device=cuda", "pipeline.depth=1"]),
        )
    ]
    messages = [re.findall(r"drift after step \d+: (balance [^;]*); ", run.out)[0] for run in runs]
    assert messages[0] == messages[1]
    assert runs[0].metrics == pytest.approx(runs[1].metrics, abs=1e-9)
