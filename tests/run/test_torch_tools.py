"""Clipping, freezing and sending sums in `rowmesh train`."""

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.run.resolve import resolve
from rowmesh.run.tables import table_specs


def test_a_run_clips(train):
    options = ("train.steps=4", "train.log_every=1", "tables.optimizer.name=sgd", "tables.optimizer.lr=0.5")
    clipped = train("clipped", *options, "train.clip_grad_norm=0.001")
    free = train("free", *options)
    loose = train("loose", *options, "train.clip_grad_norm=1000")
    assert loose.losses == pytest.approx(free.losses, rel=1e-9)
    assert clipped.losses[0] == free.losses[0]
    assert clipped.losses[2:] != pytest.approx(free.losses[2:], rel=1e-6)
    piped = train("piped", *options, "train.clip_grad_norm=0.001", "pipeline.depth=1", "pipeline.micro_batches=2")
    assert piped.losses == pytest.approx(clipped.losses, rel=1e-6)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["parallel.synchronization=average"], "train.clip_grad_norm and parallel.synchronization = 'average' do not"),
        (["train.clip_grad_norm=-1"], "train.clip_grad_norm: should be greater than or equal to 0"),
    ],
)
def test_what_cannot_be_clipped(config_file, overrides, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve(config_file, ["train.clip_grad_norm=1", *overrides])


def test_frozen_tables(config_file, clicks):
    config = resolve(config_file, ["tables.C2.frozen=true"])
    assert [spec.frozen for spec in table_specs(config.tables, clicks)] == [False, True, False, False, False]


def test_tables_that_send_sums(config_file, clicks):
    config = resolve(config_file, ["tables.send=auto", "tables.C2.send=sums"])
    assert [spec.send for spec in table_specs(config.tables, clicks)] == ["auto", "sums", "auto", "auto", "auto"]
    with pytest.raises(ConfigurationError, match="table 'C2': send='sums', but the table is tiered"):
        table_specs(resolve(config_file, ["tables.storage=tiered", "tables.C2.send=sums"]).tables, clicks)
