"""Runs that publish while they train: readers have the model of some step, whole, whatever happens to the run."""

import contextlib
import io
import signal

import numpy as np
import pytest
import torch

from rowmesh import checkpoint
from rowmesh.checkpoint.rows import SavedKnown, SavedRows, as_float
from rowmesh.errors import ConfigurationError, StoreError
from rowmesh.publish import PublishedReader, open_target
from rowmesh.publish.generation import Generation
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from tests.support.killed_runs import train_killed, train_once
from tests.support.redis_server import redis_server as redis_server
from tests.support.runs import start

DYNAMIC = [
    "tables.storage=dynamic",
    "tables.dynamic.capacity=120",
    "tables.dynamic.shards=2",
    "tables.initializer.bound=0.1",
    "data.batch_size=16",
]
"""Rows come and go."""
DEMOTING = [
    *DYNAMIC,
    "tables.dynamic.capacity=64",
    "tables.dynamic.mode=demote",
    "tables.dynamic.store=memory",
    "tables.dynamic.store_capacity=60",
]
"""They go to a store, which forgets some."""
STEPS = ["train.steps=8", "train.patience=0"]
OFTEN = ["publish.every_steps=2", "publish.keep_last=100", "publish.whole_every=3"]


def said(options):
    """What a run prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run_training(options)
    return out.getvalue()


def model_rows(run):
    """Of each table of a run's model: ids, which a reader is to find, and their vectors."""
    folder = run / "model"
    manifest = checkpoint.read_manifest(folder)
    found = {}
    for name, table in manifest.tables.items():
        if table.known:
            parts = list(SavedKnown(folder, manifest, name).read(1000))
            ids, vectors = (np.concatenate([part[at] for part in parts]) for at in (0, 2))
        else:
            ids, vectors = np.arange(table.num_rows), SavedRows(folder, manifest, name).read(range(table.num_rows))
        found[name] = ids, as_float(torch.as_tensor(vectors)).astype(np.float32)
    return found


def check(url, run, step=8, missing=None, computed=()):
    """A reader has the model of a run to the bit: rows and network; those of computed tables to rounding."""
    reader = PublishedReader(open_target(url), missing=missing)
    assert reader.generation.step == step
    for name, (ids, vectors) in model_rows(run).items():
        within = 1e-6 if name in computed else 0.0
        np.testing.assert_allclose(reader.look_up(name, ids), vectors, rtol=within, atol=within, err_msg=name)
    saved = torch.load(next((run / "model").glob("*/dense.pt")), weights_only=True)["network"]
    for name, tensor in reader.network().items():
        assert torch.equal(tensor, saved[name])
    return reader


def chains(url, numbers):
    """Of each generation its step, and how many generations have its rows."""
    target = open_target(url)
    found = [Generation.read(target.manifest(number) or b"", target.name) for number in numbers]
    return [(generation.step, len(generation.chain)) for generation in found]


@pytest.mark.parametrize(
    "options",
    [
        [],
        [*DYNAMIC, "pipeline.depth=2"],
        DEMOTING,
        ["tables.storage=tiered", "tiers.fast_rows=300", "tables.dtype=bfloat16"],
        ["tables.C3.storage=tensor_train", "tables.tensor_train.optimizer.name=adagrad"],
    ],
    ids=["dense", "dynamic", "demoting", "tiered", "tensor-train"],
)
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_readers_have_the_model(ranks, config_file, tmp_path, options, num_ranks):
    url = f"parquet:{tmp_path / 'published'}"
    options = [*STEPS, *OFTEN, *options, f"publish.to={url}"]
    assert ranks.run(train_once, config_file, options, "no", "", world_size=num_ranks) == [""] * num_ranks
    check(url, tmp_path / "run", computed=["C3"] if "tensor_train" in str(options) else [])
    assert chains(url, range(1, 5)) == list(zip((2, 4, 6, 8), (1, 2, 3, 1), strict=True))


@pytest.mark.parametrize(
    "kind, tables",
    [("parquet", DYNAMIC), ("rocksdb", DYNAMIC), ("redis", DYNAMIC), ("parquet", DEMOTING)],
    ids=["parquet", "rocksdb", "redis", "demoting"],
)
def test_what_is_gone_is_not_served(config_file, tmp_path, request, kind, tables):
    if kind == "redis":
        url = request.getfixturevalue("redis_server").url
    else:
        url = f"{kind}:{tmp_path / 'published'}"
    if kind == "rocksdb":
        pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")
    run_training(resolve(config_file, [*STEPS, *tables, "publish.every_steps=1", f"publish.to={url}"]))
    reader = check(url, tmp_path / "run", missing="zero")
    assert len(reader.generation.chain) == 8
    for name, (ids, _) in model_rows(tmp_path / "run").items():
        others = np.setdiff1d(np.arange(300), ids)
        assert not reader.look_up(name, others).any()


def test_an_unknown_id_reads_what_it_reads_in_the_model(config_file, tmp_path):
    url = f"parquet:{tmp_path / 'published'}"
    options = [*STEPS, *DYNAMIC, "tables.dynamic.capacity=2000", f"publish.to={url}"]  # C1 has fewer ids than frames
    run_training(resolve(config_file, [*options, "train.steps=1"]))
    few = PublishedReader(open_target(url))
    assert chains(url, [1]) == [(1, 1)]  # at the end alone
    run_training(resolve(config_file, [*options, "tables.optimizer.lr=0.0", f"run.folder={tmp_path / 'same'}"]))
    ids, initial = model_rows(tmp_path / "same")["C3"]
    unknown = ~np.isin(ids, model_rows(tmp_path / "run")["C3"][0])
    assert unknown.sum() > 10
    assert np.array_equal(few.look_up("C3", ids[unknown]), initial[unknown])


def test_averaged_replicas_are_published_when_they_are_equal(ranks, config_file, tmp_path):
    url = f"parquet:{tmp_path / 'published'}"
    averaged = ["parallel.replicas=2", "parallel.synchronization=average", "parallel.sync_every=4"]
    options = [*STEPS, *OFTEN, *averaged, f"publish.to={url}"]
    assert ranks.run(train_once, config_file, options, "no", "", world_size=2) == ["", ""]
    check(url, tmp_path / "run")
    assert chains(url, [1, 2]) == [(4, 1), (8, 2)]


def test_the_best_model_is_published_at_the_end(config_file, tmp_path):
    url = f"parquet:{tmp_path / 'published'}"
    stops = ["train.patience=2", "train.eval_every=2", "optimizer.lr=0.3", "tables.optimizer.lr=0.5"]
    run_training(resolve(config_file, [*OFTEN, *stops, "train.epochs=6", f"publish.to={url}"]))
    kept = checkpoint.read_manifest(tmp_path / "run" / "model").metadata
    assert kept["steps"] < kept["trained_steps"]
    reader = check(url, tmp_path / "run", kept["steps"])
    assert reader.generation.is_whole


def test_minutes_are_counted_by_rank_0(ranks, config_file, tmp_path):
    url = f"parquet:{tmp_path / 'published'}"
    options = [*STEPS, "publish.every_minutes=1e-9", "publish.keep_last=100", f"publish.to={url}"]
    assert ranks.run(train_once, config_file, options, "no", "", world_size=2) == ["", ""]
    assert [step for step, _ in chains(url, range(1, 9))] == list(range(1, 9))


@pytest.mark.parametrize("fault", ["publish.rows@7,rank1=ENOSPC", "publish.network@2=ENOSPC"])
def test_a_failure_is_a_line_and_the_next_version_is_whole(ranks, config_file, tmp_path, fault):
    url = f"parquet:{tmp_path / 'published'}"
    options = [*STEPS, *OFTEN, f"publish.to={url}", "tables.C3.frozen=true"]
    assert ranks.run(train_once, config_file, options, "no", fault, world_size=2) == ["", ""]
    check(url, tmp_path / "run")
    assert chains(url, range(1, 4)) == [(2, 1), (6, 1), (8, 2)]


@pytest.mark.parametrize("kind", ["parquet", "redis"])
def test_a_failure_says_what_failed(config_file, tmp_path, kind):
    (tmp_path / "file").touch()
    url = f"parquet:{tmp_path / 'file' / 'published'}"
    if kind == "redis":
        pytest.importorskip("redis", reason="the package redis is not installed")
        url = "redis://127.0.0.1:1/0"  # nobody answers
    options = [*STEPS, "publish.every_steps=4", f"publish.to={url}", "publish.retry_s=0.0"]
    text = said(resolve(config_file, options))
    assert "what step 4 left cannot be published" in text
    assert text.count("; training goes on") == 2  # after steps 4 and 8
    last = [line for line in text.splitlines() if "cannot be published" in line][-1]
    assert last.endswith("; the model of the run is written, and readers keep what was published before")
    with pytest.raises(StoreError, match=r"publish.on_failure is stop"):
        run_training(resolve(config_file, [*options, "publish.on_failure=stop", f"run.folder={tmp_path / 'other'}"]))


@pytest.mark.parametrize("options", [[], DYNAMIC], ids=["dense", "dynamic"])
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_interrupted_run_publishes_what_one_does_that_is_not(ranks, config_file, tmp_path, options, num_ranks):
    url = f"parquet:{tmp_path / 'published'}"
    options = [*STEPS, *OFTEN, *options, "checkpoint.every_steps=3", f"publish.to={url}"]
    kills = ["loop.step@5=raise", "publish.part@2=raise"]  # after steps 4 and 6 are published; amid step 8
    train_killed(ranks, config_file, options, num_ranks, kills)
    check(url, tmp_path / "run")
    # Resumed after step 3, it leaves out step 4, which is published; steps 6 and 8 are of the next lives.
    assert [step for step, _ in chains(url, range(1, 5))] == [2, 4, 6, 8]
    assert Generation.read(open_target(url).newest() or b"", "").run


@pytest.mark.parametrize(
    "point",
    [
        "publish.network@2",
        pytest.param("publish.rows@7", marks=pytest.mark.slow),
        pytest.param("publish.removed@1", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_while_it_publishes_leaves_the_last_version(config_file, tmp_path, point):
    url = f"parquet:{tmp_path / 'published'}"
    options = [*STEPS, "publish.every_steps=2", "publish.keep_last=1", "publish.whole_every=1", f"publish.to={url}"]
    process = start(config_file, *options, "checkpoint.every_steps=2", faults=f"{point}=kill")
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGKILL, (out, err)
    before = PublishedReader(open_target(url))
    step = 4 if "removed" in point else 2
    assert before.generation.number == step // 2
    assert before.generation.step == step
    assert all(before.look_up(name, np.arange(3)).shape[0] == 3 for name in before.generation.tables)
    run_training(resolve(config_file, [*options, "checkpoint.every_steps=2"]), resume="latest")
    check(url, tmp_path / "run")
    assert open_target(url).numbers() == [step // 2 + 2]  # those of steps 6 and 8 follow: the run went on after step 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["publish.to=nowhere"], "'nowhere' is nowhere to publish to"),
        (["publish.every_steps=3"], "say where to with publish.to"),
        (["publish.to=parquet:x", "publish.keep_last=0"], "publish.keep_last"),
    ],
)
def test_mistakes_are_refused(config_file, options, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve(config_file, options)
