"""Defaults of a run where its configuration says auto, chosen by the number of training samples alone.

They follow from the configuration and the data's metadata, which are the same on all ranks, so that all choose alike.
The numbers come from `python -m benchmarks.own_data`: about 200 steps an epoch, and rates that grow with the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rowmesh.data import Prepared
from rowmesh.data.data_set import DataSet
from rowmesh.errors import ConfigurationError
from rowmesh.run.config import Config
from rowmesh.run.raw import check_raw
from rowmesh.run.section import AUTO
from rowmesh.run.splits import num_training_samples, validation_source

STEPS_AN_EPOCH, SMALLEST_BATCH, LARGEST_BATCH = 200, 64, 4096
RAW_BATCH = 1024
MOST_EPOCHS, MOST_SAMPLES = 20, 2_000_000
"""Epochs of small data, and passes over larger data that end with the one in which so many samples are seen."""
EVALUATIONS_AN_EPOCH, PATIENCE = 2, 4


def choose_defaults(config: Config, data: DataSet) -> tuple[Config, list[str]]:
    """The configuration with numbers in the place of every auto, and lines on what was chosen and why.

    Raises:
        ConfigurationError: keys that were given cannot go together, as patience without evaluations.
    """
    values = config.model_dump(exclude_none=True)
    if not isinstance(data, Prepared):
        check_raw(values)
        lines = list(_choose_for_raw(values))
        return Config.model_validate(values), [f"chosen    {line}" for line in lines]
    lines = list(_choose_length(config, values, data))
    chosen = Config.model_validate(values)
    _check(chosen, data)
    return chosen, [f"chosen    {line}" for line in lines]


def batch_size_for(samples: int) -> int:
    """The power of two that makes about STEPS_AN_EPOCH steps an epoch, within bounds.

    >>> [batch_size_for(samples) for samples in (5_000, 80_000, 1_000_000)]
    [64, 256, 4096]
    """
    power = 2 ** math.floor(math.log2(max(samples // STEPS_AN_EPOCH, 1)))
    return min(max(power, SMALLEST_BATCH), LARGEST_BATCH)


def network_lr_for(batch_size: int) -> float:
    """Of Adam, growing with the root of the batch.

    >>> network_lr_for(512)
    0.001
    """
    return _rounded(0.001 * math.sqrt(batch_size / 512))


def table_lr_for(batch_size: int) -> float:
    """Of AdaGrad by row or element, whose steps shrink as gradients add up, growing with the fourth root of the batch.

    >>> table_lr_for(256)
    0.03
    """
    return _rounded(0.03 * (batch_size / 256) ** 0.25)


def _choose_for_raw(values: dict[str, Any]) -> Iterator[str]:
    """Puts numbers into `values` for data of which nobody knows how many there are, and says which."""
    if values["data"]["batch_size"] == AUTO:
        values["data"]["batch_size"] = RAW_BATCH
        yield f"data.batch_size={RAW_BATCH}: nobody knows how many rows raw data have"
    yield from _choose_rates(values, values["data"]["batch_size"])


def _choose_length(config: Config, values: dict[str, Any], data: Prepared) -> Iterator[str]:
    """Puts numbers into `values`, and says which."""
    train, samples = values["train"], data.splits[config.data.train].samples if config.data.train in data.splits else 0
    stops = train["patience"] != 0 and (train["patience"] != AUTO or (train["epochs"] == AUTO and not train["steps"]))
    source = validation_source(config, data)
    if stops and train["patience"] == AUTO and source is None:
        stops = False
        yield "no early stopping: there is no validation split, and train.validation_fraction leaves no samples for one"
    if train["patience"] == AUTO:
        train["patience"] = PATIENCE if stops else 0
    if stops and source is not None and source.is_cut:
        yield (
            f"the last {source.samples:,} samples of {source.split!r} are for validation "
            f"(train.validation_fraction={train['validation_fraction']:g}): there is no split "
            f"{config.data.validation!r}"
        )
    samples = num_training_samples(config, data, validates=stops or train["eval_every"] not in (0, AUTO))
    if config.data.batch_size == AUTO:
        size = values["data"]["batch_size"] = batch_size_for(samples)
        yield f"data.batch_size={size}: {max(-(-samples // size), 1):,} steps an epoch of {samples:,} samples"
    batch_size = values["data"]["batch_size"]
    num_batches = max(-(-samples // batch_size), 1)
    yield from _choose_rates(values, batch_size)
    if train["epochs"] == AUTO:
        train["epochs"] = _epochs(samples, train["steps"], num_batches, stops)
        if not train["steps"]:
            until = f", or until {train['patience']} evaluations bring nothing better" if stops else ""
            yield f"train.epochs={train['epochs']}{until}"
    if train["eval_every"] == AUTO:
        train["eval_every"] = max(num_batches // EVALUATIONS_AN_EPOCH, 1) if stops else 0


def _epochs(samples: int, steps: int, num_batches: int, stops: bool) -> int:
    if steps:
        return -(-steps // num_batches)
    return min(max(math.ceil(MOST_SAMPLES / max(samples, 1)), 1), MOST_EPOCHS) if stops else 1


def _choose_rates(values: dict[str, Any], batch_size: int) -> Iterator[str]:
    optimizer = values["optimizer"]
    if optimizer["lr"] == AUTO:
        optimizer["lr"] = network_lr_for(batch_size) if optimizer["name"] == "adam" else 0.001
        yield f"optimizer.lr={optimizer['lr']:g}: of {optimizer['name']}, for batches of {batch_size:,}"
    for key, rule in _rules("tables", values["tables"]):
        if rule["lr"] == AUTO:
            rule["lr"] = _rate(rule["name"], batch_size)
            yield f"{key}.lr={rule['lr']:g}: of {rule['name']}, for batches of {batch_size:,}"


def _rate(name: str, batch_size: int) -> float:
    rates = {"adam": network_lr_for(batch_size), "sgd": 0.01}
    return rates.get(name, table_lr_for(batch_size))


def _rules(key: str, section: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every section of an update rule, with its key."""
    for name, value in section.items():
        if name == "optimizer":
            yield f"{key}.optimizer", value
        elif isinstance(value, dict):
            yield from _rules(f"{key}.{name}", value)


def _check(config: Config, data: Prepared) -> None:
    if config.train.patience and not config.train.eval_every:
        raise ConfigurationError("train.patience counts evaluations, and train.eval_every=0 means none; change either")
    if config.train.patience and validation_source(config, data) is None:
        raise ConfigurationError(
            f"train.patience needs samples to validate on: {data.folder} has no split {config.data.validation!r}, and "
            f"train.validation_fraction={config.train.validation_fraction:g} leaves none of {config.data.train!r}"
        )


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")
