"""Reshard: rows of a table go from the ranks that have them to those that want them, as many bytes as there are rows.

Every rank says which rows it has and wants as ranges of their numbers; who sends what follows by arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.mesh.mesh import Mesh
from rowmesh.mesh.waiting import complete, gather_objects
from rowmesh.ops.ranges import intersect

CHUNK_BYTES = 64 << 20


class Rows(Protocol):
    """Some rows of a table on one rank, in memory of the host that may be read when it is asked for."""

    @property
    def rows(self) -> range:
        """Their numbers, ascending."""
        ...

    def read(self) -> Tensor:
        """`[n, …]`: a view of them, or a copy that `write` puts where it belongs."""
        ...

    def done(self, *, changed: bool) -> None:
        """Nothing more is read of the tensor, or was written to it."""
        ...


class Block(NamedTuple):
    """Rows that are in a tensor."""

    rows: range
    values: Tensor

    def read(self) -> Tensor:
        """The tensor itself."""
        return self.values

    def done(self, *, changed: bool) -> None:
        """It is in its place already."""


def block(num_rows: int, rank: int, world_size: int) -> range:
    """The rows of one rank where each has an equal block, the last ranks fewer: `torch.distributed.tensor.Shard(0)`.

    >>> [list(block(5, rank, 4)) for rank in range(4)]
    [[0, 1], [2, 3], [4], []]
    """
    size = -(-num_rows // world_size)
    return range(min(rank * size, num_rows), min((rank + 1) * size, num_rows))


def reshard(mesh: Mesh, have: Sequence[Rows], want: Sequence[Rows], num_rows: int, row_bytes: int, doing: str) -> None:
    """Fills the rows that each rank wants with those that the ranks have. Collective and blocking.

    Beside the rows it needs about `CHUNK_BYTES` for messages, each way.

    Args:
        mesh: the ranks.
        have: on each rank; every row of the table is on one rank alone.
        want: on each rank; a row may be wanted by several.
        num_rows: of the table.
        row_bytes: of one of its rows.
        doing: what this is for, for the message of a PeerError.

    Raises:
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    mine = [[_bounds(part.rows) for part in parts] for parts in (have, want)]
    everyone = gather_objects(mesh, mine, doing)
    had = [[range(*bounds) for bounds in parts] for parts, _ in everyone]
    wanted = [[range(*bounds) for bounds in parts] for _, parts in everyone]
    window = max(CHUNK_BYTES // max(row_bytes, 1), 1)  # one rank may want them all
    sources, targets = _Open(have, changes=False), _Open(want, changes=True)
    for first in range(0, num_rows, window):
        rows = range(first, min(first + window, num_rows))
        _move(mesh, rows, (sources, targets), (had, wanted), doing)
    sources.close()
    targets.close()


class _Open:
    """Rows, the tensors of those that were needed last kept open."""

    def __init__(self, parts: Sequence[Rows], *, changes: bool) -> None:
        self._parts, self._changes = parts, changes
        self._open: dict[int, Tensor] = {}

    def __getitem__(self, number: int) -> Tensor:
        if number not in self._open:
            self._open[number] = self._parts[number].read()
        return self._open[number]

    def close_before(self, row: int) -> None:
        """Closes what has no row from here on."""
        for number in [number for number in self._open if self._parts[number].rows.stop <= row]:
            del self._open[number]
            self._parts[number].done(changed=self._changes)

    def close(self) -> None:
        for number in self._open:
            self._parts[number].done(changed=self._changes)
        self._open.clear()


def _move(
    mesh: Mesh, rows: range, parts: tuple[_Open, _Open], ranges: tuple[list[list[range]], list[list[range]]], doing: str
) -> None:
    """Moves the rows of a window."""
    (sources, targets), (had, wanted) = parts, ranges
    out: list[Tensor] = []
    sizes_out: list[int] = []
    for peer in range(mesh.world_size):
        found = [sources[number][_slice(at)] for number, _, at, _ in _common(had[mesh.rank], wanted[peer], rows)]
        out += found
        sizes_out.append(sum(piece.nbytes for piece in found))
    into: list[tuple[int, Tensor]] = []
    sizes_in: list[int] = []
    for peer in range(mesh.world_size):
        size = 0
        for _, number, _, at in _common(had[peer], wanted[mesh.rank], rows):
            into.append((number, targets[number][_slice(at)]))
            size += into[-1][1].nbytes
        sizes_in.append(size)
    came = _exchange(mesh, out, sizes_out, sizes_in, doing)
    begin = 0
    for _, target in into:
        end = begin + target.nbytes
        target.copy_(came[begin:end].clone().view(target.dtype).view(target.shape))
        begin = end
    sources.close_before(rows.stop)
    targets.close_before(rows.stop)


def _common(had: Sequence[range], wanted: Sequence[range], rows: range) -> Iterator[tuple[int, int, range, range]]:
    """Yields the rows of a window that one rank has and another wants: the numbers of both parts, the place in each."""
    for first, source in enumerate(had):
        if (within := intersect(source, rows)) is None:
            continue
        cut = source[_slice(within[0])]
        for second, target in enumerate(wanted):
            if (common := intersect(cut, target)) is not None:
                begin, step = within[0].start, within[0].step
                at = range(begin + common[0].start * step, begin + common[0][-1] * step + 1, common[0].step * step)
                yield first, second, at, common[1]


def _exchange(mesh: Mesh, out: list[Tensor], sizes_out: list[int], sizes_in: list[int], doing: str) -> Tensor:
    """Sends tensors as bytes; returns those that came."""
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    sent = torch.cat([piece.reshape(-1) for piece in out]).view(torch.uint8) if out else empty
    if mesh.group is None:
        return sent
    received = torch.empty(sum(sizes_in), dtype=torch.uint8, device="cpu")

    def send() -> dist.Work | None:
        return dist.all_to_all_single(received, sent, sizes_in, sizes_out, mesh.group, async_op=True)

    complete(mesh, send, doing)
    return received


def _slice(places: range) -> slice:
    return slice(places.start, places.stop, places.step)


def _bounds(rows: range) -> list[int]:
    return [rows.start, rows.stop, rows.step]


def bytes_of_row(tensor: Tensor) -> int:
    """The bytes of a row of a tensor; rows are along the first dimension."""
    return math.prod(tensor.shape[1:]) * tensor.itemsize
