"""`rowmesh train` of sequence models: against plain torch, on ranks, resumed, and what it refuses."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from rowmesh._support.faults import arm
from rowmesh.cli.__main__ import main
from rowmesh.data.events import SequenceLoader
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.models.sequence.losses import binary_cross_entropy, cosine, full_softmax, sampled_softmax
from rowmesh.placement import Plan
from rowmesh.run.build import build
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.placement import Placement, shapes_of
from rowmesh.run.resolve import resolve
from rowmesh.run.sequence.batches import Draws
from rowmesh.run.sequence.evaluation import vectors_of
from rowmesh.run.sequence.options import SequenceOptions
from rowmesh.run.tasks import open_data, task_of
from rowmesh.run.trainer import Trainer
from tests.support.commands import run_on

SIZES = ["model.options.max_length=16", "model.options.dropout=0.0"]  # another model takes none of the file's options
ADAGRAD = ["tables.optimizer.name=adagrad"]  # Adam of rows is lazy, that of torch is not
LOSSES = {
    "full_softmax": [],
    "sampled_softmax": ["model.options.log_q=true", "model.options.draw=popularity", "model.options.negatives=20"],
    "binary_cross_entropy": ["model.options.negatives=2", "model.name=sasrec", *SIZES],
}


def losses_of(loss, draws, queries, batch, items, epoch, step):
    """As published, from the whole table."""
    if loss == "full_softmax":
        return full_softmax(queries, batch.targets, items)
    drawn = draws.ids(batch, step, epoch)
    if loss == "sampled_softmax":
        queries, items = cosine(queries, items, 0.05)
        return sampled_softmax(queries, items[batch.targets], items[drawn], batch.targets, drawn, draws.log_q(drawn))
    return binary_cross_entropy(queries, items[batch.targets], items[drawn], batch.targets, drawn)


@pytest.mark.parametrize("loss", LOSSES)
def test_steps_are_those_of_plain_torch(sequence_file, events, loss):
    config = resolve(sequence_file, [*LOSSES[loss], *ADAGRAD, f"model.options.loss={loss}"])
    task, _ = task_of(config, open_data(config))
    plan = Plan.cyclic(shapes_of(task.config, task.data), 1, 1)
    job = build(task, Mesh(), Placement(plan, "for a test"))
    trainer, options, rows = Trainer(job, task), config.model.sequence, torch.arange(events.num_items)
    plain = SequenceOptions(seen="keep")  # vectors as they are
    with torch.no_grad():
        items = nn.Parameter(vectors_of(job, rows, plain).clone())
    network = copy.deepcopy(job.network)
    optimizers = [torch.optim.Adagrad([items], lr=0.02), torch.optim.Adam(network.parameters(), lr=0.02)]
    draws = Draws(options, events.popularity("validation"), 0)
    loader = SequenceLoader(events, "train", batch_size=32, max_length=16, shuffle=True)
    for step, (batch, mine) in enumerate(zip(loader, trainer.batches(), strict=False)):
        queries = network(items[batch.items], batch.offsets, batch.times, batch.request_times)
        expected = losses_of(loss, draws, queries, batch, items, 0, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected.mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert trainer.train_step(mine) == pytest.approx(expected.detach().sum().item(), rel=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(vectors_of(job, rows, plain), items.detach(), rtol=1e-7, atol=1e-9)
    job.embeddings.close()


def scores(folder):
    return json.loads((folder / "evaluation" / "test.json").read_text())


def numbers(folder):
    found = scores(folder)
    return {name: value for name, value in found.items() if isinstance(value, float)}


@pytest.mark.parametrize(
    "options",
    [
        ["parallel.transport=one_sided", "train.epochs=1", "placement.strategy=auto"],
        ["parallel.transport=collective", "pipeline.depth=2", "model.options.loss=sampled_softmax"],
        ["parallel.transport=collective", "model.options.loss=binary_cross_entropy", "model.name=fuxi_beta", *SIZES],
    ],
)
def test_two_ranks_train_the_same_model_as_one(ranks, sequence_file, tmp_path, options):
    for count in (1, 2):
        own = [] if count == 2 else ["parallel.transport=auto", "placement.strategy=''"]
        done = run_on(
            ranks, ["train", str(sequence_file), *options, *own, f"run.folder={tmp_path / str(count)}"], ranks=count
        )
        assert done.status == 0, done.err
    alone, both = (
        [json.loads(line) for line in (tmp_path / str(count) / "metrics.jsonl").read_text().splitlines()]
        for count in (1, 2)
    )
    for one, two in zip(alone, both, strict=True):
        assert (one["kind"], one["step"]) == (two["kind"], two["step"])
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-9)
    assert numbers(tmp_path / "2") == pytest.approx(numbers(tmp_path / "1"), rel=1e-9)


def test_a_run_that_is_resumed_ends_as_one_that_was_not(sequence_file, tmp_path):
    options = ["checkpoint.every_steps=3", "model.options.dropout=0.3"]
    run_training(resolve(sequence_file, [*options, f"run.folder={tmp_path / 'untouched'}"]))
    with arm("loop.step@5=raise"), pytest.raises(RuntimeError, match="injected"):
        run_training(resolve(sequence_file, options))
    run_training(resolve(sequence_file, options), resume="latest")
    assert scores(tmp_path / "run") == scores(tmp_path / "untouched")


def test_the_model_that_is_best_on_the_validation_is_tested(sequence_file, events, tmp_path, capsys):
    metrics = run_training(resolve(sequence_file, ["train.epochs=4", "train.patience=2"]))
    out = capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    best = min(line["loss"] for line in lines if line["kind"] == "validation")
    assert run_evaluation(tmp_path / "run", split="validation").loss == best
    assert run_evaluation(tmp_path / "run") == metrics
    assert f"planted optimum {events.optimum['test']['hr@10']:>12.5f}" in out
    assert f"validation NDCG@10 {1 - best:.5f}" in out


@pytest.mark.parametrize(
    "option, message",
    [
        ("train.progressive_every=2", "train.progressive_every is of clicks"),
        ("tables.pooling=mean", "tables.pooling='mean': hstu reads a vector an event"),
        ("model.options.num_block=1", "num_block: no such option.*did you mean 'num_blocks'"),
        ("model.options.negatives=1", "negatives is for sampled items, and full_softmax takes all"),
        ("model.name=dlrm", "sequences of events, and dlrm needs samples with labels"),
        ("data.test=tset", "no split"),
    ],
)
def test_what_cannot_be_is_refused_by_name(sequence_file, option, message):
    with pytest.raises((ConfigurationError, RowmeshError), match=message):
        run_training(resolve(sequence_file, [option]))


def test_predict_and_export_name_the_command_for_sequences(sequence_file, tmp_path, capsys):
    run_training(resolve(sequence_file, ["train.steps=1"]))
    with pytest.raises(SystemExit):
        main(["predict", str(tmp_path / "run"), str(sequence_file)])
    assert "rowmesh recommend" in capsys.readouterr().err
