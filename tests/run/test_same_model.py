"""Which keys a run that is resumed may have otherwise."""

import pytest

from rowmesh.run.resolve import resolve
from rowmesh.run.same_model import model_differences

AVERAGE = ["parallel.replicas=2", "parallel.synchronization=average"]


def changed(config_file, before, now):
    return [text.split()[0] for text in model_differences(resolve(config_file, before), resolve(config_file, now))]


@pytest.mark.parametrize(
    "now",
    [
        ["run.folder=elsewhere", "checkpoint.every_steps=3", "train.log_every=1", "train.device=cuda"],
        ["parallel.transport=one_sided", "parallel.replicas=2", "parallel.timeout_s=3.0"],
        ["pipeline.depth=2", "pipeline.micro_batches=3", "placement.strategy=auto"],
        ["tables.storage=tiered", "tiers.fast_share=0.5"],
        ["tables.storage=dense"],
        ["tables.C1.replicas=2"],
        ["tables.send=auto", "tables.C1.send=sums"],
        ["tables.C1.dim=4"],  # as all have
        ["train.eval_every=3", "data.test=other", "data.folder=elsewhere"],
    ],
)
def test_when_and_where_are_free(config_file, now):
    assert changed(config_file, ["train.patience=0", "train.eval_every=0"], ["train.patience=0", *now]) == []


@pytest.mark.parametrize(
    "before, now, keys",
    [
        ([], ["tables.dim=8"], ["tables.dim"]),
        ([], ["tables.C1.dim=8"], ["tables.C1.dim"]),
        ([], ["train.seed=3", "train.epochs=9"], ["train.epochs", "train.seed"]),
        ([], ["model.top=[16, 4]"], ["model.top.2"]),
        ([], ["optimizer.lr=0.1", "tables.optimizer.eps=0.1"], ["optimizer.lr", "tables.optimizer.eps"]),
        ([], ["data.batch_size=128", "data.shuffle=false"], ["data.batch_size", "data.shuffle"]),
        ([], ["tables.C3.storage=tensor_train"], ["tables.C3.storage"]),
        ([], ["tables.tensor_train.min_rows=40"], ["tables.storage", "tables.tensor_train.min_rows"]),
        (["train.patience=2"], ["train.patience=2", "train.eval_every=3"], ["train.eval_every"]),
        (
            AVERAGE,
            [*AVERAGE, "parallel.replicas=4", "parallel.sync_every=2"],
            ["parallel.replicas", "parallel.sync_every"],
        ),
    ],
)
def test_what_the_model_depends_on_is_named(config_file, before, now, keys):
    assert changed(config_file, before, now) == keys


ROOM = "tables.dynamic.capacity=64"


@pytest.mark.parametrize(
    "before, now, keys",
    [
        ([ROOM], ["tables.dynamic.capacity=65"], []),
        ([ROOM], ["tables.dynamic.capacity=63"], ["tables.dynamic.capacity"]),
        ([ROOM], ["tables.dynamic.capacity=128", "tables.dynamic.shards=1"], []),
        ([ROOM], ["tables.dynamic.capacity_bytes=65536"], []),
        ([ROOM, "tables.dynamic.shards=2"], [ROOM, "tables.dynamic.shards=1"], ["tables.dynamic.shards"]),
        ([ROOM], [ROOM, "tables.C1.dynamic.capacity=99"], []),
        ([ROOM], [ROOM, "tables.C1.dynamic.capacity=9"], ["tables.C1.dynamic.capacity"]),
        ([ROOM], ["tables.dynamic.capacity=99", "tables.dynamic.eviction=lfu"], ["tables.dynamic.eviction"]),
    ],
)
def test_dynamic_tables_may_grow(config_file, before, now, keys):
    differing = model_differences(resolve(config_file, before), resolve(config_file, now), may_grow=True)
    assert [text.split()[0] for text in differing] == keys
