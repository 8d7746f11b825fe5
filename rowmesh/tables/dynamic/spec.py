"""Dynamic: what a table of any 64-bit ids may hold, whom it admits and whom it evicts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from rowmesh._support.files.places import local_store
from rowmesh.errors import ConfigurationError

Eviction = Literal["lru", "lfu", "lru_lfu", "ttl", "score"]
Missing = Literal["initial", "zero", "error"]


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """How a dynamic table knows ids.

    Attributes:
        capacity: ids that it holds at most, over all ranks. This, or `capacity_bytes`.
        capacity_bytes: bytes that the rows of these ids take at most with their optimizer state, over all ranks; the
            index and spare frames come on top. A TableSpec makes a capacity of it.
        initial_capacity: ids that the index has room for at the start; it grows without a stop. Default: a small one.
        shards: P, logical shards; part of what the model is, and stored in checkpoints. Default: 1,024, fewer for small
            tables, so that each has about 1,000 ids or more.
        admit_after: sightings, counted over all ranks, at which an id is admitted; 1: at the first.
        sketch_width: counters a row of a count-min sketch by shard, in place of exact counts of ids that are not
            admitted yet; 0: exact counts.
        sketch_depth: rows of the sketch.
        window_steps: steps after which the counts of ids that are not admitted start anew; 0: never.
        eviction: which id goes first where a shard is full: least recently seen, least frequently seen (decayed), by
            frequency and then recency, none before its time to live and then the oldest, or the smallest score that the
            caller gave.
        decay_steps: steps in which a frequency halves; 0: never.
        ttl_steps: steps without a sighting after which an id goes even where there is room; 0: never.
        ttl_seconds: the same by the time of events, which batches then must have; 0: never.
        mode: whether an id that leaves is forgotten ("drop"), or its record (row, optimizer state, count, score, last
            step) goes to the store and comes back when the id is asked for again ("demote").
        store: where to, with "demote": `memory`, `file:FOLDER`, `rocksdb:FOLDER`, or the URL of a Redis server; see
            `rowmesh.tables.dynamic.stores`. `$NAME` stands for the variable NAME of the environment, as for a
            password. Records of an earlier run are removed.
        store_capacity: records that the store keeps at most, over all ranks; beyond, those that came first are
            forgotten, shard by shard. Needed for files. Default: no limit.
        store_retry_s: seconds for which a store that does not answer is asked again; less than what ranks wait for each
            other.
        missing: what an unknown id reads in evaluation.
        spare_frames: rows of memory that each rank has beside its share of the capacity: for ids that are not admitted,
            for unknown ones in evaluation, and for evicted ones that batches under way still read. Memory is committed
            where it is used. Default: as many as the share, and at least 65,536.

    Example:
        >>> Dynamic(capacity=100_000).num_shards
        64
    """

    capacity: int = cast("int", None)  # this, or the bytes
    capacity_bytes: int | None = None
    initial_capacity: int | None = None
    shards: int | None = None
    admit_after: int = 1
    sketch_width: int = 0
    sketch_depth: int = 4
    window_steps: int = 0
    eviction: Eviction = "lru"
    decay_steps: int = 0
    ttl_steps: int = 0
    ttl_seconds: int = 0
    mode: Literal["drop", "demote"] = "drop"
    missing: Missing = "initial"
    spare_frames: int | None = None
    store: str | None = None
    store_capacity: int | None = None
    store_retry_s: float = 30.0

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choice("eviction", self.eviction, get_args(Eviction))
        self._check_choice("missing", self.missing, get_args(Missing))
        self._check_choice("mode", self.mode, ("drop", "demote"))
        self._check_store()
        if (self.capacity is None) == (self.capacity_bytes is None):
            raise ConfigurationError(
                "a dynamic table has a capacity in ids, or capacity_bytes: give one of them, got capacity = "
                f"{self.capacity!r} and capacity_bytes = {self.capacity_bytes!r}"
            )
        if self.capacity is not None:
            self._check_capacity()
        if self.admit_after == 1 and (self.sketch_width or self.window_steps):
            raise ConfigurationError(
                "sketch_width and window_steps count ids that are not admitted yet, and admit_after = 1 admits every "
                "id at once; raise admit_after or leave them out"
            )
        if self.decay_steps and self.eviction not in ("lfu", "lru_lfu"):
            raise ConfigurationError(
                f"decay_steps is about frequencies, which eviction = {self.eviction!r} does not use; "
                'leave it out, or take "lfu" or "lru_lfu"'
            )
        if self.eviction == "ttl" and not self.has_ttl:
            raise ConfigurationError(
                'eviction = "ttl" needs ttl_steps or ttl_seconds, the steps or seconds after which an unseen id goes'
            )

    def _check_store(self) -> None:
        if self.mode == "drop":
            if self.store is not None or self.store_capacity is not None:
                raise ConfigurationError(
                    'store and store_capacity are of records that leave with mode = "demote"; give that too, or leave '
                    "them out"
                )
            return
        if not 0 <= self.store_retry_s < float("inf"):
            raise ConfigurationError(f"store_retry_s of a dynamic table must be 0 or more, got {self.store_retry_s!r}")
        if not self.store:
            raise ConfigurationError(
                'mode = "demote" needs a store: give store = "memory", "file:FOLDER", "rocksdb:FOLDER" or "redis://…"'
            )
        local_store(self.store)
        if self.store_capacity is None and self.store.startswith("file:"):
            raise ConfigurationError("a store in a file holds a stated number of records: give store_capacity")

    def _check_capacity(self) -> None:
        if self.num_shards > self.capacity:
            raise ConfigurationError(
                f"a dynamic table of capacity {self.capacity} cannot have {self.num_shards} shards: each holds at "
                "least one id; lower shards or raise capacity"
            )
        if self.initial_capacity is not None and self.initial_capacity > self.capacity:
            raise ConfigurationError(
                f"initial_capacity {self.initial_capacity} of a dynamic table is above its capacity {self.capacity}"
            )
        if self.store_capacity is not None and self.store_capacity < self.num_shards:
            raise ConfigurationError(
                f"store_capacity {self.store_capacity} of a dynamic table is below its {self.num_shards} shards, each "
                "of which keeps at least one record there; raise it, or lower shards"
            )

    def _check_numbers(self) -> None:
        lowest = {
            "capacity": 1,
            "capacity_bytes": 1,
            "initial_capacity": 1,
            "shards": 1,
            "admit_after": 1,
            "sketch_width": 0,
            "sketch_depth": 1,
            "window_steps": 0,
            "decay_steps": 0,
            "ttl_steps": 0,
            "ttl_seconds": 0,
            "spare_frames": 1,
            "store_capacity": 1,
        }
        optional = ("capacity", "capacity_bytes", "initial_capacity", "shards", "spare_frames", "store_capacity")
        for name, least in lowest.items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
                raise ConfigurationError(
                    f"{name} of a dynamic table must be a whole number from {least}, got {value!r}"
                )

    @staticmethod
    def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
        if value not in choices:
            raise ConfigurationError(f"{name} of a dynamic table must be one of {', '.join(choices)}, got {value!r}")

    def with_rows_of(self, row_bytes: int) -> Dynamic:
        """The same with a capacity in ids, where it is in bytes.

        Args:
            row_bytes: of a row with its optimizer state.

        Raises:
            ConfigurationError: not one row fits, or too few for the shards.

        Example:
            >>> Dynamic(capacity_bytes=1_000_000).with_rows_of(260).capacity
            3846
        """
        if self.capacity_bytes is None:
            return self
        if self.capacity_bytes < row_bytes:
            raise ConfigurationError(
                f"capacity_bytes = {self.capacity_bytes} holds no row: one takes {row_bytes} bytes with its optimizer "
                "state"
            )
        return replace(self, capacity=self.capacity_bytes // row_bytes, capacity_bytes=None)

    @property
    def has_ttl(self) -> bool:
        """Whether ids go when they were not seen for long."""
        return self.ttl_steps > 0 or self.ttl_seconds > 0

    def shard_capacity(self, shard: int) -> int:
        """Ids that a shard holds at most: capacity split evenly, the first shards one more."""
        return self.capacity // self.num_shards + (shard < self.capacity % self.num_shards)

    def stored_in(self, shard: int) -> int | None:
        """Records of a shard that the store keeps at most: `store_capacity`, split likewise; None: any number."""
        if self.store_capacity is None:
            return None
        return self.store_capacity // self.num_shards + (shard < self.store_capacity % self.num_shards)

    @property
    def num_shards(self) -> int:
        """P: a power of two, at most 1,024, with 1,000 ids a shard or more."""
        if self.shards is not None:
            return self.shards
        if self.capacity is None:
            raise ConfigurationError(
                "a capacity in bytes has no number of shards before a TableSpec has it; give shards"
            )
        return min(1024, 1 << max(0, (self.capacity // 1000).bit_length() - 1))
