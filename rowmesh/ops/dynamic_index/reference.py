"""The index as dictionaries, one a shard."""

from __future__ import annotations


class ReferenceIndex:
    """From (shard, id) to slot."""

    def __init__(self, num_shards: int) -> None:
        self.shards: list[dict[int, int]] = [{} for _ in range(num_shards)]

    def find(self, ids: list[int], shards: list[int]) -> list[int]:
        return [self.shards[shard].get(i, -1) for i, shard in zip(ids, shards, strict=True)]

    def insert(self, ids: list[int], shards: list[int], slots: list[int]) -> None:
        for i, shard, slot in zip(ids, shards, slots, strict=True):
            self.shards[shard][i] = slot

    def erase(self, ids: list[int], shards: list[int]) -> list[int]:
        return [self.shards[shard].pop(i) for i, shard in zip(ids, shards, strict=True)]
