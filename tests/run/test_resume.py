"""Runs that are killed and resumed end as those that were never touched."""

import shutil

import pytest
import torch

from rowmesh import checkpoint
from rowmesh._support.faults import arm
from rowmesh.checkpoint import CheckpointWriteError
from rowmesh.checkpoint.series import Series
from rowmesh.cli.__main__ import main
from rowmesh.data import PlantedConfig
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from rowmesh.run.run_log import REPLICAS
from tests.support.clicks import prepare_clicks
from tests.support.killed_runs import lines_of, model_of, rows_of, train_killed, train_once, train_untouched

COLLECTIVE = ["parallel.transport=collective"]
TIERED = ["tables.storage=tiered", "tiers.fast_share=0.01", "data.batch_size=64", "train.steps=16"]
DYNAMIC = [
    "tables.storage=dynamic",
    "tables.dynamic.capacity=64",  # ids of one table come and go: it has 300
    "tables.dynamic.shards=2",
    "tables.initializer.bound=0.1",
    "data.batch_size=16",
    "train.steps=16",
]
BESIDE, INCREMENTS = ["checkpoint.asynchronous=true"], ["checkpoint.incremental=4"]
AVERAGED = ["parallel.replicas=2", "parallel.synchronization=average", "parallel.sync_every=4"]
FAST_ROWS = {1: 170, 2: 100, 4: 60}  # of 381, 191 and 96 that a rank has
ROOM = ("all_gathers", "bytes_sent", "bytes_received")  # to which messages about room add
ROOMY = [option for option in DYNAMIC if "capacity" not in option]
MODES = {
    "plain": [],
    "one-sided": ["parallel.transport=one_sided"],
    "pipelined": [*COLLECTIVE, "pipeline.depth=2", "pipeline.micro_batches=2"],
    "windows, pipelined": [*COLLECTIVE, "pipeline.depth=2", "pipeline.micro_batches=2", "train.progressive_every=5"],
    "pipelined, one-sided": ["parallel.transport=one_sided", "pipeline.depth=2"],
    "tiered": TIERED,
    "tiered, pipelined": [*COLLECTIVE, *TIERED, "pipeline.depth=1"],
    "copies": ["placement.strategy=auto", "placement.extra_memory=0.3", "placement.drift.check_every=4"],
    "exact replicas": ["parallel.replicas=2"],
    "averaged replicas": AVERAGED,
    "averaged replicas, increments beside steps": [*AVERAGED, *BESIDE, *INCREMENTS],
    "cores": [
        "tables.tensor_train.min_rows=40",
        'tables.tensor_train.optimizer.name="adagrad"',
        "tables.tensor_train.rank=2",
    ],
    "adam": ['tables.optimizer.name="adam"', 'schedule.name="cosine"', "schedule.warmup_steps=4"],
    "dropout": [
        "model.name=tests.support.own_models:Dropping",
        "model.bottom=[512, 256, 64]",  # the default: none is given
        "model.top=[512, 256]",
    ],
    "dynamic": DYNAMIC,
    "dynamic, pipelined, beside steps": [*COLLECTIVE, *DYNAMIC, "pipeline.depth=2", *BESIDE],
    "dynamic, one-sided, increments beside steps": ["parallel.transport=one_sided", *DYNAMIC, *BESIDE, *INCREMENTS],
    "dynamic, exact replicas, increments": [*DYNAMIC, *INCREMENTS, "parallel.replicas=2"],
    "dynamic, averaged replicas, increments beside steps": [*DYNAMIC, *AVERAGED, *BESIDE, *INCREMENTS],
    "dynamic, demoting": [*DYNAMIC, "tables.dynamic.mode=demote", "tables.dynamic.store=memory"],
    "dynamic, demoting, pipelined, beside steps": [
        *DYNAMIC,
        "tables.dynamic.mode=demote",
        "tables.dynamic.store=file:{records}",
        "tables.dynamic.store_capacity=90",
        "pipeline.depth=2",
        *BESIDE,
        *INCREMENTS,
    ],
    "dynamic, sketch, increments": [
        *DYNAMIC,
        *INCREMENTS,
        "tables.dynamic.admit_after=2",
        "tables.dynamic.sketch_width=8",
        "tables.dynamic.eviction=lfu",
        "tables.dynamic.decay_steps=5",
    ],
    "early stopping": ["train.patience=3", "train.eval_every=2", "optimizer.lr=0.02", "tables.optimizer.lr=0.3"],
}


def needs_ranks(mode):
    """Whether it is none on one rank."""
    return "copies" in mode or "replicas" in mode


def check_killed(ranks, config_file, tmp_path, mode, world_size, kills, every=3, *more):
    fast_rows = FAST_ROWS[world_size] * (1.4 if "pipelined" in mode else 1)  # two batches are in sight
    options = [option.format(records=tmp_path / "records") for option in MODES[mode]]
    options += [f"checkpoint.every_steps={every}", f"tiers.fast_rows={int(fast_rows)}", *more]
    for name, train in (("untouched", train_untouched), ("killed", train_killed)):
        args = (kills,) if train is train_killed else ()
        train(ranks, config_file, [*options, f"run.folder={tmp_path / name}"], world_size, *args)
    untouched, killed = tmp_path / "untouched", tmp_path / "killed"
    assert model_of(killed) == model_of(untouched)
    assert (killed / "evaluation" / "test.json").exists()
    for name in ("metrics.jsonl", "counters.jsonl"):
        found, expected = lines_of(killed, name), lines_of(untouched, name)
        if "pipelined" in mode:  # of dynamic tables: how far ahead batches were opened
            _ = [line.pop("hit_rate", None) for line in (*found, *expected)]
        if name == "counters.jsonl" and "exact replicas" in mode:  # they agree anew on room for the sums that they send
            _ = [line.pop(key, None) for line in (*found, *expected) for key in ROOM if REPLICAS in line["group"]]
        if name == "counters.jsonl" and ("pipelined" in mode or "tiered" in mode):
            found, expected = ([(line["step"], line["group"]) for line in lines] for lines in (found, expected))
        assert found == expected


@pytest.mark.parametrize(
    "mode, world_size",
    [
        ("windows, pipelined", 2),
        ("tiered, pipelined", 2),
        ("copies", 2),
        ("dynamic, one-sided, increments beside steps", 2),
        ("dynamic, demoting, pipelined, beside steps", 2),
        ("averaged replicas", 2),
        ("dynamic, averaged replicas, increments beside steps", 2),
        ("cores", 1),
        ("dropout", 2),
        ("early stopping", 1),
    ],
)
def test_a_run_that_is_killed_ends_as_one_that_was_not(ranks, config_file, tmp_path, mode, world_size):
    check_killed(ranks, config_file, tmp_path, mode, world_size, ["loop.step@8=raise"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_change_no_line_of_the_logs(ranks, config_file, tmp_path, world_size):
    """Lines come every five steps, checkpoints every three, and the run that has them is killed between both."""
    options = [*DYNAMIC, f"run.folder={tmp_path / 'without'}"]
    train_untouched(ranks, config_file, options, world_size)
    options = [*DYNAMIC, f"run.folder={tmp_path / 'with'}", "checkpoint.every_steps=3"]
    train_killed(ranks, config_file, options, world_size, ["loop.step@8=raise"])
    for name in ("metrics.jsonl", "counters.jsonl"):
        assert lines_of(tmp_path / "with", name) == lines_of(tmp_path / "without", name)
    assert len({line["hit_rate"] for line in lines_of(tmp_path / "with", "metrics.jsonl")}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_is_killed_at_every_step_ends_as_one_that_was_not(ranks, config_file, tmp_path, mode, world_size):
    """Each life of the process comes one step further than the one before."""
    if world_size == 1 and needs_ranks(mode):
        pytest.skip("there is one rank")
    every = 4 if "averaged" in mode else 1
    kills = ["loop.step@1=raise", *["loop.step@2=raise"] * 29]
    if "averaged" in mode:
        kills = [f"loop.step@{number}=raise" for number in (1, 2, 3, 5, 5, 6, 7, 8)]
    if mode == "early stopping":
        kills = kills[:4]
    check_killed(ranks, config_file, tmp_path, mode, world_size, kills, every, "train.epochs=4", "train.steps=30")


def test_the_best_model_is_part_of_a_checkpoint(config_file, tmp_path):
    """It is of a step long before the last checkpoint, and its own folder is lost."""
    options = ["train.epochs=30", "train.steps=0", "train.patience=3", "train.eval_every=4", "checkpoint.every_steps=5"]
    options += ["optimizer.lr=0.02", "tables.optimizer.lr=0.3"]
    expected = train(config_file, *options, f"run.folder={tmp_path / 'untouched'}")
    metadata = checkpoint.read_manifest(tmp_path / "untouched" / "model").metadata
    assert metadata["trained_steps"] == metadata["steps"] + 12
    killed(config_file, metadata["trained_steps"] - 1, *options)
    assert steps_of(tmp_path / "run" / "checkpoints")[-1] > metadata["steps"] + 5
    shutil.rmtree(tmp_path / "run" / "best")
    assert train(config_file, *options, resume="latest") == expected
    assert checkpoint.read_manifest(tmp_path / "run" / "model").metadata == metadata
    assert model_of(tmp_path / "run") == model_of(tmp_path / "untouched")
    assert not (tmp_path / "run" / "best").exists()


# On other ranks


def check_on(ranks, config_file, tmp_path, world_sizes, *later):
    """A run of two ranks that goes on with others is that of two ranks to rounding."""
    options = ["tables.dtype=float64", "checkpoint.every_steps=3", "train.log_every=4"]
    untouched = tmp_path / "untouched"
    train_untouched(ranks, config_file, [*options, f"run.folder={untouched}"], 2)
    begun = tmp_path / "begun"
    here = [*options, f"run.folder={begun}"]
    assert all(ranks.run(train_once, config_file, here, "no", "loop.step@8=raise", world_size=2))
    for world_size in world_sizes:
        run = shutil.copytree(begun, tmp_path / f"on {world_size}")
        there = [*options, f"run.folder={run}", *later]
        assert ranks.run(train_once, config_file, there, "latest", "", world_size=world_size) == [""] * world_size
        expected, found = rows_of(untouched), rows_of(run)
        for name, rows in expected.items():
            torch.testing.assert_close(found[name], rows, rtol=1e-6, atol=1e-9)
        pairs = list(zip(lines_of(run, "metrics.jsonl"), lines_of(untouched, "metrics.jsonl"), strict=True))
        assert [found["step"] for found, _ in pairs] == [line["step"] for _, line in pairs]
        assert [found["loss"] for found, _ in pairs] == pytest.approx([line["loss"] for _, line in pairs], rel=1e-6)


def test_a_run_goes_on_with_another_number_of_ranks(ranks, config_file, tmp_path):
    check_on(ranks, config_file, tmp_path, [3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "later", [[], MODES["pipelined"], ["tables.storage=tiered", "tiers.fast_rows=300"], MODES["copies"]], ids=str
)
def test_a_run_goes_on_with_any_number_of_ranks_and_another_layout(ranks, config_file, tmp_path, later):
    check_on(ranks, config_file, tmp_path, [1, 2, 3, 4], *later)


@pytest.mark.slow
def test_a_run_goes_on_with_replicas(ranks, config_file, tmp_path):
    check_on(ranks, config_file, tmp_path, [2, 4], *MODES["exact replicas"])


# What is refused, and what is damaged

SHORT = ["train.steps=6", "checkpoint.every_steps=2", "train.log_every=2"]


def train(config_file, *options, resume="no", **arguments):
    return run_training(resolve(config_file, [*SHORT, *options]), resume=resume, **arguments)


def killed(config_file, at, *options, resume="no", **arguments):
    with arm(f"loop.step@{at}=raise"), pytest.raises(RuntimeError, match="injected"):
        train(config_file, *options, resume=resume, **arguments)


def steps_of(folder):
    return Series(folder).steps()


def test_a_run_that_may_not_go_on_says_why_and_stays(config_file, tmp_path):
    with pytest.raises(RowmeshError, match=r"no checkpoint in .* to resume from; give --resume auto"):
        train(config_file, resume="latest")
    assert not (tmp_path / "run").exists()
    killed(config_file, 5)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ConfigurationError, match=r"another model: tables.dim was 4, is 8; train.seed was 0, is 3\. G"):
        train(config_file, "tables.dim=8", "train.seed=3", resume="auto")
    with pytest.raises(RowmeshError, match="holds a run; give another"):
        train(config_file)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_dynamic_tables_grow_where_a_run_is_resumed(config_file, tmp_path):
    killed(config_file, 5, "tables.dynamic.capacity=70", *ROOMY)
    with pytest.raises(ConfigurationError, match=r"tables.dynamic.capacity was 70, is 69\. Give the keys as they were"):
        train(config_file, "tables.dynamic.capacity=69", *ROOMY, resume="latest")
    train(config_file, "tables.dynamic.capacity=5000", "tables.dynamic.shards=2", *ROOMY, resume="latest")
    assert {each.num_rows for each in checkpoint.read_manifest(tmp_path / "run" / "model").tables.values()} == {5000}


def test_other_data_are_refused(config_file, clicks, tmp_path):
    killed(config_file, 5)
    other = prepare_clicks(tmp_path, {"train": 1000, "validation": 300, "test": 501}, PlantedConfig(num_rows=(50, 7)))
    with pytest.raises(RowmeshError, match="was trained on other data"):
        train(config_file, f"data.folder={other.folder}", resume="latest")
    moved = shutil.copytree(clicks.folder, tmp_path / "moved")
    assert train(config_file, f"data.folder={moved}", resume="latest")


def test_a_damaged_checkpoint_is_said_and_the_one_before_taken(config_file, tmp_path, capsys):
    expected = train(config_file, f"run.folder={tmp_path / 'other'}")
    killed(config_file, 5)
    folder = tmp_path / "run" / "checkpoints"
    assert steps_of(folder) == [2, 4]
    spoil(Series(folder).at(4))
    assert train(config_file, resume="auto") == expected
    out = capsys.readouterr().out
    assert "resume    not from step 4: table 'C1': " in out
    assert "resume    after step 2 of 6" in out
    assert lines_of(tmp_path / "run", "metrics.jsonl") == lines_of(tmp_path / "other", "metrics.jsonl")


def test_where_all_checkpoints_are_damaged_the_run_is_refused(config_file, tmp_path):
    killed(config_file, 3)
    spoil(Series(tmp_path / "run" / "checkpoints").at(2))
    with pytest.raises(RowmeshError, match=r"C1.0.values.npy is damaged"):
        train(config_file, resume="auto")


def spoil(folder):
    path = folder / checkpoint.read_manifest(folder).folder / "C1.0.values.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_run_begins_where_there_is_no_checkpoint_and_a_finished_one_stays(config_file, tmp_path, capsys):
    killed(config_file, 1, resume="auto")
    assert steps_of(tmp_path / "run" / "checkpoints") == []
    assert train(config_file, resume="auto")
    model = model_of(tmp_path / "run")
    for resume in ("auto", "latest"):
        capsys.readouterr()
        assert train(config_file, resume=resume) is None
        assert capsys.readouterr().out == f"resume    nothing to do: {tmp_path / 'run'} is a finished run\n"
    with pytest.raises(ConfigurationError, match=r"train.seed was 0, is 1"):
        train(config_file, "train.seed=1", resume="auto")
    assert model_of(tmp_path / "run") == model


def test_a_run_that_is_to_replace_another_goes_on_beside_it(config_file, tmp_path):
    run = tmp_path / "run"
    first = train(config_file, "train.seed=1")
    killed(config_file, 5, resume="auto", overwrite=True)
    assert steps_of(run / "unfinished" / "checkpoints") == [2, 4]
    former = model_of(run)
    killed(config_file, 1, resume="auto", overwrite=True)
    assert model_of(run) == former
    assert train(config_file, resume="latest") != first
    assert not (run / "unfinished").exists()
    assert steps_of(run / "checkpoints") == [4, 6]


@pytest.mark.parametrize("resume", ["no", "auto"])
@pytest.mark.parametrize("at", ["run.settle@2", "run.exchange@2", "run.vacated", "run.exchanged"])
def test_a_run_that_is_killed_as_it_replaces_another_is_not_trained_again(config_file, tmp_path, capsys, at, resume):
    run = tmp_path / "run"
    train(config_file, "train.seed=1")
    assert train(config_file, f"run.folder={tmp_path / 'other'}")
    with arm(f"{at}=raise"), pytest.raises(RuntimeError, match="injected"):
        train(config_file, resume=resume, overwrite=True)
    capsys.readouterr()
    assert train(config_file, resume="auto", overwrite=resume == "auto") is None
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"former    gone from {run}: the run that replaces it had written its model"
    assert out[1:] == [f"resume    nothing to do: {run} is a finished run"]
    assert model_of(run) == model_of(tmp_path / "other")
    assert steps_of(run / "checkpoints") == [4, 6]
    assert not (run / "unfinished").exists()


def test_another_configuration_replaces_a_run_that_was_killed_before_it_replaced_another(config_file, tmp_path):
    train(config_file, "train.seed=1")
    with arm("run.settle@2=raise"), pytest.raises(RuntimeError, match="injected"):
        train(config_file, "train.seed=2", resume="auto", overwrite=True)
    assert train(config_file, resume="auto", overwrite=True)
    assert resolve(tmp_path / "run" / "config.toml").train.seed == 0


def test_checkpoints_in_a_folder_of_their_own(config_file, tmp_path):
    elsewhere = f"checkpoint.folder={tmp_path / 'elsewhere'}"
    killed(config_file, 5, elsewhere, "checkpoint.keep_last=1")
    assert steps_of(tmp_path / "elsewhere") == [4]
    with pytest.raises(RowmeshError, match="holds checkpoints of another run"):
        train(config_file, elsewhere, f"run.folder={tmp_path / 'other'}")
    assert train(config_file, elsewhere, "checkpoint.keep_every=4", "checkpoint.keep_last=1", resume="latest")
    assert steps_of(tmp_path / "elsewhere") == [4, 6]
    assert not (tmp_path / "run" / "checkpoints").exists()


# Disks that are full

WRITES = ["begin", "prepare", "write_rows", "write_dense", "sync", "publish"]


@pytest.mark.parametrize("point", WRITES)
def test_a_checkpoint_that_cannot_be_written_costs_no_run(config_file, tmp_path, capsys, point):
    with arm(f"checkpoint.{point}@2=ENOSPC"):
        killed(config_file, 5)
    out = capsys.readouterr().out
    said = [line for line in out.splitlines() if "cannot be written" in line]
    text = "the checkpoint after step 4 cannot be written, the last is of step 2: "
    if point == "write_rows":  # the second file of the first
        text = "the checkpoint after step 2 cannot be written, there is none yet: "
    assert len(said) == 1
    assert said[0].startswith(text)
    assert "No space left on device" in said[0]
    assert said[0].endswith("training goes on")
    assert steps_of(tmp_path / "run" / "checkpoints") == ([4] if point == "write_rows" else [2])
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_a_checkpoint_that_cannot_be_written_ends_a_run_that_asks_for_it(config_file, tmp_path):
    with (
        arm("checkpoint.publish@2=ENOSPC"),
        pytest.raises(CheckpointWriteError, match=r"step 4 cannot be written, the last is of step 2: .*is stop\)"),
    ):
        train(config_file, "checkpoint.on_failure=stop")
    assert steps_of(tmp_path / "run" / "checkpoints") == [2]
    assert train(config_file, resume="latest")


def test_a_run_that_is_killed_while_it_resumes_goes_on(config_file, tmp_path):
    expected = train(config_file, f"run.folder={tmp_path / 'other'}")
    killed(config_file, 6)
    for point in ("resume.loaded", "resume.cut@1", "resume.cut@2"):
        with arm(f"{point}=raise"), pytest.raises(RuntimeError, match="injected"):
            train(config_file, resume="auto")
    assert train(config_file, resume="auto") == expected
    for name in ("metrics.jsonl", "counters.jsonl"):
        assert lines_of(tmp_path / "run", name) == lines_of(tmp_path / "other", name)


# Commands


def call(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(each) for each in arguments])
    return stop.value.code


def test_commands_resume_and_look_at_checkpoints(config_file, tmp_path, capsys):
    run = tmp_path / "run"
    assert call("checkpoint", "list", run) == 2
    killed(config_file, 5)
    assert call("train", config_file, *SHORT, "--resume", "train.log_every=3") == 0
    assert "resume    after step 4 of 6" in capsys.readouterr().out
    assert call("checkpoint", "list", run) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in listed] == ["4", "6"]
    assert call("checkpoint", "verify", run / "checkpoints") == 0
    assert capsys.readouterr().out.count("whole ") == 2
    assert call("checkpoint", "show", run / "checkpoints" / "step-000000004") == 0
    shown = capsys.readouterr().out
    assert "step        4, written " in shown
    assert "epoch 0, batch 4" in shown
    assert "C1: 51 × 4 float32, row_wise_adagrad, rows with sum" in shown
    spoil(run / "checkpoints" / "step-000000006")
    assert call("checkpoint", "verify", run) == 2
    assert "step-000000006 of" in capsys.readouterr().err
    assert call("train", config_file, *SHORT, "--resume", "auto") == 0
    assert "nothing to do" in capsys.readouterr().out
