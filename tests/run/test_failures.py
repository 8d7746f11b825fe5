"""How runs end that cannot go on: which message, which status, what is left."""

import importlib
import math
import os
import re
import shutil
import signal

import pyarrow as pa
import pytest

from rowmesh.errors import DataError
from rowmesh.mesh import Mesh
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from tests.support.commands import launch
from tests.support.prepared import renew_checksums
from tests.support.ranks import RankError
from tests.support.runs import LONG, rank_processes, start, wait_for_steps


@pytest.fixture
def spoil(clicks, tmp_path):
    """Copies the data set and changes a value of one training sample behind preparation's back."""

    def spoil(column: str, sample: int, value: float) -> str:
        folder = shutil.copytree(clicks.folder, tmp_path / "spoilt")
        path = folder / "train.arrow"
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            schema, tables = reader.schema, [reader.get_batch(i) for i in range(reader.num_record_batches)]
            values = tables[0].column(column).to_pylist()
            values[sample] = value
            index = schema.get_field_index(column)
            tables[0] = tables[0].set_column(index, schema.field(index), pa.array(values, schema.field(index).type))
            with pa.ipc.new_file(str(tmp_path / "new.arrow"), schema) as writer:
                for table in tables:
                    writer.write_batch(table)
        (tmp_path / "new.arrow").replace(path)
        return f"data.folder={renew_checksums(folder)}"

    return spoil


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("I3", math.nan, "dense values are not finite, the first of them nan in feature 'I3' of sample"),
        ("I1", math.inf, "dense values are not finite, the first of them inf in feature 'I1' of sample"),
        ("label", 2.0, "labels 'label' are neither 0 nor 1, the first of them 2.0"),
    ],
)
def test_spoilt_data_name_the_step_and_the_feature(config_file, clicks, spoil, column, value, message):
    column = clicks.schema.label if column == "label" else column
    options = [spoil(column, 700, value), "data.shuffle=false"]
    with pytest.raises(DataError) as error:
        run_training(resolve(config_file, options))
    assert str(error.value).startswith("step 3 on rank 0: 1 of")
    assert message in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["one_sided", "collective"])
def test_a_failing_rank_ends_the_run(config_file, spoil, tmp_path, transport):
    options = [spoil("I3", 700, math.nan), "data.shuffle=false", f"parallel.transport={transport}"]
    done = launch(["train", str(config_file), *options, *LONG], ranks=2)
    assert done.status != 0
    assert "rowmesh (rank 1): error: step 3 on rank 1: 1 of" in done.err
    assert not (tmp_path / "run" / ".lock").exists()
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("transport", ["one_sided", pytest.param("collective", marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_run(config_file, tmp_path, transport):
    process = start(config_file, f"parallel.transport={transport}", *LONG, ranks=2)
    wait_for_steps(process, tmp_path / "run" / "metrics.jsonl")
    ranks = rank_processes(process)
    ranks["1"].kill()
    _, err = process.communicate(timeout=90)
    assert process.returncode != 0
    # Whichever of the peer and torchrun notices first.
    assert re.search(r"rank 0\): error: rank 1 \(process \d+\) died while|rank      : 1", err), err
    assert not any(rank.is_running() for rank in ranks.values()), err
    assert not (tmp_path / "run" / ".lock").exists(), err


def train_and_die(mesh, config, place):
    """Trains, but rank 1 ends without a word where it would call a function."""
    name, _, attribute = place.rpartition(".")
    if mesh.rank == 1:
        setattr(importlib.import_module(name), attribute, lambda *_, **__: os._exit(3))
    Mesh.connect = staticmethod(lambda timeout_s: mesh)  # this process ends after the test
    run_training(config)


@pytest.mark.parametrize(
    ("place", "doing"),
    [
        ("rowmesh.run.phases.describe", "setting up"),
        # Whether or not rank 0 has begun to write when it looks.
        ("rowmesh.checkpoint.save", "(saving the model|writing a checkpoint)"),
        ("rowmesh.run.evaluate.AllPredictions", "evaluating test"),
    ],
)
def test_a_rank_that_dies_is_named_wherever_it_dies(config_file, tmp_path, ranks, place, doing):
    with pytest.raises(RankError) as error:
        ranks.run(train_and_die, resolve(config_file, ["train.steps=2"]), place)
    assert re.search(rf"PeerError: rank 0: rank 1 \(process \d+\) died while {doing}", error.value.failed[0])
    assert not (tmp_path / "run" / ".lock").exists()
    assert (tmp_path / "run").exists() == (doing != "setting up")


@pytest.mark.slow
@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_is_one_line_and_keeps_the_metrics(config_file, tmp_path):
    process = start(config_file, *LONG)
    wait_for_steps(process, tmp_path / "run" / "metrics.jsonl")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130
    assert err == "rowmesh: interrupted\n"
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / ".lock").exists()
