"""Shards by the names of their tables."""

from __future__ import annotations

from typing import Any

from rowmesh.tables.shard import Which


def shard_of(source: Any, name: str, which: Which = "owned") -> Any:
    """What a collection, or a snapshot, has of one table."""
    return next(shard for shard in source.shards(which) if shard.spec.name == name)
