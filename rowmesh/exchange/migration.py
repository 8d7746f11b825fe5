"""Migration: rows and their optimizer state move from where one plan holds them to where another does.

Every rank finds from the two plans, by arithmetic, which rank sends which rows, so only rows are sent. A rank
that holds a row under both plans copies it within its memory; any other gets it from its owner under the old plan.
Rows travel in pieces of neighbouring rows, as many as a bound on memory allows, table by table: an all-to-all for the
values and one for each state. Before each piece ranks agree that all have memory for it; where one has none, all
raise, and the rows under the old plan are as before.

Source: OPER §8 (redistribution under a new plan). Differs: training goes on with the same numbers, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rowmesh._support.faults import reach
from rowmesh.exchange.group import GroupExchange
from rowmesh.mesh import Mesh
from rowmesh.mesh.together import on_all_ranks
from rowmesh.mesh.waiting import complete
from rowmesh.placement import Plan
from rowmesh.placement.places import Located, Movements, Places
from rowmesh.placement.plan import RowRange
from rowmesh.tables import RowStore

T = TypeVar("T")
Ints = NDArray[np.int64]
Share = Callable[[RowRange, RowRange], float]  # bytes that a row of an old and a new range needs meanwhile
CHUNK_BYTES = 64 << 20
_WORK_BYTES = 128  # of index arrays, for each row of a piece


@dataclass(frozen=True)
class Moved:
    """The rows that a migration moved between ranks.

    Attributes:
        rows: rows that came to a rank that did not hold them, once for each such rank.
        num_bytes: of their values and states.
        elapsed_s: from the start to when training can go on, in seconds.
    """

    rows: int
    num_bytes: int
    elapsed_s: float = 0.0


def move_rows(
    old: Sequence[GroupExchange],
    new: Sequence[GroupExchange],
    mesh: Mesh,
    chunk_bytes: int = CHUNK_BYTES,
    everyone: Mesh | None = None,
) -> Moved:
    """Copies all rows and states from the arenas of one plan to those of another. Collective and blocking.

    Beside the arenas it needs about `chunk_bytes`, or a few rows where that is more.

    Args:
        old: exchanges whose rows do not change meanwhile.
        new: exchanges of the same groups in the same order.
        mesh: the ranks.
        chunk_bytes: memory for buffers.
        everyone: all ranks, where `mesh` is one replica group of several, which move the same at the same time.

    Returns:
        The rows that came to this rank.

    Raises:
        MemoryError: on all ranks alike, where one has no memory for its buffers; names it. Old rows are as before.
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    rows = num_bytes = 0
    agreement = _Agreement(mesh if everyone is None else everyone)
    for source, target in zip(old, new, strict=True):
        row_bytes = sum(tensor.stride(0) * tensor.itemsize for tensor in _tensors(target.arena))
        share = _share_of(source.address_map.plan, target.address_map.plan, row_bytes)
        for table in range(len(source.group.tables)):
            before, after = Places(source.address_map, table), Places(target.address_map, table)
            for piece in pieces_of(before, after, source.address_map.num_rows[table], share, chunk_bytes):
                came = _move(source.arena, target.arena, before(piece), after(piece), mesh, agreement)
                rows, num_bytes = rows + came, num_bytes + came * row_bytes
    agreement.check()
    return Moved(rows, num_bytes)


class _Agreement:
    """Has all ranks raise where one has no memory, before they send what another could not take.

    Args:
        mesh: all ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._lack = mesh, ""

    def make(self, action: Callable[[], T]) -> T:
        """Does what needs memory, and returns its result. Collective.

        Raises:
            MemoryError: on all ranks alike, where one has none, or had none before; names it.
        """

        def named() -> T:
            if not self._lack:
                result = self.attempt(action)
            if self._lack:
                raise MemoryError(
                    f"rank {self._mesh.name(self._mesh.rank)} has no memory for the buffers of a migration: "
                    f"{self._lack}; the old plan goes on"
                )
            return result  # pyright: ignore[reportPossiblyUnboundVariable, reportReturnType]

        return on_all_ranks(self._mesh, "making room to move rows", named)

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Does what needs memory, and returns its result; the next agreement raises where there was none."""
        try:
            return action()
        except (MemoryError, OSError, RuntimeError) as error:  # the last is torch's
            self._lack = " ".join(f"{type(error).__name__}: {error}".split())
            return None

    def check(self) -> None:
        """Raises what was noted. Collective."""
        self.make(lambda: None)


def _share_of(old: Plan, new: Plan, row_bytes: int) -> Share:
    """How much memory a row takes on the rank that needs most for it."""
    ranks, nodes = old.world_size, new.num_nodes

    def share(source: RowRange, target: RowRange) -> float:
        owners = 1 if source.rule == "fixed" else ranks
        copies = {"replicated": ranks, "node": nodes}.get(target.rule, 1)
        holders = 1 if target.rule == "fixed" else ranks // copies
        return _WORK_BYTES + row_bytes * (copies / owners + 1 / max(holders, 1))

    return share


def pieces_of(before: Places, after: Places, num_rows: int, share: Share, chunk_bytes: int) -> Iterator[Ints]:
    """Neighbouring rows that together need about `chunk_bytes`."""
    starts = sorted({part.start for part in (*before.parts, *after.parts)})
    source, target = iter(before.parts), iter(after.parts)
    first, second = next(source), next(target)
    needed = [0.0]
    for start, stop in pairwise([*starts, num_rows]):
        first = first if start < first.stop else next(source)
        second = second if start < second.stop else next(target)
        needed.append(needed[-1] + (stop - start) * share(first, second))
    count = max(int(needed[-1] / chunk_bytes), 1)
    edges = np.interp(np.linspace(0, needed[-1], count + 1), needed, [*starts, num_rows])
    for start, stop in pairwise(np.unique(np.rint(edges)).astype(np.int64).tolist()):
        yield np.arange(start, stop)


def _move(old: RowStore, new: RowStore, before: Located, after: Located, mesh: Mesh, agreement: _Agreement) -> int:
    """Moves a piece; returns how many rows came here."""
    moves, messages = agreement.make(lambda: _prepare(old, new, before, after, mesh))
    for target, out, into in messages:
        _exchange(out, into, moves, mesh)
        agreement.attempt(partial(_put, target, moves, into))
    return len(moves.received)


_Message = tuple[Tensor, Tensor, Tensor]  # where rows go, those that are sent, and room for those that come


def _prepare(
    old: RowStore, new: RowStore, before: Located, after: Located, mesh: Mesh
) -> tuple[Movements, list[_Message]]:
    """Copies what this rank keeps, and makes what it sends and room for what comes; those of a device by the host."""
    reach("migration.buffers")
    moves, messages = Movements(before, after, mesh.rank, mesh.world_size), list[_Message]()
    for source, target in zip(_tensors(old), _tensors(new), strict=True):
        target[torch.from_numpy(moves.kept_to)] = source[torch.from_numpy(moves.kept_from)]
        if mesh.world_size > 1:
            out = source[torch.from_numpy(moves.sent)].cpu()
            into = torch.empty(len(moves.received), *out.shape[1:], dtype=out.dtype, device="cpu")
            messages.append((target, out, into))
    return moves, messages


def _put(target: Tensor, moves: Movements, came: Tensor) -> None:
    reach("migration.put")
    target[torch.from_numpy(moves.received)] = came.to(target.device)


def _exchange(out: Tensor, into: Tensor, moves: Movements, mesh: Mesh) -> None:
    """Sends rows, as bytes, and receives those that come."""
    width = out.itemsize * int(np.prod(out.shape[1:]))
    sizes_in = [width * count for count in moves.received_counts]
    sizes_out = [width * count for count in moves.sent_counts]
    received, sent = into.flatten().view(torch.uint8), out.flatten().view(torch.uint8)

    def send() -> dist.Work | None:
        return dist.all_to_all_single(received, sent, sizes_in, sizes_out, mesh.group, async_op=True)

    complete(mesh, send, "moving rows to where a new plan has them")


def _tensors(arena: RowStore) -> list[Tensor]:
    """Values and states, in the same order on all ranks."""
    return [arena.rows, *arena.state.values()]
