"""Frames in the place of the ids of dynamic tables, in a batch for a device: found there, or by the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rowmesh.exchange.resolve.asking import Asked, largest
from rowmesh.exchange.resolve.device_tables import DeviceAsked
from rowmesh.exchange.resolve.pins import BatchPin
from rowmesh.ops.distinct_ids import DistinctIds


class Resolve(Protocol):
    """Puts frames in the place of the ids of dynamic tables; returns what keeps these. Collective."""

    def __call__(self, asked: Sequence[Asked], on_device: DeviceAsked | None = None) -> BatchPin: ...


class DynamicIds(NamedTuple):
    """Where the ids of a dynamic group are in a batch.

    Attributes:
        bounds: where those of each table begin, and where the last one's end.
        is_frozen: whether nothing of them is counted.
        on_device: of each table, whether its index is on the device.
    """

    bounds: Sequence[int]
    is_frozen: bool
    on_device: Sequence[bool]


@dataclass(frozen=True)
class Framed:
    """A batch's ids with frames in the place of those of dynamic tables.

    Attributes:
        ids: int64 `[N]`, on the host where that found any frames; those that the device found are as they were.
        pin: keeps the frames.
        parts: where the ids are whose frames the device found, ascending.
        frames: int64 on the device, of one part after the other.
    """

    ids: Tensor
    pin: BatchPin
    parts: Sequence[slice]
    frames: Tensor | None

    def upload(self, upload: Callable[[Tensor], Tensor]) -> Tensor:
        """All on the device, int64 `[N]`.

        Args:
            upload: copies a tensor there.
        """
        if self.frames is None:
            return upload(self.ids)
        pieces, done, first = [], 0, 0
        for part in self.parts:
            number = part.stop - part.start
            pieces += [upload(self.ids[done : part.start]), self.frames[first : first + number]]
            done, first = part.stop, first + number
        pieces.append(upload(self.ids[done:]))
        pieces = [piece for piece in pieces if len(piece)]
        return pieces[0] if len(pieces) == 1 else torch.cat([*pieces, self.frames[:0]])


def put_frames(ids: Tensor, groups: Sequence[DynamicIds], resolve: Resolve, scores: Tensor | None = None) -> Framed:
    """Replaces the ids of dynamic tables by frames. Collective.

    Args:
        ids: int64 `[N]`, those of tables next to each other. Where they are on a device and the index of a table is
            not, the host waits for them.
        groups: of all dynamic tables, in their order.
        resolve: finds the frames of distinct ids.
        scores: int64 `[N]` of the ids, on the host, where the batch has any.

    Raises:
        NoRoomError, DataError, PeerError: see `rowmesh.exchange.resolve.resolver.Resolver`.
    """
    parts, on_device = _asked_on_device(ids, groups)
    if not all(all(group.on_device) for group in groups):
        ids = ids.to("cpu", copy=True)
    numbers = ids.numpy() if ids.device.type == "cpu" else np.empty(0, np.int64)
    found = [_ask(numbers, group, None if scores is None else scores.numpy()) for group in groups]
    pin = resolve([asked for asked, _ in found], on_device)
    for group, (asked, inverse) in zip(groups, found, strict=True):
        first = 0
        for part in _on_host(group):
            number = part.stop - part.start
            np.take(asked.ids, inverse[first : first + number], out=numbers[part])
            first += number
    return Framed(ids, pin, parts, None if on_device is None else on_device.frames)


def _asked_on_device(ids: Tensor, groups: Sequence[DynamicIds]) -> tuple[list[slice], DeviceAsked | None]:
    """Where the ids of tables are whose index is on the device, next ones joined; and what is asked of these."""
    parts, bounds = list[slice](), [0]
    for group in groups:
        for (begin, end), is_there in zip(pairwise(group.bounds), group.on_device, strict=True):
            if not is_there:
                continue
            bounds.append(bounds[-1] + end - begin)
            if parts and parts[-1].stop == begin:
                begin = parts.pop().start
            parts.append(slice(begin, end))
    if not parts:
        return parts, None
    pieces = [ids[part] for part in parts]
    return parts, DeviceAsked(pieces[0] if len(pieces) == 1 else torch.cat(pieces), bounds)


def _on_host(group: DynamicIds) -> list[slice]:
    """Where the ids of each table are, no ids where its index is on the device."""
    return [
        slice(begin, begin if is_there else end)
        for (begin, end), is_there in zip(pairwise(group.bounds), group.on_device, strict=True)
    ]


def _ask(ids: np.ndarray, group: DynamicIds, scores: np.ndarray | None) -> tuple[Asked, np.ndarray]:
    """The distinct ids of a group, and which of them each of its ids is."""
    distinct = DistinctIds()
    found = [distinct(ids[part]) for part in _on_host(group)]
    offsets = np.array([0, *accumulate(len(each.ids) for each in found)])
    counts = np.concatenate([each.counts for each in found]).astype(np.uint32)
    distinct_ids = np.concatenate([each.ids for each in found])
    inverse = np.concatenate([each.inverse + begin for each, begin in zip(found, offsets[:-1], strict=True)])
    if scores is not None:
        scores = largest(np.concatenate([scores[part] for part in _on_host(group)]), inverse, len(distinct_ids))
    return Asked(distinct_ids, offsets, counts, group.is_frozen, scores), inverse
