"""Plan: which ranks hold each row, as a value that can be printed, saved, compared and run.

A table's rows are cut into a few ranges. Each range has a rule instead of a list of owners, so a plan of billions of
rows is a few kilobytes:

    cyclic       one copy; row r is on rank (r − start + shift) mod W
    node         one copy on every node, on the rank with the same place in its node as the owner
    replicated   a copy on every rank
    fixed        one copy, on one rank

Every row has one *owner*, the rank that adds up the gradients of all ranks. Under `cyclic` and `fixed` it is the only
holder. The owners of rows with copies are cyclic too, so that all ranks share the work of keeping copies equal.

Cyclic rows are laid out in *rounds*, one row on each rank. A round takes a slot on every rank even if it is not full.
Ranges that follow each other in the same rounds form a *cycle*. Where ids are in no order of frequency, a rule has
many short ranges. Such a range *joins* the last cycle of its rule whose last round is not full: its first row takes
the next place of that round (`phase`). So hundreds of short ranges take no more memory than one long one.

A table may have several *replicas*, each on its own group of ranks. Its rules then refer to the W ranks of such a group
(`rowmesh.mesh.grid`).

Source: OPER §3.2 (placement and fetch path of every row), §5.1. Differs: rules instead of an address for every row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from rowmesh._support.files.atomic import replacing_file
from rowmesh._support.suggest import hint
from rowmesh.errors import ConfigurationError
from rowmesh.mesh.grid import Grid, Together
from rowmesh.tables import TableSpec
from rowmesh.tables.dense import compute_dtype
from rowmesh.tables.spec import Send

RuleName = Literal["cyclic", "node", "replicated", "fixed"]
Sent = Literal["rows", "sums"]
FORMAT = 1
RULE_NAMES = get_args(RuleName)
MAX_RANKS = 1 << 24  # `rowmesh.ops.route` keeps a rank in 24 bits
_NUMBERS = ("start", "stop", "shift", "rank", "phase")  # of a range


@dataclass(frozen=True)
class TableShape:
    """Rows and bytes of a table, as placement sees it.

    Attributes:
        name: of the table.
        num_rows: rows.
        value_bytes: of a row, which is what a fetch moves.
        gradient_bytes: of a row, which is what a push moves.
        state_bytes: optimizer state of a row, which every copy has too.
        send: `TableSpec.send`, which strategies follow. It is no part of the shape: a plan, which has a `send` of its
            own, fits the table whatever stands here.
    """

    name: str
    num_rows: int
    value_bytes: int
    gradient_bytes: int
    state_bytes: int = 0
    send: Send = field(default="rows", compare=False, repr=False)

    @staticmethod
    def of(table: TableSpec) -> TableShape:
        """The shape of a table.

        Example:
            >>> TableShape.of(TableSpec(name="item", num_rows=10, dim=16))
            TableShape(name='item', num_rows=10, value_bytes=64, gradient_bytes=64, state_bytes=4)
        """
        item = compute_dtype(table.dtype).itemsize
        state = sum(item * (1 if extent == "row" else table.dim) for extent in table.optimizer.state.values())
        value_bytes = table.dim * table.dtype.itemsize
        send = "rows" if table.send == "auto" and table.why_no_sums else table.send
        return TableShape(table.name, table.num_rows, value_bytes, table.dim * item, state, send)

    @property
    def row_bytes(self) -> int:
        """Memory that one copy of a row takes."""
        return self.value_bytes + self.state_bytes


@dataclass(frozen=True)
class RowRange:
    """Rows start … stop − 1 of a table, and the rule that says which ranks hold them.

    Attributes:
        start: the first row.
        stop: one past the last.
        rule: see the module.
        shift: the owner of the first row, 0 … W − 1 (not for `fixed`).
        rank: the holder (for `fixed` alone).
        two_hop: requests and gradients for other nodes are merged within the node first.
        phase: places of its first round that earlier ranges of the cycle have taken. 0 begins a cycle; `replicated` and
            `fixed` allow no other.
    """

    start: int
    stop: int
    rule: RuleName = "cyclic"
    shift: int = 0
    rank: int = 0
    two_hop: bool = False
    phase: int = 0

    def __len__(self) -> int:
        return self.stop - self.start

    def owner(self, row: int, world_size: int) -> int:
        """The rank that adds up the gradients of a row."""
        return self.rank if self.rule == "fixed" else (row - self.start + self.shift) % world_size

    def holders(self, row: int, world_size: int, ranks_per_node: int) -> tuple[int, ...]:
        """The ranks that hold a copy of a row, in order."""
        if self.rule == "replicated":
            return tuple(range(world_size))
        owner = self.owner(row, world_size)
        if self.rule == "node":
            return tuple(range(owner % ranks_per_node, world_size, ranks_per_node))
        return (owner,)

    def num_slots(self, rank: int, world_size: int, ranks_per_node: int) -> int:
        """Slots that a rank keeps for the range; the last of them may stay unused.

        The slot of a round that it joins is counted with the range that began the round.
        """
        if self.rule == "fixed":
            return len(self) if rank == self.rank else 0
        round_ = self.round_size(world_size, ranks_per_node)
        return -(-(self.phase + len(self)) // round_) - (self.phase > 0)

    def round_size(self, world_size: int, ranks_per_node: int) -> int:
        """Rows that share a slot number: one on each of so many ranks, in every node where each has a copy."""
        return {"cyclic": world_size, "node": ranks_per_node, "replicated": 1, "fixed": 1}[self.rule]


@dataclass(frozen=True)
class TablePlan:
    """The ranges of one table, in order, without gaps.

    Attributes:
        shape: the table.
        ranges: of its rows.
        replicas: M, replica groups; the rules of the ranges speak of the ranks of one.
        send: what an owner answers with in messages: the rows that were asked for, or their sums, one a bag. Sums are
            of a table whose one range is fixed to an owner.
    """

    shape: TableShape
    ranges: tuple[RowRange, ...]
    replicas: int = 1
    send: Sent = "rows"

    @staticmethod
    def of_sums(shape: TableShape, owner: int, replicas: int = 1) -> TablePlan:
        """A table that is whole on one rank and sends sums.

        Example:
            >>> TablePlan.of_sums(TableShape("item", 10, 64, 64), owner=2).ranges
            (RowRange(start=0, stop=10, rule='fixed', shift=0, rank=2, two_hop=False, phase=0),)
        """
        return TablePlan(shape, (RowRange(0, shape.num_rows, "fixed", rank=owner),), replicas, "sums")

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.shape.name

    def range_of(self, row: int) -> RowRange:
        """The range a row is in."""
        for part in self.ranges:
            if part.start <= row < part.stop:
                return part
        raise ConfigurationError(f"table {self.name!r} has rows 0 to {self.shape.num_rows - 1}, no row {row}")

    def cycles(self, world_size: int, ranks_per_node: int) -> list[list[int]]:
        """Indices of the ranges of each cycle, in order; `fixed` ranges are in none.

        Raises:
            ConfigurationError: a range joins no cycle, or does not go on where the cycle ended.
        """
        cycles: list[list[int]] = []
        unfilled: dict[RuleName, _Unfilled] = {}
        for index, part in enumerate(self.ranges):
            round_ = part.round_size(world_size, ranks_per_node)
            cycle = [index]
            if part.phase:
                cycle = self._joined(part, round_, unfilled.pop(part.rule, None))
                cycle.append(index)
            elif part.rule != "fixed":
                cycles.append(cycle)
            if phase := (part.phase + len(part)) % round_:
                unfilled[part.rule] = _Unfilled(cycle, phase, (part.shift + len(part)) % world_size)
        return cycles

    def _joined(self, part: RowRange, round_size: int, found: _Unfilled | None) -> list[int]:
        """The cycle that a range joins."""
        where = f"table {self.name!r}, rows {part.start} to {part.stop - 1}"
        if not 0 < part.phase < round_size:
            raise ConfigurationError(
                f"{where}: phase {part.phase}, but a round of rule {part.rule!r} has {round_size} place(s); plan again"
            )
        if found is None:
            raise ConfigurationError(
                f"{where}: phase {part.phase}, but no round of rule {part.rule!r} before is unfilled; plan again"
            )
        if (part.phase, part.shift) != (found.phase, found.shift):
            raise ConfigurationError(
                f"{where}: phase {part.phase} and shift {part.shift}, but the cycle that they join goes on with phase "
                f"{found.phase} and shift {found.shift}; plan again"
            )
        return found.cycle


@dataclass(frozen=True)
class _Unfilled:
    """A cycle whose last round is not full, and the phase and shift with which it goes on."""

    cycle: list[int]
    phase: int
    shift: int


@dataclass(frozen=True, repr=False)
class Plan:
    """A placement of all tables on all ranks.

    Attributes:
        tables: one entry a table.
        world_size: W.
        ranks_per_node: G; ranks n·G … (n + 1)·G − 1 are one node.
        strategy: what made it.
        notes: why it is as it is: what was chosen, from what, by which number.
        together: which ranks of a table with replicas have consecutive numbers, see `Grid`.

    Example:
        >>> shape = TableShape("item", 10, value_bytes=64, gradient_bytes=64, state_bytes=4)
        >>> plan = Plan.cyclic([shape], world_size=4)
        >>> plan
        Plan(1 tables, 10 rows, 4 ranks on 1 nodes, strategy 'cyclic')
        >>> plan.check()
        >>> plan.memory_bytes
        (204, 204, 204, 204)
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    tables: tuple[TablePlan, ...]
    world_size: int
    ranks_per_node: int
    strategy: str = "cyclic"
    notes: Mapping[str, Any] = field(default_factory=dict)
    together: Together = "shards"

    @staticmethod
    def cyclic(
        shapes: Sequence[TableShape],
        world_size: int,
        ranks_per_node: int | None = None,
        *,
        replicas: int | Mapping[str, int] = 1,
        together: Together = "shards",
    ) -> Plan:
        """Every table cyclic over all ranks, or over those of a replica group: the plan of a run that has none.

        The shift by the number of the table keeps the most frequent rows of all tables from meeting on one rank. Tables
        whose shape has `send="sums"` are whole on one rank each, so that ranks send about as much and have about as
        much of them.

        Args:
            shapes: the tables.
            world_size: T.
            ranks_per_node: G; by default all ranks are one node.
            replicas: M, or M by table.
            together: which ranks of a replicated table have consecutive numbers.

        Raises:
            ConfigurationError: M does not divide T, or tables by name are not these.
        """
        if not isinstance(replicas, int):
            _check_names(replicas, [shape.name for shape in shapes])
        tables = []
        for index, shape in enumerate(shapes):
            count = replicas if isinstance(replicas, int) else replicas[shape.name]
            size = Grid(world_size, count).shards
            tables.append(TablePlan(shape, (RowRange(0, shape.num_rows, shift=index % size),), count))
        for count in {table.replicas for table in tables if table.shape.send == "sums"}:
            whole = [i for i, table in enumerate(tables) if (table.shape.send, table.replicas) == ("sums", count)]
            owners = _balanced_owners([tables[i].shape for i in whole], Grid(world_size, count).shards)
            for i, owner in zip(whole, owners, strict=True):
                tables[i] = TablePlan.of_sums(tables[i].shape, owner, count)
        return Plan(tuple(tables), world_size, ranks_per_node or world_size, together=together)

    def __repr__(self) -> str:
        rows = sum(table.shape.num_rows for table in self.tables)
        counts = f"{len(self.tables)} tables, {rows:,} rows"
        replicas = f", replicas {', '.join(map(str, self.replica_counts))}" if self.is_replicated else ""
        ranks = f"{self.world_size} ranks on {self.num_nodes} nodes"
        return f"Plan({counts}, {ranks}, strategy {self.strategy!r}{replicas})"

    @property
    def num_nodes(self) -> int:
        """H, the number of nodes."""
        return self.world_size // self.ranks_per_node

    @property
    def replicas(self) -> dict[str, int]:
        """M of each table, by name."""
        return {table.name: table.replicas for table in self.tables}

    @property
    def replica_counts(self) -> tuple[int, ...]:
        """The Ms of the tables, each once, ascending."""
        return tuple(sorted({table.replicas for table in self.tables}))

    @property
    def is_replicated(self) -> bool:
        """Whether any table has several replicas."""
        return any(table.replicas > 1 for table in self.tables)

    def grid(self, replicas: int) -> Grid:
        """How the ranks form so many replica groups."""
        return Grid(self.world_size, replicas, self.together)

    def part(self, replicas: int) -> Plan:
        """The tables of M replicas, as the plan of one of their groups: for N ranks, without replicas.

        Example:
            >>> shape = TableShape("item", 10, value_bytes=64, gradient_bytes=64)
            >>> plan = Plan.cyclic([shape], world_size=4, replicas=2)
            >>> plan.part(2) == Plan.cyclic([shape], world_size=2)
            True
        """
        grid = self.grid(replicas)
        tables = tuple(replace(table, replicas=1) for table in self.tables if table.replicas == replicas)
        return Plan(tables, grid.shards, grid.ranks_per_node(self.ranks_per_node), self.strategy, self.notes)

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Rows and optimizer state that each rank holds."""
        return self._held(lambda table: table.shape.row_bytes)

    @property
    def mark_bytes(self) -> tuple[int, ...]:
        """Bytes of marks that averaging replicas needs on each rank: one for every replicated row that it holds."""
        return self._held(lambda table: int(table.replicas > 1))

    def _held(self, bytes_of: Callable[[TablePlan], int]) -> tuple[int, ...]:
        """Bytes of each rank, given those of a row."""
        total = np.zeros(self.world_size, np.int64)
        for replicas in self.replica_counts:
            grid = self.grid(replicas)
            per_node, everywhere = grid.ranks_per_node(self.ranks_per_node), 0
            held = np.zeros(grid.shards, np.int64)
            for table in self.tables:
                if table.replicas != replicas:
                    continue
                row_bytes = bytes_of(table)
                for piece in table.ranges:
                    if piece.rule == "fixed":
                        held[piece.rank] += row_bytes * len(piece)
                    else:
                        everywhere += row_bytes * piece.num_slots(0, grid.shards, per_node)
            shards = np.array([grid.place(rank)[1] for rank in range(self.world_size)])
            total += held[shards] + everywhere
        return tuple(total.tolist())

    def table(self, name: str) -> TablePlan:
        """The plan of one table."""
        for table in self.tables:
            if table.name == name:
                return table
        raise ConfigurationError(f"the plan has no table {name!r}; it has {[table.name for table in self.tables]}")

    def check(self, memory_limit_bytes: int | None = None) -> None:
        """Makes sure that every row has a owner that exists, and that memory fits.

        Raises:
            ConfigurationError: names the table and rows, or the rank and how much is missing.
        """
        if not 1 <= self.ranks_per_node <= self.world_size or self.world_size % self.ranks_per_node:
            raise ConfigurationError(
                f"a plan for {self.world_size} ranks cannot have {self.ranks_per_node} ranks a node: "
                "all nodes must have equally many"
            )
        if self.world_size >= MAX_RANKS:
            raise ConfigurationError(
                f"a plan cannot be for {self.world_size:,} ranks; at most {MAX_RANKS - 1:,} can be"
            )
        names = [table.name for table in self.tables]
        if len(set(names)) < len(names):
            raise ConfigurationError(
                f"the plan names a table twice: {sorted({n for n in names if names.count(n) > 1})}"
            )
        for table in self.tables:
            try:
                grid = self.grid(table.replicas)
            except ConfigurationError as error:
                raise ConfigurationError(f"table {table.name!r}: {error}") from error
            _check_ranges(table, grid.shards)
            _check_send(table)
            table.cycles(grid.shards, grid.ranks_per_node(self.ranks_per_node))
        if memory_limit_bytes is not None:
            for rank, needed in enumerate(self.memory_bytes):
                if needed > memory_limit_bytes:
                    raise ConfigurationError(
                        f"rank {rank} would hold {needed:,} bytes of rows and optimizer state, "
                        f"{needed - memory_limit_bytes:,} more than the limit of {memory_limit_bytes:,}; replicate "
                        f"less, or use more ranks"
                    )

    def check_fits(self, shapes: Sequence[TableShape], world_size: int, ranks_per_node: int) -> None:
        """Makes sure that the plan is one for these tables and ranks.

        Raises:
            ConfigurationError: it is complete in itself, but for other tables or ranks; says which.
        """
        self.check()
        if self.world_size != world_size:
            raise ConfigurationError(
                f"the plan is for {self.world_size} ranks, but {world_size} take part; plan again, or start as many"
            )
        depends = any(part.two_hop or part.rule == "node" for table in self.tables for part in table.ranges)
        if depends and self.ranks_per_node != ranks_per_node:
            raise ConfigurationError(
                f"the plan is for nodes of {self.ranks_per_node} ranks, but these have {ranks_per_node}; plan again"
            )
        for shape in shapes:
            if self.table(shape.name).shape != shape:
                raise ConfigurationError(
                    f"the plan is for another table {shape.name!r}: {self.table(shape.name).shape}, here it is "
                    f"{shape}; plan again"
                )
        if extra := {table.name for table in self.tables} - {shape.name for shape in shapes}:
            raise ConfigurationError(f"the plan has tables that are not here: {sorted(extra)}; plan again")

    def to_json(self) -> str:
        """Readable, one line a range."""
        head = {
            "format": FORMAT,
            "strategy": self.strategy,
            "world_size": self.world_size,
            "ranks_per_node": self.ranks_per_node,
            "notes": dict(self.notes),
        }
        if self.is_replicated:
            head["together"] = self.together
        tables = ",\n".join(
            f'  {{"shape": {json.dumps(_described(table.shape))}{_replicas(table)}{_send(table)}, "ranges": [\n'
            + ",\n".join(f"    {json.dumps(_compact(part))}" for part in table.ranges)
            + "]}"
            for table in self.tables
        )
        return f'{json.dumps(head, indent=1)[:-2]},\n "tables": [\n{tables}\n ]}}\n'

    @staticmethod
    def from_json(text: str, source: str = "plan") -> Plan:
        """Reads what `to_json` wrote.

        Raises:
            ConfigurationError: it is no plan, or one of another format; `source` is named.
        """
        try:
            fields = json.loads(text)
            if (found := fields.pop("format")) != FORMAT:
                raise ConfigurationError(f"{source}: format {found}, this rowmesh reads {FORMAT}; make the plan again")
            tables = tuple(
                TablePlan(
                    TableShape(**entry["shape"]),
                    tuple(RowRange(**part) for part in entry["ranges"]),
                    entry.get("replicas", 1),
                    entry.get("send", "rows"),
                )
                for entry in fields.pop("tables")
            )
            plan = Plan(tables, **fields)
            _check_types(plan)
            plan.check()
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"{source}: not a plan ({error}); make it with `rowmesh plan`") from error
        return plan

    def save(self, path: Path) -> None:
        """Writes the plan as JSON; what stood at `path` stays where that fails."""
        with replacing_file(path) as file:
            file.write(self.to_json().encode())

    @staticmethod
    def load(path: Path) -> Plan:
        """Reads a plan.

        Raises:
            ConfigurationError: the file is missing or no plan.
        """
        try:
            return Plan.from_json(path.read_text(encoding="utf-8"), str(path))
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{path}: not a plan ({error}); make it with `rowmesh plan`") from error
        except OSError as error:
            raise ConfigurationError(f"cannot read the plan {path}: {error.strerror}") from error


def _check_names(replicas: Mapping[str, int], names: Sequence[str]) -> None:
    """Raises ConfigurationError where the tables that have replicas are not those that there are."""
    for name in replicas:
        if name not in names:
            raise ConfigurationError(f"replicas name no table {name!r}{hint(name, names)}")
    for name in names:
        if name not in replicas:
            raise ConfigurationError(f"replicas do not say how many table {name!r} has; give 1 where it has no others")


def _replicas(table: TablePlan) -> str:
    return f', "replicas": {table.replicas}' if table.replicas != 1 else ""


def _send(table: TablePlan) -> str:
    return "" if table.send == "rows" else f', "send": {json.dumps(table.send)}'


def _described(shape: TableShape) -> dict[str, Any]:
    """The fields that a plan depends on."""
    return {key: value for key, value in asdict(shape).items() if key != "send"}


def _balanced_owners(shapes: Sequence[TableShape], num_ranks: int) -> list[int]:
    """A rank for each table: as many bytes of vectors as others, then as few bytes of rows; wide and long tables first.

    How many ids a bag has is not known here; a strategy that has a profile knows more.
    """
    owners, load = [0] * len(shapes), [(0, 0)] * num_ranks
    sizes = [(shape.gradient_bytes, shape.row_bytes * shape.num_rows) for shape in shapes]
    for index in sorted(range(len(shapes)), key=lambda i: sizes[i], reverse=True):
        rank = owners[index] = min(range(num_ranks), key=lambda rank: load[rank])
        load[rank] = (load[rank][0] + sizes[index][0], load[rank][1] + sizes[index][1])
    return owners


def _compact(part: RowRange) -> dict[str, Any]:
    """The fields that say something."""
    values = asdict(part)
    defaults = asdict(RowRange(part.start, part.stop, part.rule))
    return {key: v for key, v in values.items() if key in ("start", "stop", "rule") or v != defaults[key]}


def _check_types(plan: Plan) -> None:
    """Raises TypeError where a number is none, or one of a size is negative, which JSON allows anywhere."""
    if not (isinstance(plan.notes, dict) and isinstance(plan.strategy, str)):
        raise TypeError(f"notes must be a section and strategy text, got {plan.notes!r} and {plan.strategy!r}")
    numbers = [("world_size", plan.world_size), ("ranks_per_node", plan.ranks_per_node)]
    for table in plan.tables:
        numbers.append((f"{table.name}.replicas", table.replicas))
        numbers += [
            (f"{table.name}.{name}", value) for name, value in _described(table.shape).items() if name != "name"
        ]
        for part in table.ranges:
            numbers += [(f"{table.name}.{name}", getattr(part, name)) for name in _NUMBERS]
    for name, value in numbers:
        if type(value) is not int:
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if name.endswith("_bytes") and value < 0:
            raise TypeError(f"{name} must be 0 or more, got {value}")


def _check_ranges(table: TablePlan, world_size: int) -> None:
    name, parts = table.name, table.ranges
    if not parts or parts[0].start != 0 or parts[-1].stop != table.shape.num_rows:
        covered = f"{parts[0].start} to {parts[-1].stop - 1}" if parts else "none"
        raise ConfigurationError(
            f"table {name!r} has rows 0 to {table.shape.num_rows - 1}, but the plan covers {covered}; plan it again"
        )
    for first, second in pairwise(parts):
        if first.stop != second.start:
            raise ConfigurationError(
                f"table {name!r}: rows {first.stop} to {second.start - 1} are in no range of the plan"
                if first.stop < second.start
                else f"table {name!r}: rows {second.start} to {first.stop - 1} are in two ranges of the plan"
            )
    for part in parts:
        if part.rule not in RULE_NAMES:
            wrong = f"no rule {part.rule!r}; there are {list(RULE_NAMES)}"
        elif part.stop <= part.start:
            wrong = "the range is empty"
        elif not (0 <= part.rank < world_size and 0 <= part.shift < world_size):
            wrong = f"rank {part.rank} or shift {part.shift} is not below {world_size} ranks"
        else:
            continue
        raise ConfigurationError(f"table {name!r}, rows {part.start} to {part.stop - 1}: {wrong}")


def _check_send(table: TablePlan) -> None:
    """Raises ConfigurationError where a table sends what it cannot."""
    if table.send not in get_args(Sent):
        raise ConfigurationError(f"table {table.name!r}: send must be one of {get_args(Sent)}, got {table.send!r}")
    first = table.ranges[0]
    if table.send == "sums" and table.ranges != TablePlan.of_sums(table.shape, first.rank).ranges:
        raise ConfigurationError(
            f"table {table.name!r} sends sums, and its rows are in {len(table.ranges)} range(s), the first of rule "
            f"{first.rule!r}{', two hops' if first.two_hop else ''}; sums are of a table whose one range is fixed to "
            "an owner, in one hop: make it so, or have it send rows"
        )
