"""Raw ids of items in dynamic tables: plain torch trains the same, and other data name the same rows."""

from __future__ import annotations

import copy
import json
from contextlib import closing
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from rowmesh.data.events import SequenceLoader, Sequences
from rowmesh.data.events.prepare import prepare_events
from rowmesh.data.raw.ids import ids_of
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.models.sequence.losses import binary_cross_entropy, cosine, sampled_softmax
from rowmesh.placement import Plan
from rowmesh.run.build import build
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.placement import Placement, shapes_of
from rowmesh.run.resolve import resolve
from rowmesh.run.sequence.batches import Draws
from rowmesh.run.sequence.data import SequenceData
from rowmesh.run.sequence.evaluation import RankingEvaluation, vectors_of
from rowmesh.run.sequence.options import SequenceOptions
from rowmesh.run.sequence.recommend import recommend
from rowmesh.run.tasks import open_data, task_of
from rowmesh.run.trainer import Trainer
from tests.support.commands import run_on

RAW = ["model.options.item_ids=raw", "tables.storage=dynamic", "tables.dynamic.shards=4"]
ROOM = ["tables.dynamic.capacity=800", "tables.optimizer.name=adagrad"]  # Adam of rows is lazy, that of torch is not
SAMPLED = ["model.options.loss=sampled_softmax", "model.options.negatives=20"]
LOSSES = {
    "sampled_softmax": [*SAMPLED, "model.options.log_q=true", "model.options.draw=popularity"],
    "binary_cross_entropy": ["model.options.loss=binary_cross_entropy", "model.options.negatives=2"],
}
PLAIN = SequenceOptions(seen="keep")  # vectors as they are


def made(mesh, file, options):
    config = resolve(file, options)
    task, _ = task_of(config, open_data(config))
    plan = Plan.cyclic(shapes_of(task.config, task.data), mesh.world_size, mesh.world_size)
    return build(task, mesh, Placement(plan, "for a test")), task


def all_items(job):
    """The vectors of all items of the data, in the order of their numbers. Collective."""
    with torch.no_grad():
        return vectors_of(job, torch.from_numpy(job.data.sequences.raw.ids), PLAIN).clone()


def trained(mesh, file, options):
    """Losses of an epoch, vectors and the record of an evaluation."""
    torch.set_num_threads(1)
    job, task = made(mesh, file, options)
    trainer = Trainer(job, task)
    with closing(trainer.batches()) as batches:
        losses = [trainer.train_step(next(batches)) for _ in range(trainer.loader.num_batches or 0)]
    found = losses, all_items(job), task.evaluate(job, "test", lambda number: None).as_record()
    job.embeddings.close()
    return found


def losses_of(options, draws, queries, batch, items, step):
    """As published, by numbers."""
    drawn = draws.ids(batch, step, 0)
    if options.loss == "sampled_softmax":
        queries, items = cosine(queries, items, 0.05)
        log_q = draws.log_q(drawn)
        return sampled_softmax(queries, items[batch.targets], items[drawn], batch.targets, drawn, log_q)
    return binary_cross_entropy(queries, items[batch.targets], items[drawn], batch.targets, drawn)


@pytest.mark.parametrize("loss", LOSSES)
def test_steps_are_those_of_plain_torch(ranks, sequence_file, events, loss):
    """On one rank and two; the reference knows items by their numbers, and starts from the same rows."""
    options = [*RAW, *ROOM, *LOSSES[loss]]
    job, _ = made(Mesh(), sequence_file, options)
    items = nn.Parameter(all_items(job))
    network = copy.deepcopy(job.network)
    job.embeddings.close()
    optimizers = [torch.optim.Adagrad([items], lr=0.02), torch.optim.Adam(network.parameters(), lr=0.02)]
    model = job.config.model.sequence
    draws = Draws(model, events.popularity("validation"), 0)
    expected, known = [], set()
    for step, batch in enumerate(SequenceLoader(events, "train", batch_size=32, max_length=16, shuffle=True)):
        known |= {*batch.items.tolist(), *batch.targets.tolist(), *draws.ids(batch, step, 0).flatten().tolist()}
        queries = network(items[batch.items], batch.offsets, batch.times, batch.request_times)
        losses = losses_of(model, draws, queries, batch, items, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        expected.append(losses.detach().sum().item())
    candidates = torch.zeros(len(items), dtype=torch.bool)
    candidates[list(known)] = True
    placed = standings(network, items.detach(), events, candidates, is_cosine=model.is_cosine)
    for world_size in (1, 2):
        found = ranks.run(trained, sequence_file, options, world_size=world_size)
        assert [sum(each) for each in zip(*(of[0] for of in found), strict=True)] == pytest.approx(expected, rel=1e-9)
        for _, rows, record in found:
            torch.testing.assert_close(rows, items.detach(), rtol=1e-7, atol=1e-9)
            assert record["hr@10"] == pytest.approx(np.mean(placed <= 10))
            assert record["mrr"] == pytest.approx(np.mean(1 / placed))


def standings(network, items, events, candidates, *, is_cosine) -> np.ndarray:
    """The rank of each user's last item, one user at a time: unknown targets stand after all candidates."""
    ranks, numbers = [], torch.arange(len(items))
    for start, end in pairwise(events.offsets):
        low = max(start, end - 1 - 16)
        history, target = torch.from_numpy(events.items[low : end - 1].astype(np.int64)), int(events.items[end - 1])
        times = torch.from_numpy(events.times[low:end].copy())
        with torch.no_grad():
            query = network(items[history], torch.tensor([0, len(history)]), times[:-1], times[1:])[-1]
        w = nn.functional.normalize(items, dim=-1) if is_cosine else items
        scores = w @ (nn.functional.normalize(query, dim=-1) if is_cosine else query)
        ranked = candidates.clone()
        ranked[torch.from_numpy(events.items[start : end - 1].astype(np.int64))] = False
        ranked &= numbers != target
        above = int((scores[ranked] >= scores[target]).sum())
        ranks.append(1 + (above if candidates[target] else int(candidates.sum())))
    return np.array(ranks)


def lines_of(events: Sequences) -> list[str]:
    items, users = events.item_values().to_pylist(), events.user_values().to_pylist()
    names = [str(each, "ascii") if isinstance(each, bytes) else str(each) for each in items]
    return [
        f"{users[user]},{names[events.items[at]]},{events.times[at]}"
        for user in range(events.counts.num_users)
        for at in range(events.offsets[user], events.offsets[user + 1])
    ]


def prepared(folder, lines, schema) -> Sequences:
    file = folder / "other.csv"
    file.write_text("\n".join(["user_id,item_id,timestamp", *lines]) + "\n")
    return prepare_events([file], folder / "other", schema)


def test_other_data_name_the_same_rows(sequence_file, events, tmp_path, capsys):
    """The same events of users in another order, whose items have other numbers then, and of users with new items."""
    expected = run_training(resolve(sequence_file, [*RAW, *ROOM, *SAMPLED, "train.epochs=1"]))
    lines = lines_of(events)
    other = prepared(tmp_path, lines[::-1], events.schema)
    assert other.item_values().to_pylist() != events.item_values().to_pylist()
    found = run_evaluation(tmp_path / "run", [f"data.folder={other.folder}"])
    assert isinstance(expected, RankingEvaluation)
    assert found.as_record() == pytest.approx(expected.as_record(), rel=1e-9)

    more = [f"somebody,new{number % 3},{number}" for number in range(9)]
    (tmp_path / "more").mkdir()
    newer = prepared(tmp_path / "more", [*lines, *more], events.schema)
    found = run_evaluation(tmp_path / "run", [f"data.folder={newer.folder}"])
    assert isinstance(found, RankingEvaluation)
    assert found.candidates == expected.candidates  # what the table knows
    assert found.samples == expected.samples + 1
    assert found.means["hr@10"].value == pytest.approx(expected.means["hr@10"].value * expected.samples / found.samples)

    file = tmp_path / "history.csv"
    file.write_text("\n".join(["user_id,item_id,timestamp", *lines[:5], *more[:4]]) + "\n")
    recommended = recommend(tmp_path / "run", file, data=newer.folder)
    assert recommended.num_unknown == 4
    assert recommended.without == ["somebody"]
    names = {line.split(",")[1] for line in lines}
    assert {str(each) for each in recommended.table["item"].to_pylist()} <= names
    assert len(recommended.table) == 10


def test_later_events_with_new_items_are_trained_on(ranks, sequence_file, events, tmp_path):
    """Two runs, the second on two ranks, are what one training in plain torch is, whose table has all items."""
    more = [f"late{user},new{(user + step) % 7},{step}" for user in range(40) for step in range(9)]
    newer = prepared(tmp_path, [*lines_of(events)[:900], *more], events.schema)
    options = [*RAW, *ROOM, *SAMPLED, "train.epochs=1", "train.log_every=1", "train.patience=0"]
    after = [*options, f"data.folder={newer.folder}", f"train.start_from={tmp_path / 'run'}"]
    both = pa.concat_arrays([newer.item_values(), events.item_values()]).unique()
    places = {name: place for place, name in enumerate(both.to_pylist())}

    job, _ = made(Mesh(), sequence_file, options)
    with torch.no_grad():
        items = nn.Parameter(vectors_of(job, torch.from_numpy(ids_of(both)), PLAIN).clone())
    network, model = copy.deepcopy(job.network), job.config.model.sequence
    job.embeddings.close()
    optimizers = [torch.optim.Adagrad([items], lr=0.02), torch.optim.Adam(network.parameters(), lr=0.02)]
    expected: list[float] = []
    for data in (events, newer):
        numbers = torch.tensor([places[name] for name in data.item_values().to_pylist()])
        draws = Draws(model, data.popularity("validation"), 0)
        for step, batch in enumerate(SequenceLoader(data, "train", batch_size=32, max_length=16, shuffle=True)):
            drawn = draws.ids(batch, step, 0)
            queries = network(items[numbers[batch.items]], batch.offsets, batch.times, batch.request_times)
            queries, vectors = cosine(queries, items[numbers], 0.05)
            losses = sampled_softmax(queries, vectors[batch.targets], vectors[drawn], batch.targets, drawn)
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses.mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            expected.append(losses.detach().mean().item())

    run_training(resolve(sequence_file, options))
    done = run_on(ranks, ["train", str(sequence_file), *after, f"run.folder={tmp_path / 'second'}"], ranks=2)
    assert done.status == 0, done.err
    lines = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("run", "second")]
    found = [json.loads(line) for each in lines for line in each]
    assert [line["loss"] for line in found if line["kind"] == "train"] == pytest.approx(expected, rel=1e-8)


def test_numbers_are_refused_with_other_data(sequence_file, events, tmp_path):
    run_training(resolve(sequence_file, [*RAW[1:], *ROOM, *SAMPLED, "train.epochs=1"]))
    other = prepared(tmp_path, lines_of(events)[::-1], events.schema)
    with pytest.raises(RowmeshError, match="differs from it in vocabulary of item"):
        run_evaluation(tmp_path / "run", [f"data.folder={other.folder}"])


def test_raw_ids_need_a_dynamic_table(sequence_file):
    with pytest.raises(ConfigurationError, match=r"item_ids='raw' with tables\.storage='auto' cannot be"):
        run_training(resolve(sequence_file, ["model.options.item_ids=raw"]))


def test_ids_are_those_of_raw_data(sequence_file, events):
    data = open_data(resolve(sequence_file, [*RAW, *ROOM, *SAMPLED]))
    assert isinstance(data, SequenceData)
    assert data.sequences.raw is not None
    assert data.sequences.raw.ids.tolist() == ids_of(events.item_values()).tolist()
