"""Side columns in `rowmesh train` and `rowmesh recommend`: tables of their own, vectors added to the items'."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

from rowmesh.data.events import SequenceLoader, Sequences
from rowmesh.data.events.prepare import prepare_events
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.mesh import Mesh
from rowmesh.models.sequence.losses import full_softmax
from rowmesh.placement import Plan
from rowmesh.placement.request import Request
from rowmesh.run.build import build
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.placement import Placement, placed_shapes, shapes_of
from rowmesh.run.resolve import resolve
from rowmesh.run.sequence.recommend import recommend
from rowmesh.run.tasks import open_data, task_of
from rowmesh.run.trainer import Trainer
from tests.support.commands import run_on

ACTIONS = ("look", "", "buy")  # one is missing


def rows_of(events, users=97):
    """What users did but at last, as raw rows, with what they did and the item's shelf."""
    items, lines = events.item_values().to_pylist(), ["user_id,item_id,timestamp,action,shelf"]
    for user, (start, end) in enumerate(zip(events.offsets[:users], events.offsets[1:], strict=False)):
        for at in range(start, end):
            item = events.items[at]
            lines.append(f"u{user},{items[item]},{events.times[at]},{ACTIONS[(user + at) % 3]},s{item % 7}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def with_side(events, tmp_path_factory) -> Sequences:
    folder = tmp_path_factory.mktemp("side")
    (folder / "events.csv").write_text(rows_of(events))
    side = {"user": "user_id", "item": "item_id", "time": "timestamp", "side": ("action", "shelf")}
    schema = events.schema.model_copy(update={**side, "columns": ()})
    return prepare_events([folder / "events.csv"], folder / "out", schema)


@pytest.fixture
def side_file(sequence_file, events, with_side):
    sequence_file.write_text(sequence_file.read_text().replace(str(events.folder), str(with_side.folder)))
    return sequence_file


def test_steps_are_those_of_plain_torch(side_file, with_side):
    config = resolve(side_file, ["tables.optimizer.name=adagrad"])
    task, _ = task_of(config, open_data(config))
    job = build(task, Mesh(), Placement(Plan.cyclic(shapes_of(task.config, task.data), 1, 1), "for a test"))
    trainer = Trainer(job, task)
    tables = {
        name: nn.Parameter(torch.cat([rows.values for rows in job.embeddings.local_rows(name)]))
        for name in ("item", "action", "shelf")
    }
    network = copy.deepcopy(job.network)
    optimizers = [
        torch.optim.Adagrad(tables.values(), lr=0.02),
        torch.optim.Adam(network.parameters(), lr=0.02),
    ]
    loader = SequenceLoader(with_side, "train", batch_size=32, max_length=16, shuffle=True)
    for batch, mine in zip(loader, trainer.batches(), strict=False):
        side = [tables[name][batch.side[name]] for name in ("action", "shelf")]
        queries = network(tables["item"][batch.items], batch.offsets, batch.times, batch.request_times, side)
        expected = full_softmax(queries, batch.targets, tables["item"])
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected.mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert trainer.train_step(mine) == pytest.approx(expected.detach().sum().item(), rel=1e-9)
    job.embeddings.close()


def test_ranks_and_micro_batches_train_the_same_model(ranks, side_file, tmp_path):
    ways = {"alone": (1, []), "both": (2, ["parallel.transport=collective", "pipeline.micro_batches=2"])}
    losses = {}
    for name, (count, options) in ways.items():
        folder = tmp_path / name
        done = run_on(ranks, ["train", str(side_file), "train.epochs=1", *options, f"run.folder={folder}"], ranks=count)
        assert done.status == 0, done.err
        losses[name] = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert losses["both"] == pytest.approx(losses["alone"], rel=1e-9)


def test_recommend_reads_them_and_values_that_are_new_add_nothing(side_file, events, tmp_path):
    metrics = run_training(resolve(side_file, ["train.epochs=1"]))
    assert run_evaluation(tmp_path / "run") == metrics

    def recommended(text):
        file = tmp_path / "history.csv"
        file.write_text(text)
        return recommend(tmp_path / "run", file, top=5).table["score"].to_pylist()

    text = rows_of(events, users=4)
    assert recommended(text) != recommended(text.replace("look", "buy"))
    assert recommended(text.replace("look", "new")) == recommended(text.replace("look", "newer"))
    with pytest.raises(DataError, match="shelf"):
        recommended(text.replace("shelf", "other"))


def test_which_are_read_is_an_option(side_file, capsys):
    run_training(resolve(side_file, ["train.steps=1", "model.options.side=['shelf']"]))
    assert "side columns are added to the items: shelf (7 values)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option, message",
    [
        ("model.options.side=['shelves']", "no side column 'shelves', only: action, shelf"),
        ("tables.shelf.dim=4", "tables.shelf.dim=4, and tables.item.dim=8: .*one dim"),
    ],
)
def test_what_cannot_be_is_refused_by_its_keys(side_file, option, message):
    with pytest.raises(ConfigurationError, match=message):
        run_training(resolve(side_file, [option]))


def test_side_columns_are_read_with_the_events_of_training(side_file, with_side):
    config = resolve(side_file, ["model.options.max_length=4"])
    task, _ = task_of(config, open_data(config))
    shapes = placed_shapes(task.config, task.data)
    profile = task.profile(shapes, Request(batch_size=16), 2)
    assert [table.name for table in profile.tables] == ["item", "action", "shelf"]
    read = [np.zeros(shape.num_rows) for shape in shapes]
    for user in with_side.users("train"):
        end = with_side.train_ends[user] - 1
        events = slice(max(end - 4, with_side.offsets[user]), end)
        for counts, rows in zip(read[1:], with_side.side.values(), strict=True):
            np.add.at(counts, rows[events], 1)
    for table, counts in zip(profile.tables[1:], read[1:], strict=True):
        assert table.accesses == pytest.approx(np.add.reduceat(counts, table.starts[:-1]) / table.lengths)
        assert (table.drawn, table.is_split) == (None, False)
    counted = task.profile(shapes, Request(batch_size=16), 2, count_batches=True)
    for number in range(3):
        few, many = (each.uniques(number, 16)[-1] for each in (profile, counted))
        assert few == pytest.approx(many, rel=0.05)
