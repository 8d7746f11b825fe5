"""Defaults of a sequence model's run where its configuration says nothing: the values of published models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rowmesh.errors import ConfigurationError
from rowmesh.run.config import Config
from rowmesh.run.section import AUTO
from rowmesh.run.sequence.data import SequenceData
from rowmesh.run.table_config import TableConfig

BATCH_SIZE, LR, EPOCHS, PATIENCE = 128, 1e-3, 100, 10
DIM, STD = 64, 0.02


def choose_sequence_defaults(config: Config, data: SequenceData) -> tuple[Config, list[str]]:
    """The configuration with a value in the place of every auto, and lines on what was chosen.

    Raises:
        ConfigurationError: keys that were given cannot go together, as patience without evaluations.
    """
    values = config.model_dump(exclude_none=True)
    lines = list(_choose(config, values, data))
    chosen = Config.model_validate(values)
    if chosen.train.patience and not chosen.train.eval_every:
        raise ConfigurationError("train.patience counts evaluations, and train.eval_every=0 means none; change either")
    if chosen.train.eval_every and config.data.validation not in data.splits:
        raise ConfigurationError(
            f"train.eval_every needs a split to validate on, and {data.folder} has no {config.data.validation!r} that "
            "predicts something; prepare the data with another split, or give train.eval_every=0 and train.patience=0"
        )
    return chosen, [f"chosen    {line}" for line in lines]


def _choose(config: Config, values: dict[str, Any], data: SequenceData) -> Iterator[str]:
    train, users = values["train"], data.splits[config.data.train].samples if config.data.train in data.splits else 0
    yield from _choose_tables(config, values["tables"])
    if values["data"]["batch_size"] == AUTO:
        values["data"]["batch_size"] = BATCH_SIZE
        yield f"data.batch_size={BATCH_SIZE} users: {max(-(-users // BATCH_SIZE), 1):,} steps an epoch"
    if values["optimizer"]["lr"] == AUTO:
        values["optimizer"]["lr"] = LR
        yield f"optimizer.lr={LR:g}"
    num_batches = max(-(-users // values["data"]["batch_size"]), 1)
    validates = config.data.validation in data.splits and train["eval_every"] != 0
    if train["patience"] == AUTO:
        train["patience"] = PATIENCE if validates else 0
        if validates:
            yield f"train.patience={PATIENCE}: the epoch that is best on {config.data.validation} is kept"
    if train["eval_every"] == AUTO:
        train["eval_every"] = num_batches if validates or train["patience"] else 0
    if train["epochs"] == AUTO:
        train["epochs"] = -(-train["steps"] // num_batches) if train["steps"] else EPOCHS if train["patience"] else 1
        yield f"train.epochs={train['epochs']}, or until nothing better comes"


def _choose_tables(config: Config, values: dict[str, Any]) -> Iterator[str]:
    """Chooses for all tables, and for each table that has a section of its own."""
    for name, table in (("", config.tables), *config.tables.overridden.items()):
        own = values[name] if name else values
        own["pooling"] = "none"
        yield from _choose_table(f"tables.{name}".rstrip("."), table, own)


def _choose_table(key: str, table: TableConfig, values: dict[str, Any]) -> Iterator[str]:
    given = table.model_fields_set
    if "dim" not in given:
        values["dim"] = DIM
        yield f"{key}.dim={DIM}"
    if "initializer" not in given:
        values["initializer"] = {"name": "normal", "std": STD}
        yield f"{key}.initializer: normal, std {STD:g}"
    if "optimizer" not in given:
        values["optimizer"] = {"name": "adam", "lr": LR}
        yield f"{key}.optimizer: adam, lr {LR:g}"
    elif values["optimizer"]["lr"] == AUTO:
        values["optimizer"]["lr"] = LR if values["optimizer"]["name"] == "adam" else 10 * LR
        yield f"{key}.optimizer.lr={values['optimizer']['lr']:g}"
