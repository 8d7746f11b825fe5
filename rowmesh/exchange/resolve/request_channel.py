"""Request channel: brings ids of dynamic tables to their owners, and rows back, in messages or in shared memory.

A request is a rank's ids for one owner, by table, then as many counts, and then as many scores where a table needs
such. A batch has one to and from every rank. Rows come back in the order of the ids. In shared memory an owner reads a
request where it was written, and writes rows over its ids, between two barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch

from rowmesh._support.counters import CommonCounters
from rowmesh.mesh import Mesh
from rowmesh.mesh.barrier import Barrier
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.shared_memory import SharedBuffer, share
from rowmesh.ops.memory import Buffer, Memory

_DOING = "resolving ids"
_NUM_HEAD = 5  # numbers of `BatchRequest.head`, with which messages and boards begin
_LARGEST, _HEAD = 5, 6  # what else a message has before the sizes
_FAILED, _GENERATION, _DESCRIPTOR, _NUM_BYTES, _NUMBERS = 5, 6, 7, 8, 9  # and a board
_FLAG_BYTES = 128

Write = Callable[..., None]
"""Writes all requests, given the addresses, int64 `[W]`, of the ids for each rank, of their counts, and of scores."""


@dataclass(frozen=True)
class BatchRequest:
    """The header of a rank's request for a batch, beside its ids.

    Attributes:
        kind: the same on all ranks, or they are out of step.
        first: the first of its batches that has not ended.
        sizes: int64 `[W, T]`: ids of each table for each rank.
        answers: bool `[W]`: whether a rank answers this one, with the rows of all that it was asked for.
        time: of the latest event of its part.
        step: how many batches its owners have opened.
        is_watched: whether a hook is told of its decisions.
    """

    kind: int
    first: int
    sizes: np.ndarray
    answers: np.ndarray
    time: int
    step: int = 0
    is_watched: bool = False

    @property
    def head(self) -> list[int]:
        """The numbers that all ranks are told, in their order."""
        return [self.kind, self.first, self.time, self.step, int(self.is_watched)]


@dataclass(frozen=True)
class Arrived:
    """The requests of all ranks to this one.

    Attributes:
        kinds: `[W]`.
        first: the smallest.
        sizes: int64 `[W, T]`.
        columns_at: int64 `[W]` each: addresses of the ids, counts and scores of the requests.
        rows_at: int64 `[W]`: addresses of where their rows go.
        time: the latest.
        steps: `[W]`.
        is_watched: whether a hook is told of decisions on some rank.
    """

    kinds: list[int]
    first: int
    sizes: np.ndarray
    columns_at: tuple[np.ndarray, ...]
    rows_at: np.ndarray
    time: int
    steps: list[int]
    is_watched: bool

    @classmethod
    def of(
        cls, heads: list[list[int]], sizes: np.ndarray, columns_at: tuple[np.ndarray, ...], rows_at: np.ndarray
    ) -> Arrived:
        """Given `BatchRequest.head` of each rank."""
        kinds, firsts, times, steps, watched = map(list, zip(*heads, strict=True))
        return cls(kinds, min(firsts), sizes, columns_at, rows_at, max(times), steps, any(watched))


class RequestChannel(Protocol):
    """Between all ranks. Both calls are collective where there are several, `answer` after `send`."""

    def send(self, request: BatchRequest, write: Write) -> Arrived:
        """Sends requests, and waits for those of the others."""
        ...

    def answer(self, *, failed: bool) -> tuple[bool, np.ndarray]:
        """Sends the rows that stand at `rows_at`, and waits for those of the others.

        Returns:
            Whether a rank failed; and the addresses, int64 `[W]`, of the rows that each answered.
        """
        ...


def _begins(totals: np.ndarray, columns: int) -> np.ndarray:
    """Where the request for each rank begins among all, in bytes."""
    return 8 * columns * (np.cumsum(totals) - totals)


def _columns(at: np.ndarray, totals: np.ndarray, columns: int) -> tuple[np.ndarray, ...]:
    """Where the columns of requests begin: one after the other."""
    return tuple(at + 8 * column * totals for column in range(columns))


class LocalRequestChannel:
    """The request channel of a rank alone.

    Args:
        columns: of a request: 2, or 3 with scores.
    """

    def __init__(self, columns: int = 2) -> None:
        self._columns, self._memory = columns, cast("Memory", Buffer(64))
        self._at = np.zeros(1, np.int64)

    def send(self, request: BatchRequest, write: Write) -> Arrived:
        """See `RequestChannel`."""
        total = int(request.sizes.sum())
        if 8 * self._columns * total > self._memory.num_bytes:
            self._memory = Buffer(10 * self._columns * total)
        self._at = np.array([self._memory.address], np.int64)
        columns_at = _columns(self._at, np.array([total]), self._columns)
        write(*columns_at)
        return Arrived.of([request.head], request.sizes, columns_at, self._at)

    def answer(self, *, failed: bool) -> tuple[bool, np.ndarray]:
        """See `RequestChannel`."""
        return failed, self._at


class SharedRequestChannel:
    """Between ranks that share a host's memory. Making one is collective.

    Args:
        mesh: the ranks.
        num_tables: T.
        counters: of bytes that came from other ranks.
        columns: of a request: 2, or 3 with scores.
    """

    def __init__(self, mesh: Mesh, num_tables: int, counters: CommonCounters, columns: int = 2) -> None:
        self._mesh, self._counters, self._columns = mesh, counters, columns
        size = mesh.world_size
        num_numbers = _NUMBERS + size * num_tables
        self._boards = [board for (board,) in share(mesh, [SharedBuffer.create(_FLAG_BYTES + 8 * num_numbers)])]
        numbers = [board.array(np.int64, num_numbers, offset=_FLAG_BYTES) for board in self._boards]
        self._numbers = numbers
        self._sizes = [each[_NUMBERS:].reshape(size, num_tables) for each in numbers]
        self._flags = np.array([board.address for board in self._boards], np.int64)
        self._barrier = Barrier(mesh, self._flags.ctypes.data)
        self._memory = SharedBuffer.create(64)
        self._mapped: dict[int, tuple[int, SharedBuffer]] = {}  # of peers, with the generation of each
        self._at = np.zeros(size, np.int64)

    def send(self, request: BatchRequest, write: Write) -> Arrived:
        """See `RequestChannel`."""
        rank, totals = self._mesh.rank, request.sizes.sum(axis=1)
        num_bytes, mine = 8 * self._columns * int(totals.sum()), self._numbers[rank]
        if num_bytes > self._memory.num_bytes:
            self._memory.close()  # all ranks that needed it have mapped it
            self._memory = SharedBuffer.create(num_bytes + num_bytes // 4)
            mine[_GENERATION] += 1
        mine[:_NUM_HEAD] = request.head
        mine[_DESCRIPTOR], mine[_NUM_BYTES] = self._memory.descriptor, self._memory.num_bytes
        self._sizes[rank][...] = request.sizes
        self._at = self._memory.address + _begins(totals, self._columns)
        write(*_columns(self._at, totals, self._columns))
        self._barrier.wait()
        return self._read()

    def _read(self) -> Arrived:
        rank = self._mesh.rank
        sizes = np.stack([each[rank] for each in self._sizes])
        totals = np.stack([each.sum(axis=1) for each in self._sizes])
        ids_at = np.array([self._memory_of(peer).address for peer in range(len(sizes))], np.int64)
        ids_at += np.stack([_begins(each, self._columns) for each in totals])[:, rank]
        self._counters.add_received(8 * self._columns * int(totals[:, rank].sum() - totals[rank, rank]))
        heads = [each[:_NUM_HEAD].tolist() for each in self._numbers]
        columns_at = _columns(ids_at, totals[:, rank], self._columns)
        return Arrived.of(heads, sizes, columns_at, ids_at)

    def _memory_of(self, peer: int) -> SharedBuffer:
        if peer == self._mesh.rank:
            return self._memory
        generation, descriptor, num_bytes = self._numbers[peer][_GENERATION : _NUM_BYTES + 1].tolist()
        if peer not in self._mapped or self._mapped[peer][0] != generation:
            pid, name = self._mesh.pids[peer], self._mesh.name(peer)
            self._mapped[peer] = generation, SharedBuffer.attach(pid, descriptor, num_bytes, name)
        return self._mapped[peer][1]

    def answer(self, *, failed: bool) -> tuple[bool, np.ndarray]:
        """See `RequestChannel`."""
        self._numbers[self._mesh.rank][_FAILED] = failed
        self._barrier.wait()
        return any(each[_FAILED] for each in self._numbers), self._at


class MessageRequestChannel:
    """In messages: ids go with their sizes, in room for what the last batches needed, else in a message of their own.

    Args:
        channel: between all ranks.
        counters: of its messages.
        columns: of a request: 2, or 3 with scores.
    """

    def __init__(self, channel: Channel, counters: CommonCounters, columns: int = 2) -> None:
        self._channel, self._counters, self._columns = channel, counters, columns
        self._room = 0  # ids that travel with the sizes; the same on all ranks
        self._keep: list[torch.Tensor] = []  # what addresses point into

    def send(self, request: BatchRequest, write: Write) -> Arrived:
        """See `RequestChannel`."""
        size, room, (_, num_tables) = self._channel.size, self._room, request.sizes.shape
        columns = self._columns
        head, totals = _HEAD + num_tables, request.sizes.sum(axis=1)
        out = torch.empty((size, head + columns * room), dtype=torch.int64, device="cpu")
        message = out.numpy()
        message[:, :_NUM_HEAD] = request.head
        message[:, _LARGEST], message[:, _HEAD:head] = totals.max(), request.sizes
        late = torch.empty((int(totals.sum()), columns), dtype=torch.int64, device="cpu")
        is_early = totals.max() <= room
        ids_at = _rows_at(message, head) if is_early else late.data_ptr() + _begins(totals, columns)
        write(*_columns(ids_at, totals, columns))
        came = self._channel.exchange_equal(out, self._counters, _DOING)
        numbers = came.numpy()
        sizes, largest = np.ascontiguousarray(numbers[:, _HEAD:head]), int(numbers[:, _LARGEST].max())
        totals_in = sizes.sum(axis=1)
        self._room = max(largest + largest // 4, room - room // 8)
        arrived_at = _rows_at(numbers, head)
        if largest > room:
            if is_early:
                parts = [
                    row[head : head + columns * total] for row, total in zip(message, totals.tolist(), strict=True)
                ]
                np.concatenate(parts, out=late.numpy().reshape(-1))
            sizes_out, sizes_in = totals.tolist(), totals_in.tolist()
            came = self._channel.post(late, sizes_out, sizes_in, self._counters, _DOING).wait()
            arrived_at = came.data_ptr() + _begins(totals_in, columns)
        # An answer begins with whether its rank failed.
        self._out, self._in = 1 + np.where(request.answers, totals_in, 0), 1 + np.where(request.answers, totals, 0)
        ends = np.cumsum(1 + totals_in)
        self._rows = torch.empty(int(ends[-1]), dtype=torch.int64, device="cpu")
        self._starts, self._keep = ends - totals_in - 1, [came]
        rows_at = self._rows.data_ptr() + 8 * (self._starts + 1)
        heads = numbers[:, :_NUM_HEAD].tolist()
        return Arrived.of(heads, sizes, _columns(arrived_at, totals_in, columns), rows_at)

    def answer(self, *, failed: bool) -> tuple[bool, np.ndarray]:
        """See `RequestChannel`."""
        rows = self._rows.numpy()
        rows[self._starts] = failed
        if len(rows) != self._out.sum():  # some ranks get no rows
            bounds = zip(self._starts.tolist(), self._out.tolist(), strict=True)
            rows = np.concatenate([rows[start : start + number] for start, number in bounds])
        sizes_in = self._in.tolist()
        message = self._channel.post(torch.from_numpy(rows), self._out.tolist(), sizes_in, self._counters, _DOING)
        came = message.wait()
        starts = np.cumsum(self._in) - self._in
        self._keep = [came]
        return bool(came.numpy()[starts].any()), came.data_ptr() + 8 * (starts + 1)


def _rows_at(message: np.ndarray, column: int) -> np.ndarray:
    """Addresses of the rows of a message, from a column on."""
    return message.ctypes.data + message.strides[0] * np.arange(len(message)) + 8 * column
