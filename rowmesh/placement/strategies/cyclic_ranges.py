"""Cyclic ranges: from levels to ranges whose owners carry equal loads.

Cyclic rows in falling order of frequency give every rank nearly the same load, with two exceptions that are corrected
here: the first rows of a table differ much, and every table has to begin on some rank. In the hottest *rounds*, of W
rows each, every rank therefore gets one row chosen to balance, which costs no memory. Every other range gets the shift
that balances best. Both choices minimize the sum of squared loads, one item after another, the most unequal first,
until nothing improves.

The last round of a cycle may be short, and still takes a slot on every rank. Where tables are so small that this is
much memory, the ends of all tables are *packed*: assigned to the ranks with most room, as ranges of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from rowmesh.placement.cost import NODE, ONE_HOP, REPLICATED, REPLICATED_TWO_HOP, TWO_HOP
from rowmesh.placement.demand import Demand
from rowmesh.placement.plan import RowRange, RuleName, TableShape
from rowmesh.placement.strategies.levels import COLD, HOT, WARM, Choices, Levels

MAX_HEAD_ROWS = 256
MAX_BLOCKS = 8
TOLERANCE = 1e-4
SWEEPS = 4
SHORT_CYCLE = 128  # ranks up to which all shifts are summed one by one
ROUNDING = 1e-13
MOST_NEAR = 16
RULES: dict[int, RuleName] = {
    ONE_HOP: "cyclic",
    TWO_HOP: "cyclic",
    NODE: "node",
    REPLICATED: "replicated",
    REPLICATED_TWO_HOP: "replicated",
}


@dataclass(frozen=True)
class Span:
    """Rows of a table that are exchanged in the same way."""

    table: int
    start: int
    stop: int
    kind: int

    def __len__(self) -> int:
        return self.stop - self.start

    def range(self, shift: int = 0) -> RowRange:
        """The span as a range of a plan."""
        return RowRange(
            self.start, self.stop, RULES[self.kind], shift, two_hop=self.kind in (TWO_HOP, REPLICATED_TWO_HOP)
        )


def spans_of(levels: Levels, choices: Choices, demand: Demand) -> list[Span]:
    """Neighbouring rows of one kind as spans; cold ones are cut between whole rounds, so that no slot is lost.

    The round in which cold rows change from two hops to one, or back, travels whole: as its rows together cost less.
    """
    cuts = np.stack([np.zeros_like(levels.hot), levels.hot, levels.copied, demand.lengths])
    lengths = np.diff(cuts, axis=0).T.ravel()
    kind = choices.kind[[HOT, WARM, COLD]].T.ravel()
    table = np.repeat(demand.table, 3)
    kept = np.flatnonzero(lengths)
    lengths, kind, table = lengths[kept], kind[kept], table[kept]
    changes = np.flatnonzero(np.concatenate([[True], (np.diff(kind) != 0) | (np.diff(table) != 0)]))
    starts = (np.cumsum(lengths) - lengths)[changes]
    stops = np.append(starts[1:], lengths.sum())
    spans = []
    for start, stop, which, t in zip(starts, stops, kind[changes], table[changes], strict=True):
        first = int(demand.first_row[t])
        if which == NODE and stop - start == 1:
            which = _of_a_single_row(choices, int(np.searchsorted(demand.starts, start, "right")) - 1)
        spans.append(Span(int(t), int(start) - first, int(stop) - first, int(which)))
    return _whole_rounds(spans, choices, demand)


def _of_a_single_row(choices: Choices, run: int) -> int:
    """How a row travels that was to have a copy a node: a range of one row takes a slot on every rank either way."""
    return int(choices.kind[HOT if choices.seconds[HOT, run] < choices.seconds[WARM, run] else WARM, run])


def _whole_rounds(spans: Sequence[Span], choices: Choices, demand: Demand) -> list[Span]:
    W, cold = demand.world_size, (ONE_HOP, TWO_HOP)
    result: list[Span] = []
    origin = 0
    for span in spans:
        follows = bool(result) and result[-1].table == span.table and result[-1].kind in cold and span.kind in cold
        if not follows:
            origin = span.start
            result.append(span)
            continue
        before = result.pop()
        down = span.start - (span.start - origin) % W
        up = min(down + W, span.stop) if down < span.start else down
        round_ = replace(span, start=down, stop=up)
        as_before, as_after = (
            _seconds(replace(round_, kind=kind), choices, demand) for kind in (before.kind, span.kind)
        )
        border = up if as_before <= as_after else down
        result += [replace(before, stop=border)] if border > before.start else []
        result += [replace(span, start=border)] if border < span.stop else []
    return result


def _seconds(span: Span, choices: Choices, demand: Demand) -> float:
    """What the rows of a span cost together."""
    first = int(demand.first_row[span.table])
    rows = np.diff(np.clip(demand.starts, first + span.start, first + span.stop))
    return float(choices.of_kind[span.kind] @ rows)


def memory_bytes(spans: Sequence[Span], demand: Demand) -> int:
    """Bytes of the fullest rank."""
    W, G = demand.world_size, demand.ranks_per_node
    return sum(int(demand.row_bytes[span.table]) * span.range().num_slots(0, W, G) for span in spans)


def cyclic_ranges(
    spans: Sequence[Span],
    demand: Demand,
    seconds: np.ndarray,
    *,
    started: np.ndarray | None = None,
    max_head_rows: int = MAX_HEAD_ROWS,
    packed: bool = False,
) -> list[list[RowRange]]:
    """The ranges of each table, with heads and shifts that balance the ranks.

    Args:
        spans: in order of tables and rows.
        demand: of all rows.
        seconds: [5, K], what a row of each run costs, by how rows travel: the load that is balanced.
        started: [W], loads that the ranks already have.
        max_head_rows: how many rows may be ranges of their own.
        packed: whether short last rounds take slots only where their rows are.
    """
    W = demand.world_size
    table = _Table(demand, seconds)
    rounds = _uneven_rounds(spans, table, max_head_rows if W > 1 else 0)
    started = np.zeros(W) if started is None else started
    done = {span: max((round_.stop for round_ in rounds if round_.span is span), default=span.start) for span in spans}
    rest = [Span(span.table, done[span], span.stop, span.kind) for span in spans if done[span] < span.stop]
    rest, ends = _cut_ends(rest, W) if packed else (rest, [])
    blocks = [_Block(block, table.residues(block)) for span in rest for block in _blocks(span, table)]
    _balance([*rounds, *blocks], demand, started.copy())
    pieces = _pack(ends, rounds, demand)
    if pieces:
        _balance(blocks, demand, started + _loads_of(rounds, pieces, table))
    ranges: list[list[RowRange]] = [[] for _ in demand.shapes]
    for item in (*rounds, *blocks):
        ranges[item.span.table] += item.ranges()
    for span, part in pieces:
        ranges[span.table].append(part)
    return [sorted(parts, key=lambda part: part.start) for parts in ranges]


def joined(ranges: Sequence[Sequence[RowRange]], shapes: Sequence[TableShape]) -> list[list[RowRange]]:
    """The ranges of whole tables, from those of tables and their tails, which follow under the same name."""
    whole: list[list[RowRange]] = []
    name = None
    for shape, parts in zip(shapes, ranges, strict=True):
        if shape.name != name:
            whole.append([])
        name, first = shape.name, whole[-1][-1].stop if whole[-1] else 0
        whole[-1] += [replace(part, start=part.start + first, stop=part.stop + first) for part in parts]
    return whole


@dataclass(frozen=True, eq=False)
class _Table:
    """Loads of rows and of their owners."""

    demand: Demand
    seconds: np.ndarray

    @cached_property
    def negligible(self) -> float:
        """A difference of loads that is not worth a range of its own."""
        least = self.seconds[[ONE_HOP, TWO_HOP]].min(axis=0)
        return TOLERANCE * float(least @ self.demand.lengths) / self.demand.world_size

    def loads(self, span: Span, rows: np.ndarray) -> np.ndarray:
        """Loads of some rows of a span, counted from its start."""
        first = self.demand.first_row[span.table] + span.start
        return self.seconds[span.kind, np.searchsorted(self.demand.starts, first + rows, "right") - 1]

    def residues(self, span: Span) -> np.ndarray:
        """[W], the load of each rank when a span is cyclic from rank 0 on."""
        W, starts = self.demand.world_size, self.demand.starts
        first, last = (int(self.demand.first_row[span.table]) + row for row in (span.start, span.stop))
        low, high = int(np.searchsorted(starts, first, "right")) - 1, int(np.searchsorted(starts, last, "left"))
        bounds = np.clip(starts[low : high + 1], first, last) - first
        of_row, lengths, owner = self.seconds[span.kind, low:high], np.diff(bounds), bounds[:-1] % W
        edges = np.bincount(owner, of_row, 2 * W) - np.bincount(owner + lengths % W, of_row, 2 * W)
        line = np.cumsum(edges)
        return line[:W] + line[W:] + of_row @ (lengths // W)


@dataclass(eq=False)
class _Round:
    """Up to W rows, at most one for each rank."""

    span: Span
    start: int
    loads: np.ndarray
    ranks: np.ndarray

    @property
    def stop(self) -> int:
        return self.start + len(self.loads)

    def spread(self, num_ranks: int) -> float:
        least = self.loads[-1] if len(self.loads) == num_ranks else 0.0
        return float(self.loads[0] - least)

    def place(self, load: np.ndarray) -> None:
        """The heaviest row to the least loaded rank, and so on."""
        self.ranks[np.argsort(-self.loads, kind="stable")] = np.argsort(load, kind="stable")[: len(self.loads)]

    def contribution(self, num_ranks: int) -> np.ndarray:
        return np.bincount(self.ranks, self.loads, num_ranks)

    def ranges(self) -> list[RowRange]:
        single = self.span.kind in (ONE_HOP, TWO_HOP)
        two_hop = self.span.kind in (TWO_HOP, REPLICATED_TWO_HOP)
        return [
            RowRange(row, row + 1, "fixed", rank=rank, two_hop=two_hop)
            if single
            else RowRange(row, row + 1, "replicated", shift=rank, two_hop=two_hop)
            for row, rank in enumerate(self.ranks.tolist(), self.start)
        ]


@dataclass(eq=False)
class _Block:
    """Rows that are cyclic from a shift on."""

    span: Span
    residues: np.ndarray
    shift: int = 0
    ranks_per_node: int = 0

    def spread(self, num_ranks: int) -> float:
        return float(np.ptp(self.residues))

    def place(self, load: np.ndarray) -> None:
        """The shift under which heavy residues meet light ranks."""
        W = len(load)
        if self.ranks_per_node:  # copies in all nodes: what counts is the place
            load = np.tile(load.reshape(-1, self.ranks_per_node).mean(axis=0), W // self.ranks_per_node)
        self.shift = _least_overlap(self.residues, load)

    def contribution(self, num_ranks: int) -> np.ndarray:
        own = np.roll(self.residues, self.shift)
        if not self.ranks_per_node:
            return own
        nodes = num_ranks // self.ranks_per_node
        return np.tile(own.reshape(nodes, -1).sum(axis=0) / nodes, nodes)

    def ranges(self) -> list[RowRange]:
        return [self.span.range(self.shift)]


def _least_overlap(residues: np.ndarray, load: np.ndarray) -> int:
    """The shift s for which Σ residues[(i − s) mod W] · load[i] is least.

    A Fourier transform finds all sums at once, up to its rounding. Those within it of the least are summed again, one
    by one, so that the shift is the first of the least sums.
    """
    W = len(load)
    if W <= SHORT_CYCLE:
        rolled = residues[(np.arange(W) - np.arange(W)[:, None]) % W]
        return int(np.argmin(rolled @ load))
    uneven, other = residues - residues.mean(), load - load.mean()
    sums = np.fft.irfft(np.fft.rfft(other) * np.conj(np.fft.rfft(uneven)), W)
    rounding = ROUNDING * float(np.sqrt((uneven @ uneven) * (other @ other)))
    near = np.flatnonzero(sums <= sums.min() + rounding)[:MOST_NEAR]
    return int(near[np.argmin([np.roll(residues, shift) @ load for shift in near.tolist()])])


def _uneven_rounds(spans: Sequence[Span], table: _Table, max_rows: int) -> list[_Round]:
    """The rounds whose rows differ most, from the first row of a span on without gaps."""
    W = table.demand.world_size
    found = []
    for span in spans:
        if span.kind == NODE:
            continue
        num_rows = len(span) if len(span) <= max_rows else max_rows // W * W
        loads = table.loads(span, np.arange(num_rows))
        spread = np.inf
        for first in range(0, len(loads), W):
            round_ = _Round(
                span, span.start + first, loads[first : first + W], np.zeros(len(loads[first : first + W]), int)
            )
            spread = min(spread, round_.spread(W))
            found.append((spread, round_))
    found.sort(key=lambda entry: -entry[0])
    rows_so_far = accumulate(len(round_.loads) for _, round_ in found)
    return [
        round_
        for (spread, round_), rows in zip(found, rows_so_far, strict=True)
        if rows <= max_rows and spread > table.negligible
    ]


def _blocks(span: Span, table: _Table) -> list[Span]:
    """1, 2, 4, … rounds of W rows as far as they are unequal, and the rest: what can be shifted one by one."""
    bounds = table.demand.world_size * (2 ** np.arange(MAX_BLOCKS) - 1)
    bounds = bounds[bounds < len(span)]
    falls = -np.diff(table.loads(span, bounds))
    unequal = np.flatnonzero(falls > table.negligible)
    cuts = [*(span.start + bounds[: unequal[-1] + 2 if len(unequal) else 1]).tolist(), span.stop]
    return [Span(span.table, *bound, span.kind) for bound in pairwise(cuts)]


def _cut_ends(spans: Sequence[Span], world_size: int) -> tuple[list[Span], list[Span]]:
    """(whole rounds and copies, the short last rounds of rows without copies)."""
    whole, ends = [], []
    for span in spans:
        border = span.stop - len(span) % world_size if span.kind in (ONE_HOP, TWO_HOP) else span.stop
        whole += [replace(span, stop=border)] if border > span.start else []
        ends += [replace(span, start=border)] if span.stop > border else []
    return whole, ends


def _pack(ends: Sequence[Span], rounds: Sequence[_Round], demand: Demand) -> list[tuple[Span, RowRange]]:
    """A rank for all rows of the ends: wide rows first, as many in a row as bring a rank to what all come to."""
    W, row_bytes = demand.world_size, demand.row_bytes.tolist()
    used = np.zeros(W, np.int64)
    for round_ in rounds:
        if round_.span.kind in (ONE_HOP, TWO_HOP):
            used[round_.ranks] += row_bytes[round_.span.table]
    level = -(-(int(used.sum()) + sum(row_bytes[span.table] * len(span) for span in ends)) // W)
    pieces = []
    for span in sorted(ends, key=lambda span: -row_bytes[span.table]):
        row, width = span.start, row_bytes[span.table]
        while row < span.stop:
            rank = int(used.argmin())
            stop = min(row + max(1, (level - int(used[rank])) // width), span.stop)
            pieces.append((span, RowRange(row, stop, "fixed", rank=rank, two_hop=span.kind == TWO_HOP)))
            used[rank] += width * (stop - row)
            row = stop
    return pieces


def _loads_of(rounds: Sequence[_Round], pieces: Sequence[tuple[Span, RowRange]], table: _Table) -> np.ndarray:
    W = table.demand.world_size
    load = sum((round_.contribution(W) for round_ in rounds), np.zeros(W))
    for span, part in pieces:
        load[part.rank] += table.loads(span, np.arange(part.start, part.stop) - span.start).sum()
    return load


def _balance(items: Sequence[_Round | _Block], demand: Demand, load: np.ndarray) -> None:
    W, G = demand.world_size, demand.ranks_per_node
    for item in items:
        if isinstance(item, _Block) and item.span.kind == NODE:
            item.ranks_per_node = G
    order = sorted(items, key=lambda item: -item.spread(W))
    for sweep in range(SWEEPS):
        before = load.copy()
        for item in order:
            if sweep:
                load -= item.contribution(W)
            item.place(load)
            load += item.contribution(W)
        if sweep and load @ load >= before @ before * (1 - 1e-12):
            break
