"""Address map: a plan as one rank's kernels read it.

For the tables of a group and one rank, it maps every row to a *destination* (the rank that its request goes to), a key,
and the kind of its exchange. The *node leader* of a row is the rank of this node with the owner's place in its node.

    direct      the owner is asked, and replies with the row
    relayed     the node leader is asked, and asks the owner
    node        the node leader is asked, and holds a copy; it sends gradients on to the owner
    forwarded   no request, as a copy is here; gradients go to the node leader, then to the owner
    replicated  no request, as a copy is here; gradients go to the owner

Slots follow each other in a rank's memory range by range. Ranges that join a cycle follow the range they join. Ranges
on a fixed rank come last, so that all others have the same slots on all ranks. A key is a slot, or, if it is sent to a
node leader, the slot plus V times the owner's node.

Source: OPER §5.1 (one address for every row, whatever its parallelism). Differs: a few ranges a table, each with a
rule, instead of an array as long as the vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rowmesh.errors import ConfigurationError
from rowmesh.ops.route import COPY, FLAG_BITS, RELAY, first_rows
from rowmesh.placement.plan import Plan, RowRange, TablePlan

# In this order those of each of the sets below stand next to each other.
KINDS = ("direct", "relayed", "node", "forwarded", "replicated")
REPLIES = {"direct", "relayed", "node"}  # kinds whose rows are sent
RELAYS = {"relayed", "node", "forwarded"}  # kinds that go through the node leader
COPIES = {"node", "forwarded", "replicated"}  # kinds with copies to keep equal
FLAGS = {"direct": 0, "relayed": RELAY, "node": RELAY, "forwarded": RELAY | COPY, "replicated": COPY}
MAX_KEY = 2**32 - 1
_SEARCHED = 4  # ranges among which the kernel finds one by comparing with all starts
_NEVER = 2**63 - 1


@dataclass(frozen=True)
class Piece:
    """Rows of a table and where one rank holds them: row `rows[i]` is in slot `slots[i]`."""

    rows: range
    slots: range


class AddressMap:
    """Destination, key and kind of every row of a group, for one rank.

    Args:
        plan: of all tables.
        tables: names of the group's tables, in order.
        rank: the rank that asks.

    Attributes:
        kinds: those that occur, in the order of KINDS; the segment of a row is kind · S + table.
        num_slots: of every rank.
        key_stride: V.
        ranges: int64 `[R, 11]`: start, shift, modulus, rank, divisor, base, kind, flags, origin, then 1 / modulus and
            1 / divisor as the bits of a float64. Owner = (row − origin + shift) mod modulus + rank, slot = base + (row
            − origin) // divisor. The origin is the start, less the places of its first round that others have. Flags: 1
            the destination is the node leader, 2 a copy is here.
        index: int64 `[S, 6]`: the table's first range, how many it has, where its buckets begin in `buckets`, and the
            starts of the three ranges after the first.
        buckets: uint32, for tables of more than four ranges: of each bucket (`rowmesh.ops.route.buckets`) the range
            that its first row is in, counted from the table's first; then the last range.

    Raises:
        ConfigurationError: keys would not fit into 32 bits.
    """

    def __init__(self, plan: Plan, tables: Sequence[str], rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.tables = tuple(plan.table(name) for name in tables)
        self.num_rows = tuple(table.shape.num_rows for table in self.tables)
        self._limits = np.array(self.num_rows, np.int64)
        self._bases, self.num_slots = self._lay_out()
        self.key_stride = max(self.num_slots)
        present = {self._kind(part) for table in self.tables for part in table.ranges}
        self.kinds = tuple(kind for kind in KINDS if kind in present)
        self._check_keys()
        self.ranges = np.array([self._describe(*item) for item in self._items()], np.int64)
        self.ranges[:, 9] = (1.0 / self.ranges[:, 2]).view(np.int64)
        self.ranges[:, 10] = (1.0 / self.ranges[:, 4]).view(np.int64)
        buckets = [_buckets(table) for table in self.tables]
        self.buckets = np.concatenate(buckets)
        self.index = self._make_index([len(part) for part in buckets])

    @property
    def num_tables(self) -> int:
        """S."""
        return len(self.tables)

    @property
    def num_segments(self) -> int:
        """Segments that rows are sorted into: one for each table and kind."""
        return len(self.kinds) * self.num_tables

    @property
    def num_bytes(self) -> int:
        """Memory of the map."""
        return self.ranges.nbytes + self.index.nbytes + self.buckets.nbytes

    def segments(self, kinds: set[str]) -> range:
        """The segments of kinds that stand next to each other in KINDS; where there are none, where they would be."""
        chosen = [index for index, kind in enumerate(self.kinds) if kind in kinds]
        if not chosen:
            first = min(KINDS.index(kind) for kind in kinds)
            before = sum(KINDS.index(kind) < first for kind in self.kinds) * self.num_tables
            return range(before, before)
        return range(chosen[0] * self.num_tables, (chosen[-1] + 1) * self.num_tables)

    def ranges_without_owner(self, kind: str) -> np.ndarray:
        """`ranges`, with destination W, which is no rank, for all rows of a kind that needs no node leader."""
        ranges = self.ranges.copy()
        ranges[ranges[:, 6] == self.kinds.index(kind), 2:4] = 1, self.plan.world_size  # anything mod 1, plus W
        return ranges

    def header(self, arenas: int, row_bytes: int) -> np.ndarray:
        """The words that `rowmesh.ops.route` reads; the map must live as long as they do.

        Args:
            arenas: address of int64 `[W]`: where each rank's slot 0 can be read, or 0.
            row_bytes: of one row.
        """
        plan = self.plan
        replying = sum(kind in REPLIES for kind in self.kinds)
        flags = sum((FLAGS[kind] << FLAG_BITS * index) for index, kind in enumerate(self.kinds))
        return np.array(
            [
                self.ranges.ctypes.data,
                self.index.ctypes.data,
                self.buckets.ctypes.data,
                self._limits.ctypes.data,
                self.num_tables,
                len(self.kinds),
                replying,
                plan.world_size,
                self.rank,
                plan.ranks_per_node,
                self.key_stride,
                arenas,
                row_bytes,
                flags,
            ],
            np.int64,
        )

    def locate(self, table: int, row: int) -> tuple[int, int, str]:
        """(destination, key, kind) of one row; `rowmesh.ops.route` does this for all ids of a batch."""
        plan, part, base = self.plan, *self._part(table, row)
        owner, kind = part.owner(row, plan.world_size), self._kind(part)
        slot = base + (row - part.start + part.phase) // self._divisor(part)
        if kind not in RELAYS:
            return owner, slot, kind
        node, place = divmod(owner, plan.ranks_per_node)
        return self.rank // plan.ranks_per_node * plan.ranks_per_node + place, node * self.key_stride + slot, kind

    def held(self, table: int, without: Container[str] = ()) -> Iterator[Piece]:
        """All rows of a table that this rank holds, copies included, range by range; without those of some kinds."""
        world_size, per_node = self.plan.world_size, self.plan.ranks_per_node
        for part, base in zip(self.tables[table].ranges, self._bases[table], strict=True):
            stride = self._divisor(part)
            if (part.rule == "fixed" and part.rank != self.rank) or self._kind(part) in without:
                continue
            first = 0
            if part.rule in ("cyclic", "node"):
                first = (self.rank % stride - part.shift) % stride
            assert stride in (1, per_node, world_size)
            rows = range(part.start + first, part.stop, stride)
            begin = base + (first + part.phase) // stride
            yield Piece(rows, range(begin, begin + len(rows)))

    @property
    def copied_slots(self) -> np.ndarray:
        """uint32, ascending: the slots of rows here that other ranks hold, too."""
        slots = [np.empty(0, np.uint32)]
        for table in range(self.num_tables):
            alone = {*self.held(table, without=COPIES)}
            slots += [np.array(piece.slots, np.uint32) for piece in self.held(table) if piece not in alone]
        return np.sort(np.concatenate(slots))

    def owned(self, table: int) -> Iterator[Piece]:
        """The rows of a table that this rank owns: every row of a table is in the pieces of exactly one rank."""
        for part, base in zip(self.tables[table].ranges, self._bases[table], strict=True):
            if part.rule == "fixed":
                if part.rank == self.rank:
                    yield Piece(range(part.start, part.stop), range(base, base + len(part)))
                continue
            world_size, divisor = self.plan.world_size, self._divisor(part)
            first = (self.rank - part.shift) % world_size
            rows = range(part.start + first, part.stop, world_size)
            begin, step = base + (first + part.phase) // divisor, world_size // divisor
            yield Piece(rows, range(begin, begin + len(rows) * step, step))

    def _kind(self, part: RowRange) -> str:
        nodes, world_size = self.plan.num_nodes, self.plan.world_size
        relayed = part.two_hop and nodes > 1
        if part.rule == "replicated" and world_size > 1:
            return "forwarded" if relayed else "replicated"
        if part.rule == "node" and nodes > 1:
            return "node"
        return "relayed" if relayed else "direct"

    def _divisor(self, part: RowRange) -> int:
        return part.round_size(self.plan.world_size, self.plan.ranks_per_node)

    def _lay_out(self) -> tuple[list[list[int]], tuple[int, ...]]:
        """The first slot of every range, and the slots of every rank."""
        world_size, per_node = self.plan.world_size, self.plan.ranks_per_node
        bases: list[list[int]] = [[0] * len(table.ranges) for table in self.tables]
        on_all = 0
        for table, of in zip(self.tables, bases, strict=True):
            for cycle in table.cycles(world_size, per_node):
                for index in cycle:
                    part = table.ranges[index]
                    of[index] = on_all - (part.phase > 0)
                    on_all += part.num_slots(0, world_size, per_node)
        slots = [on_all] * world_size
        for table, of in zip(self.tables, bases, strict=True):
            for index, part in enumerate(table.ranges):
                if part.rule == "fixed":
                    of[index] = slots[part.rank]
                    slots[part.rank] += len(part)
        return bases, tuple(slots)

    def _check_keys(self) -> None:
        num_nodes = self.plan.num_nodes if set(self.kinds) & RELAYS else 1  # else a key is a slot
        if self.key_stride * num_nodes > MAX_KEY:
            names = ", ".join(f"{table.name!r} ({table.shape.num_rows:,} rows)" for table in self.tables)
            nodes = f" on each of {num_nodes} nodes" if num_nodes > 1 else ""
            raise ConfigurationError(
                f"tables {names}: the fullest rank would hold {self.key_stride:,} rows{nodes}; at most {MAX_KEY:,} can "
                "be addressed; use more ranks, or give some tables another optimizer, which makes a group of their own"
            )

    def _items(self) -> Iterator[tuple[RowRange, int]]:
        for table, bases in zip(self.tables, self._bases, strict=True):
            yield from zip(table.ranges, bases, strict=True)

    def _part(self, table: int, row: int) -> tuple[RowRange, int]:
        for part, base in zip(self.tables[table].ranges, self._bases[table], strict=True):
            if part.start <= row < part.stop:
                return part, base
        raise IndexError(f"table {self.tables[table].name!r} has no row {row}")

    def _make_index(self, num_buckets: Sequence[int]) -> np.ndarray:
        rows, first, bucket = [], 0, 0
        for table, size in zip(self.tables, num_buckets, strict=True):
            starts = [part.start for part in table.ranges[1:_SEARCHED]]
            starts += [_NEVER] * (_SEARCHED - 1 - len(starts))
            rows.append((first, len(table.ranges), bucket, *starts))
            first, bucket = first + len(table.ranges), bucket + size
        return np.array(rows, np.int64)

    def _describe(self, part: RowRange, base: int) -> tuple[int, ...]:
        kind = self._kind(part)
        fixed, world_size = part.rule == "fixed", self.plan.world_size
        return (
            part.start,
            0 if fixed else (part.shift - part.phase) % world_size,
            1 if fixed else world_size,
            part.rank if fixed else 0,
            self._divisor(part),
            base,
            self.kinds.index(kind),
            FLAGS[kind],
            part.start - part.phase,
            0,
            0,
        )


def _buckets(table: TablePlan) -> np.ndarray:
    """Where the kernel begins to search for the range of a row, and where it ends."""
    if len(table.ranges) <= _SEARCHED:
        return np.zeros(0, np.uint32)
    starts = [part.start for part in table.ranges]
    ranges = np.searchsorted(starts, first_rows(table.shape.num_rows), side="right") - 1
    return np.append(ranges, len(starts) - 1).astype(np.uint32)
