"""The tables of a run, from the features of the data set and the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from pydantic import BaseModel

from rowmesh._support.suggest import hint
from rowmesh.data.raw import RawData
from rowmesh.errors import ConfigurationError
from rowmesh.run.section import AUTO
from rowmesh.run.table_config import DynamicConfig, InitializerConfig, TablesConfig, TensorTrainConfig
from rowmesh.run.table_data import TableData
from rowmesh.tables import Dynamic, TableSpec, TensorTrain
from rowmesh.tables.initializer import INITIALIZERS
from rowmesh.tables.spec import TRAITS, stored_tables
from rowmesh.tables.update_rules import RULES, UpdateRule


def table_specs(config: TablesConfig, data: TableData) -> tuple[TableSpec, ...]:
    """The tables, one for each vocabulary of the data set, in the order of the features that they are named after.

    Raises:
        ConfigurationError: a section names no table, or an option does not belong to what it is given for.
    """
    features: dict[str, list[str]] = {name: [] for name in data.features if data.table_of(name) == name}
    for name in data.features:
        features[data.table_of(name)].append(name)
    for name in config.overridden:
        if name in data.features and name not in features:
            raise ConfigurationError(
                f"tables.{name}: feature {name!r} has the table {data.table_of(name)!r}, whose vocabulary it "
                f"shares; write tables.{data.table_of(name)}"
            )
        if name not in features:
            suggestion = hint(name, features) or f"; known: {', '.join(features)}"
            raise ConfigurationError(f"tables.{name}: {data.folder} has no table of this name{suggestion}")
    if isinstance(data, RawData) and (stored := [name for name in features if not config.of(name).takes_any_id]):
        raise ConfigurationError(
            f'tables {", ".join(stored)}: nobody knows how many ids raw data have; give tables.storage = "dynamic", '
            "with a capacity, or prepare the data"
        )
    tables = tuple(_table_spec(name, data.table(name).num_rows, config, tuple(each)) for name, each in features.items())
    _check_no_rules(config, tables)
    rows = stored_tables(tables)
    for table in rows:
        _check_no_own_shape(config, table)
    if len(rows) == len(tables):
        _check_no_shape(config)
    return tables


def with_own_stores(tables: Sequence[TableSpec]) -> tuple[TableSpec, ...]:
    """The tables of a model that is read and not trained: demoted records are in memory, not in the run's store."""
    return tuple(
        replace(table, dynamic=replace(table.dynamic, store="memory"))
        if table.dynamic is not None and table.dynamic.mode == "demote"
        else table
        for table in tables
    )


def _check_no_own_shape(config: TablesConfig, table: TableSpec) -> None:
    """Raises ConfigurationError where the section of a table of rows describes cores, and not when it has any."""
    given, defaults = (
        section.tensor_train.model_dump(exclude_none=True) for section in (config.of(table.name), config)
    )
    own = {key: value for key, value in given.items() if value != defaults.get(key)}
    if own and "min_rows" not in own:
        section, (key, value) = f"tables.{table.name}", next(iter(own.items()))
        raise ConfigurationError(
            f"{section}.tensor_train.{key} = {value} is given, and table {table.name!r} of {table.num_rows:,} rows is "
            f'{table.storage}; give {section}.storage = "tensor_train", or leave it out, or say from how many rows on '
            f"it is meant by {section}.tensor_train.min_rows"
        )


def _check_no_shape(config: TablesConfig) -> None:
    """Raises ConfigurationError where cores are described for all tables, and nothing makes them of any."""
    given = config.tensor_train.model_dump(exclude_none=True, exclude={"optimizer"})
    if config.chooses_storage and given and "min_rows" not in given:
        key, value = next(iter(given.items()))
        raise ConfigurationError(
            f"tables.tensor_train.{key} = {value} is given, and no table is a tensor-train table; choose them by "
            'tables.tensor_train.min_rows = 1_000_000 or tables.NAME.storage = "tensor_train"'
        )


def _check_no_rules(config: TablesConfig, tables: Sequence[TableSpec]) -> None:
    """Raises ConfigurationError where rules of dynamic tables are given, and there is none to follow them."""
    numbered = [table for table in tables if not table.takes_any_id]
    found = [(f"tables.{table.name}", config.of(table.name).dynamic) for table in numbered]
    found = [(key, section) for key, section in found if section != config.dynamic]
    if len(numbered) == len(tables):
        found.append(("tables", config.dynamic))
    for key, section in found:
        for name, value in section.model_dump(exclude_none=True).items():
            raise ConfigurationError(
                f'{key}.dynamic.{name} = {value!r} is for dynamic tables; give {key}.storage = "dynamic", or leave it '
                "out"
            )


def _table_spec(name: str, num_rows: int, tables: TablesConfig, features: tuple[str, ...]) -> TableSpec:
    config = tables.of(name)
    storage, dynamic = config.storage_of(num_rows), None
    is_cored = not TRAITS[storage].stores_rows
    if config.takes_any_id:
        dynamic = _dynamic(_key(tables, name, "dynamic"), config.dynamic)
        of_all = (config.storage, config.initializer) == (tables.storage, tables.initializer)
        _check_bound("tables.initializer" if of_all else f"tables.{name}.initializer", config.initializer)
    try:
        return TableSpec(
            name=name,
            **({} if config.takes_any_id else {"num_rows": num_rows}),
            dim=config.dim,
            features=features,
            pooling=config.pooling,
            dtype=getattr(torch, config.dtype),
            out_of_range=config.out_of_range,
            optimizer=update_rule(name, tables, is_cored),
            initializer=_choose(_key(tables, name, "initializer"), INITIALIZERS, config.initializer),
            storage=storage,
            tensor_train=_tensor_train(config.tensor_train) if is_cored else None,
            dynamic=dynamic,
            frozen=config.frozen,
            send=config.send,
        )
    except TypeError as error:
        raise ConfigurationError(f"table {name!r}: {error}") from None


def update_rule(name: str, tables: TablesConfig, is_cored: bool) -> UpdateRule:
    """The optimizer of a table as rows, or as cores.

    Raises:
        ConfigurationError: cores cannot have it, or an option does not belong to it.
    """
    config = tables.of(name)
    key, chosen = _key(tables, name, "optimizer"), config.optimizer
    if is_cored and config.tensor_train.optimizer is not None:
        key, chosen = f"{_key(tables, name, 'tensor_train')}.optimizer", config.tensor_train.optimizer
    rule = _choose(key, RULES, chosen)
    if is_cored and "row" in rule.state.values():
        raise ConfigurationError(
            f"table {name!r} has tensor-train cores, and {rule.name} keeps state by row, which cores do not have; give "
            f'tables.tensor_train.optimizer.name = "adagrad" (or sgd, adam), or tables.{name}.storage = "dense"'
        )
    if is_cored and rule.weight_decay:
        raise ConfigurationError(
            f"{key}.weight_decay: table {name!r} has tensor-train cores, and weight decay is of rows; give "
            f'tables.tensor_train.optimizer without it, or tables.{name}.storage = "dense"'
        )
    return rule


def _check_bound(key: str, config: InitializerConfig) -> None:
    """Raises ConfigurationError where a dynamic table would begin with rows of a bound that it does not have."""
    if config.name == "uniform" and config.bound is None:
        raise ConfigurationError(
            f"{key}.bound: the default 1/√num_rows is of a number of rows, which dynamic tables do not have; give "
            f'{key}.bound = 0.01, say, or {key}.name = "normal" with {key}.std'
        )


def _tensor_train(config: TensorTrainConfig) -> TensorTrain:
    options: dict[str, Any] = config.model_dump(exclude_none=True, exclude={"min_rows", "optimizer"})
    for key, value in options.items():
        options[key] = tuple(value) if isinstance(value, list) else value
    return TensorTrain(**options)


def _dynamic(key: str, config: DynamicConfig) -> Dynamic:
    if config.capacity is None and config.capacity_bytes is None:
        raise ConfigurationError(
            f"{key}.capacity: say how many ids a dynamic table holds at most, over all ranks, or how many bytes "
            "(capacity_bytes)"
        )
    return Dynamic(**config.model_dump(exclude_none=True))


def _key(tables: TablesConfig, name: str, section: str) -> str:
    """Where the section of a table stands in the configuration: under its own name, or among the defaults."""
    is_own = getattr(tables.of(name), section) != getattr(tables, section)
    return f"tables.{name}.{section}" if is_own else f"tables.{section}"


def _choose(key: str, kinds: dict[str, Any], config: BaseModel) -> Any:
    """The chosen kind, made from the options that were given."""
    options = config.model_dump(exclude_none=True)
    if options.get("lr") == AUTO:  # where nothing is trained, nobody has chosen
        del options["lr"]
    kind = kinds[options.pop("name")]
    known = [field.name for field in fields(kind)]
    if strangers := sorted(options.keys() - set(known)):
        raise ConfigurationError(f"{key}: {kind.name} has no {', '.join(strangers)}; its options: {', '.join(known)}")
    return kind(**options)
