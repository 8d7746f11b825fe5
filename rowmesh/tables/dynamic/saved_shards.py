"""SavedShards: what was saved of some shards of a dynamic table, as it is read again."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SavedShards(Protocol):
    """Some shards, one after the other, and what is saved of them.

    Attributes:
        shards: which.
        num_ids: that they know together, in fast memory.
        num_demoted: others that they know.
    """

    shards: range
    num_ids: int
    num_demoted: int

    def read(self, kind: str, which: slice) -> Tensor:
        """Some elements of a kind: numbers by id, candidate or shard, or rows and states by id; copies.

        Raises:
            CheckpointError: a file is missing or damaged, or holds something else.
        """
        ...
