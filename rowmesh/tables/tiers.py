"""Tiers: how much of a tiered table is in fast memory, and where all of it is."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from rowmesh.errors import ConfigurationError
from rowmesh.tables.backing import MakeStore, MemoryStore
from rowmesh.tables.cached import CachedArena
from rowmesh.tables.file_store import FileStore
from rowmesh.tables.group import TableGroup

SPARE_SHARE = 8  # one more cache slot for so many, where other replicas change rows


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Where rows of tables with `storage="tiered"` are.

    Attributes:
        fast_share: of a group's rows on a rank, how many fit into fast memory, above 0 and at most 1.
        fast_rows: fewest rows that fit, where there are as many: batches in sight must.
        folder: where files of rows are made; None: in memory.
        threads: that read a file, and as many that write it.
        direct: whether files are read and written past the system's page cache.
        verify: whether versions of rows are kept and checked.
        poison: whether NaN is left where rows were in fast memory; for tests.
        timeout_s: how long a batch waits for room.

    Example:
        >>> Tiers(fast_share=0.1, fast_rows=100).num_cached(2000)
        200
    """

    fast_share: float = 0.25
    fast_rows: int = 65_536
    folder: Path | None = None
    threads: int = 4
    direct: bool = False
    verify: bool = False
    poison: bool = False
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0.0 < self.fast_share <= 1.0:
            raise ConfigurationError(f"fast_share must be above 0 and at most 1, got {self.fast_share}")
        if self.fast_rows < 1:
            raise ConfigurationError(f"fast_rows must be 1 or more, got {self.fast_rows}")
        if isinstance(self.folder, str):
            object.__setattr__(self, "folder", Path(self.folder))

    def num_cached(self, num_rows: int) -> int:
        """How many of so many rows fit into fast memory."""
        return max(min(num_rows, max(self.fast_rows, round(self.fast_share * num_rows))), 1)

    def make_arena(
        self,
        group: TableGroup,
        num_slots: int,
        rank: int,
        device: torch.device | None = None,
        *,
        is_shared: bool = False,
        kept: np.ndarray | None = None,
    ) -> CachedArena:
        """The rows of a group on a rank.

        Args:
            group: the tables.
            num_slots: rows of the rank.
            rank: which one.
            device: whose memory is fast memory; None: the host's.
            is_shared: whether other replicas change rows too: for these an eighth more fit into fast memory.
            kept: uint32 `[n]`, slots of rows that stay in fast memory, beside the others; by default none.
        """
        num_cached = self.num_cached(num_slots)
        return CachedArena(
            group,
            num_slots,
            num_cached,
            self._store(group, rank),
            spare=max(num_cached // SPARE_SHARE, 1) if is_shared else 0,
            kept=kept,
            device=device,
            verify=self.verify,
            poison=self.poison,
            timeout_s=self.timeout_s,
        )

    def _store(self, group: TableGroup, rank: int) -> MakeStore:
        if self.folder is None:
            return MemoryStore
        path = self.folder / f"{group.name}.{rank}.{secrets.token_hex(4)}.rows"  # has no name once it is open
        return partial(FileStore, path=path, num_threads=self.threads, direct=self.direct)
