"""Plans of sequence models: rows that are expected in a step are those that steps read, and bytes those they move."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rowmesh.mesh import Mesh
from rowmesh.placement import Plan
from rowmesh.placement.request import Request
from rowmesh.placement.topology import Topology
from rowmesh.report.run_record import read_run
from rowmesh.report.run_tables import tables_of
from rowmesh.run.placement import placed_shapes, problem_of, request_of
from rowmesh.run.resolve import resolve
from rowmesh.run.tasks import open_data, task_of
from tests.support.commands import run_on

LOSSES = {
    "full": ["model.options.loss=full_softmax"],
    "shared": ["model.options.loss=sampled_softmax", "model.options.negatives=20"],
    "shared by popularity": ["model.options.loss=sampled_softmax", "model.options.draw=popularity"],
    "own": ["model.options.loss=binary_cross_entropy"],
    "own by popularity": [
        "model.options.loss=sampled_softmax",
        "model.options.shared_negatives=false",
        "model.options.negatives=2",
        "model.options.draw=popularity",
    ],
}
EPOCHS = 12


def task_with(path, *options):
    config = resolve(path, list(options))
    return task_of(config, open_data(config))[0]


def steps_of(task, world_size, epochs):
    """By step, the items that each rank reads, in whole batches."""
    loaders = []
    for rank in range(world_size):
        mesh = Mesh(rank, world_size=world_size, hosts=(0,) * world_size, pids=tuple(range(world_size)))
        plan = Plan.cyclic([], world_size)
        job = SimpleNamespace(
            mesh=mesh, embeddings=SimpleNamespace(synchronization=SimpleNamespace(mode="exact"), plan=plan)
        )
        loaders.append(task.loader(job, validates=True, is_asked=lambda: False))
    for _ in range(epochs):
        for steps in list(zip(*loaders, strict=True))[: task.data.splits["train"].samples // 32]:
            yield [np.unique(step.sparse.ids.numpy()) for step in steps]


@pytest.mark.parametrize("max_length", [16, 4])
@pytest.mark.parametrize("loss", LOSSES)
def test_rows_that_are_expected_are_those_that_ranks_read(sequence_file, loss, max_length):
    task = task_with(sequence_file, *LOSSES[loss], f"model.options.max_length={max_length}")
    steps = list(steps_of(task, 2, EPOCHS))
    of_rank = np.mean([len(rows) for step in steps for rows in step])
    of_all = np.mean([len(np.union1d(*step)) for step in steps])
    demand = problem_of(task, Topology.uniform(2)).demand
    assert demand.rank @ demand.lengths == pytest.approx(of_rank, rel=0.02)
    assert demand.world @ demand.lengths == pytest.approx(of_all, rel=0.05)  # users count as drawn with replacement


@pytest.mark.parametrize("loss", ["full", "own"])
def test_batches_that_are_counted_are_those_of_the_first_epoch(sequence_file, events, loss):
    task = task_with(sequence_file, *LOSSES[loss])
    shapes, request = placed_shapes(task.config, task.data), request_of(task.config, Topology.uniform(2))
    profile = task.profile(shapes, request, 2, count_batches=True)
    (table,), num_rows = profile.tables, events.num_items
    read = [np.bincount(rows, minlength=num_rows) for step in steps_of(task, 2, 1) for rows in step]
    shares = np.add.reduceat(np.mean(read, axis=0), table.starts[:-1]) / table.lengths
    found = profile.presence(0, request.batch_size, share=0.5)
    if loss == "own":
        assert found == pytest.approx(shares)
    else:  # which half of the items a rank scores is known, but not to the profile
        assert found @ table.lengths == pytest.approx(shares @ table.lengths, rel=0.01)


def test_accesses_are_those_of_an_epoch(sequence_file, events):
    """Of events after the cut, their targets and negatives; in inference of events alone."""
    for loss in LOSSES:
        task = task_with(sequence_file, *LOSSES[loss], "model.options.max_length=4")
        (shape,), options = placed_shapes(task.config, task.data), task.config.model.sequence
        lengths = np.minimum(events.train_ends - events.offsets[:-1] - 1, 4)
        num_events, num_steps = int(lengths[lengths > 0].sum()), 97 / 32
        per_position = 0 if loss == "full" else 1 if options.shares else 1 + options.num_negatives
        per_step = events.num_items if loss == "full" else 2 * options.num_negatives if options.shares else 0
        trains, serves = (
            task.profile([shape], Request(batch_size=16, mode=mode), 2).tables[0] for mode in ("train", "infer")
        )
        assert trains.total_accesses == pytest.approx(num_events * (1 + per_position) + num_steps * per_step)
        assert serves.total_accesses == num_events
        assert (serves.drawn, serves.is_split) == (None, False)


@pytest.mark.parametrize("max_length", [16, 4])
def test_a_run_moves_the_bytes_that_are_predicted(ranks, sequence_file, tmp_path, max_length):
    options = [f"model.options.max_length={max_length}", "placement.strategy=auto", "parallel.transport=collective"]
    options += ["train.epochs=4", "train.eval_every=0", "train.patience=0"]
    done = run_on(ranks, ["train", str(sequence_file), *options], ranks=2)
    assert done.status == 0, done.err
    record = read_run(tmp_path / "run")
    whole = [each for step, each in zip(record.traffic.steps, record.traffic.received, strict=True) if step % 4]
    assert len(whole) == 12
    task = task_with(sequence_file, *options)
    plan = Plan.load(tmp_path / "run" / "plan.json")
    for count_batches in (False, True):
        problem = problem_of(task, Topology.uniform(2), count_batches=count_batches)
        assert problem.cost(plan).total_bytes == pytest.approx(np.mean(whole), rel=0.02)
    assert tables_of(record).predicted_bytes == problem_of(task, Topology.uniform(2)).cost(plan).total_bytes
