"""DynamicShards: index, rules and statistics of some shards of one dynamic table; the rows are elsewhere."""

from __future__ import annotations

from rowmesh.dynamic.reference import ReferenceShards


class DynamicShards(ReferenceShards):
    """The shards `[first, last)` of one table."""
