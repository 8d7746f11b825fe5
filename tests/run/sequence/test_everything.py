"""Sequence models under all of rowmesh: every way trains the model of one rank in a plain loop."""

from __future__ import annotations

import json
import re

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from rowmesh.run.sequence.recommend import recommend
from tests.support.commands import run_on

COLLECTIVE, ONE_SIDED = "parallel.transport=collective", "parallel.transport=one_sided"
CORES = ["tables.storage=tensor_train", "tables.tensor_train.rank=2"]
DYNAMIC = ["tables.storage=dynamic", "tables.dynamic.shards=4"]
FEW_USERS = ["data.batch_size=2", "train.steps=9"]
SAMPLED = ["model.options.loss=sampled_softmax", "model.options.negatives=20", "train.epochs=1"]
OWN = ["model.options.loss=binary_cross_entropy", "model.options.negatives=2", "train.epochs=1"]
MODELS = {
    "full": ["train.epochs=1"],
    "sampled": SAMPLED,
    "few": [*SAMPLED, *FEW_USERS],
    "own": OWN,
    "cores": [*CORES, "train.epochs=1"],
    "cores, sampled": [*CORES, *SAMPLED],
    "dynamic": [*DYNAMIC, *SAMPLED, "tables.dynamic.capacity=800", "train.patience=0"],
    "expiring": [*DYNAMIC, *OWN, *FEW_USERS, "tables.dynamic.capacity=800", "tables.dynamic.ttl_steps=2"],
    "counting": [*DYNAMIC, *OWN, "tables.dynamic.capacity=800", "tables.dynamic.admit_after=6"],
}
AHEAD = [COLLECTIVE, "pipeline.depth=1", "pipeline.micro_batches=2"]
WAYS = {
    "micro-batches": ("full", 2, [COLLECTIVE, "pipeline.micro_batches=3"]),
    "more micro-batches than users": ("few", 1, ["pipeline.micro_batches=3"]),
    "depth 2": ("sampled", 2, [COLLECTIVE, "pipeline.depth=2", "pipeline.micro_batches=4"]),
    "one-sided": ("own", 2, [ONE_SIDED, "pipeline.depth=1", "pipeline.micro_batches=2"]),
    "tiers": ("sampled", 2, [*AHEAD, "tables.storage=tiered", "tiers.fast_rows=150"]),
    "replicas": ("sampled", 2, [*AHEAD, "parallel.replicas=2"]),
    "copies": ("full", 2, [*AHEAD, "placement.strategy=auto", "placement.extra_memory=0.3"]),
    "cores": ("cores", 2, AHEAD),
    "dynamic": ("dynamic", 2, [COLLECTIVE, "pipeline.depth=2", "pipeline.micro_batches=3"]),
    "dynamic, expiring": ("expiring", 2, [*AHEAD, "train.eval_every=3"]),
}
SLOW = {
    "depth 2, full softmax": ("full", 2, [COLLECTIVE, "pipeline.depth=2", "pipeline.micro_batches=3"]),
    "one-sided copies": ("sampled", 2, [ONE_SIDED, "placement.strategy=auto", "placement.extra_memory=0.3"]),
    "tiers, full softmax": ("full", 2, [*AHEAD, "tables.storage=tiered"]),
    "replicas, full softmax": ("full", 2, [COLLECTIVE, "parallel.replicas=2"]),
    "cores, sampled": ("cores, sampled", 2, [ONE_SIDED, "pipeline.depth=1"]),
    "dynamic, replicas": ("dynamic", 2, [COLLECTIVE, "parallel.replicas=2"]),
    "dynamic, counting": ("counting", 2, [ONE_SIDED, "pipeline.depth=1", "pipeline.micro_batches=2"]),
}


@pytest.fixture(scope="module")
def known() -> dict[str, object]:
    """What one rank reached in a plain loop, by model."""
    return {}


def trained(ranks, file, folder, options, count):
    done = run_on(ranks, ["train", str(file), *options, f"run.folder={folder}"], ranks=count)
    assert done.status == 0, done.err
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = json.loads((folder / "evaluation" / "test.json").read_text())
    losses = {(line["kind"], line["step"]): line["loss"] for line in lines}
    return losses, {name: value for name, value in scores.items() if isinstance(value, float)}


@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW)])
def test_every_way_trains_the_same_model(ranks, sequence_file, tmp_path, known, way):
    model, count, options = (WAYS | SLOW)[way]
    own = [option for option in options if option.startswith("train.")]
    if (key := str([model, own])) not in known:
        known[key] = trained(ranks, sequence_file, tmp_path / "alone", [*MODELS[model], *own], 1)
    losses, scores = trained(ranks, sequence_file, tmp_path / "found", [*MODELS[model], *options], count)
    expected_losses, expected_scores = known[key]
    assert losses == pytest.approx(expected_losses, rel=1e-8)
    assert scores == pytest.approx(expected_scores, rel=1e-8)


@pytest.mark.slow
def test_measured_depth_trains_by_micro_batches(ranks, sequence_file, tmp_path):
    options = [COLLECTIVE, *SAMPLED, "pipeline.depth=auto", "pipeline.micro_batches=2", "train.epochs=7"]
    losses, _ = trained(ranks, sequence_file, tmp_path / "found", options, 2)
    alone, _ = trained(ranks, sequence_file, tmp_path / "alone", [*SAMPLED, "train.epochs=7"], 1)
    assert losses == pytest.approx(alone, rel=1e-5)  # Adam over 28 steps


def test_what_a_dynamic_table_knows_is_ranked_and_recommended(sequence_file, events, tmp_path, capsys):
    run_training(resolve(sequence_file, MODELS["expiring"]))
    found = re.search(r"test: \d+ users, (\d+) items are ranked", capsys.readouterr().out)
    assert found is not None
    assert 0 < (num_known := int(found[1])) < events.num_items
    schema, file, names = events.schema, tmp_path / "history.csv", events.item_values().to_pylist()[:3]
    rows = [f"{name},{number},somebody" for number, name in enumerate(names)]
    file.write_text("\n".join([f"{schema.item},{schema.time},{schema.user}", *rows]) + "\n")
    table = recommend(tmp_path / "run", file, top=1000).table
    assert num_known - 3 <= len(table) <= num_known  # not those of the history


@pytest.mark.parametrize(
    "options, message",
    [
        (["pipeline.micro_batches=auto"], "pipeline.micro_batches='auto' cannot be: .*; give a number"),
        (["pipeline.micro_batches=2", "pipeline.clustering=greedy"], "pipeline.clustering='greedy' cannot be"),
        ([*DYNAMIC, "tables.dynamic.capacity=800"], "loss='full_softmax' with tables.storage='dynamic' cannot be"),
        (
            [*DYNAMIC, *SAMPLED, "tables.dynamic.capacity=800", "tables.dynamic.admit_after=2"],
            "shared_negatives with tables.dynamic.admit_after cannot be",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_keys(sequence_file, options, message):
    with pytest.raises(ConfigurationError, match=message):
        run_training(resolve(sequence_file, options))
