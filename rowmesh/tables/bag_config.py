"""TorchRec's EmbeddingBagConfig and EmbeddingConfig as tables, without importing it; what has no equal is refused."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from rowmesh.errors import ConfigurationError
from rowmesh.tables.initializer import Constant, Initializer, Normal, Uniform

_DTYPES = {"FP32": torch.float32, "FP64": torch.float64, "BF16": torch.bfloat16}
# Fields that change what a table computes; their usual values are all false.
_UNKNOWN = ("num_embeddings_post_pruning", "input_dim", "total_num_buckets", "use_virtual_table")


def fields_of(config: Any, changes: dict[str, Any], *, is_pooled: bool) -> dict[str, Any]:
    """Arguments of a TableSpec, from a config and what the user wants otherwise.

    `need_pos` is passed over: it has TorchRec's row-wise sharding send positions along, which are never sent here.

    Args:
        config: what to convert.
        changes: arguments that take the place of what it says.
        is_pooled: whether it is an EmbeddingBagConfig, whose rows are pooled, or an EmbeddingConfig.

    Raises:
        ConfigurationError: the config asks for what rowmesh cannot do, and `changes` does not say what to do instead;
            or it is of the other kind.
    """
    for name in _UNKNOWN:
        if getattr(config, name, None):
            raise ConfigurationError(
                f"table {config.name!r}: {name} = {getattr(config, name)!r} has no equal in rowmesh; leave it out"
            )
    fields: dict[str, Any] = {
        "name": config.name,
        "num_rows": config.num_embeddings,
        "dim": config.embedding_dim,
        "features": tuple(config.feature_names),
    }
    if "pooling" not in changes:
        fields["pooling"] = _pooling(config, is_pooled=is_pooled)
    if "dtype" not in changes:
        fields["dtype"] = _dtype(config)
    if "initializer" not in changes:
        fields["initializer"] = _initializer(config)
    return fields | changes


def _pooling(config: Any, *, is_pooled: bool) -> str:
    pooling = getattr(config, "pooling", None)
    if is_pooled and pooling is None:
        raise ConfigurationError(
            f"table {config.name!r}: the config has no pooling, as an EmbeddingConfig, whose rows are not pooled: "
            "convert it by from_embedding_config, or pass pooling=…"
        )
    if not is_pooled and pooling is not None:
        raise ConfigurationError(
            f"table {config.name!r}: the config has pooling {pooling}, as an EmbeddingBagConfig: convert it by "
            "from_embedding_bag_config, or pass pooling=…"
        )
    return str(getattr(pooling, "value", pooling)).lower() if is_pooled else "none"


def _dtype(config: Any) -> torch.dtype:
    data_type = getattr(config, "data_type", "FP32")
    name = str(getattr(data_type, "value", data_type))
    if name not in _DTYPES:
        raise ConfigurationError(
            f"table {config.name!r}: rows of data_type {name} cannot be trained here; pass dtype=…, one of "
            f"{list(_DTYPES.values())}"
        )
    return _DTYPES[name]


def _initializer(config: Any) -> Initializer:
    """The equal of `init_fn`, which TorchRec fills with a partial of `torch.nn.init.uniform_` where there is none."""
    function = getattr(config, "init_fn", None)
    if function is None:
        return Uniform()
    given = function.keywords if isinstance(function, partial) else {}
    positional = getattr(function, "args", ())
    match (getattr(function, "func", function), positional, given):
        case (torch.nn.init.uniform_, (), {"a": low, "b": high}) if low == -high:
            # The usual bound stays a rule: tables of different sizes are then of one specification.
            is_usual = math.isclose(high, config.num_embeddings**-0.5, rel_tol=1e-9)
            return Uniform() if is_usual else Uniform(bound=high)
        case (torch.nn.init.normal_, (), _):
            return Normal(mean=given.get("mean", 0.0), std=given.get("std", 1.0))
        case (torch.nn.init.constant_, (), {"val": value}):
            return Constant(value=value)
        case (torch.nn.init.zeros_, (), _):
            return Constant()
    raise ConfigurationError(
        f"table {config.name!r}: rows start from a function of (seed, table, row), which init_fn {function!r} is not; "
        "pass initializer=Uniform(…), Normal(…) or Constant(…)"
    )
