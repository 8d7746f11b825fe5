"""Bags: the ids of some features of a batch, as one message to the owner of all their rows.

A message is a list of uint32, empty where a rank sends no bags:

    samples, kind of weights             0 none, 1 float32, 2 float64
    ids, size                            of each feature: the size of each bag, or `_JAGGED`, or `_ONES`
    lengths                              of the bags of each feature that is jagged
    ids                                  feature by feature
    weights                              of these ids
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.ops.columns import narrow
from rowmesh.ops.memory import Scratch, array_at
from rowmesh.ops.pool.layout import GroupLayout

MAX_CELLS = 2**32
WORD_BYTES = 4
_ONES = 0xFFFFFFFE  # every bag has one id, and is added to zero: see [Note: bags by source] in `summing`
_JAGGED = 0xFFFFFFFF
_WEIGHTS = (None, np.float32, np.float64)


class Owned(NamedTuple):
    """The features of a group that one rank owns, and whose sums travel.

    Attributes:
        features: their numbers in the group, ascending.
        tables: which table of the group each is of.
        means: whether each is a mean.
        num_rows: of its table.
    """

    features: tuple[int, ...] = ()
    tables: tuple[int, ...] = ()
    means: tuple[bool, ...] = ()
    num_rows: tuple[int, ...] = ()


class Bags(NamedTuple):
    """The bags of several messages, one after the other, as kernels read them.

    Attributes:
        descriptors: int64 `[features of all messages, 8]`, see `rowmesh.ops.pool.cpu`, sorted by table; cells are those
            of a matrix of one vector a bag, message after message, feature after feature.
        messages: which message each is of.
        ids: int64 `[N]`.
        weights: `[N]`, or None.
        is_weighted: whether sums need a factor for each id.
        bounds: where the bags of each message begin, and how many there are.
    """

    descriptors: NDArray[np.int64]
    messages: NDArray[np.int64]
    ids: Tensor
    weights: Tensor | None
    is_weighted: bool
    bounds: list[int]

    def layout(self, chosen: NDArray[np.bool_] | None = None) -> GroupLayout:
        """The layout of all of them, or of some."""
        descriptors = self.descriptors if chosen is None else self.descriptors[chosen]
        num_ids = int((descriptors[:, 1] - descriptors[:, 0]).sum())
        return GroupLayout(descriptors, num_ids, self.is_weighted)


class _Sizes(NamedTuple):
    """How long the bags of a feature are.

    Attributes:
        size: the word of a message.
        lengths: int64 `[B]`, where that is `_JAGGED`.
    """

    size: int
    lengths: NDArray[np.int64] | None = None

    @staticmethod
    def of(descriptors: Sequence[Sequence[int]]) -> list[_Sizes]:
        """The sizes of the bags of features, given their descriptors."""
        _, _, offsets, size, num_bags, *_ = descriptors[0]
        if not offsets:  # all features of a batch have such, or none
            return [_Sizes(size)] * len(descriptors)
        lengths = np.stack([array_at(each[2], np.int64, num_bags + 1) for each in descriptors])
        lengths = lengths[:, 1:] - lengths[:, :-1]
        first = lengths[:, 0]
        codes = np.where((lengths == first[:, None]).all(1), np.where(first == 1, _ONES, first), _JAGGED).tolist()
        return [_Sizes(code, mine if code == _JAGGED else None) for code, mine in zip(codes, lengths, strict=True)]


def write_bags(
    into: Scratch,
    ids: NDArray[np.int64],
    weights: NDArray[np.floating] | None,
    features: NDArray[np.int64],
    owners: Iterable[Owned],
) -> list[int] | None:
    """Writes one message after the other to all owners; returns how many words each has.

    None where an id is no row of its table: messages are of no use then.

    Args:
        into: where.
        ids: of the batch.
        weights: of these, float32 or float64.
        features: descriptors of the group's features.
        owners: what is sent to each.
    """
    sizes, messages = list[int](), list[tuple[list[NDArray[Any]], list[tuple[int, int, int]]]]()
    kind = 0 if weights is None else _WEIGHTS.index(weights.dtype.type)
    id_words = 1 if weights is None else 1 + weights.itemsize // WORD_BYTES
    for owned in owners:
        descriptors = features[list(owned.features)].tolist()
        if not descriptors or not descriptors[0][4]:
            sizes.append(0)
            continue
        found = _Sizes.of(descriptors)
        head = [descriptors[0][4], kind]
        for descriptor, each in zip(descriptors, found, strict=True):
            head += [descriptor[1] - descriptor[0], each.size]
        pieces = [np.array(head, np.uint32), *(each.lengths for each in found if each.lengths is not None)]
        messages.append((pieces, [(*each[:2], rows) for each, rows in zip(descriptors, owned.num_rows, strict=True)]))
        sizes.append(sum(map(len, pieces)) + id_words * sum(head[2::2]))
    address = into.reserve(WORD_BYTES * sum(sizes))
    words, at, others, ids_address = into.buffer.array(np.uint32, sum(sizes)), 0, 0, ids.ctypes.data
    for pieces, ranges in messages:
        for piece in pieces:
            words[at : at + len(piece)] = piece
            at += len(piece)
        for begin, end, num_rows in ranges:
            others += narrow(ids_address, begin, end, num_rows, address + WORD_BYTES * at)
            at += end - begin
        if weights is not None:
            for begin, end, _ in ranges:
                count = (id_words - 1) * (end - begin)
                words[at : at + count] = weights[begin:end].view(np.uint32)
                at += count
    return None if others else sizes


class BagReader:
    """Reads messages of bags, into memory of its own.

    Args:
        dim: D of the vectors.
    """

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._ids, self._offsets, self._weights = Scratch(), Scratch(), Scratch()

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._ids.num_bytes + self._offsets.num_bytes + self._weights.num_bytes

    def __call__(self, messages: Sequence[tuple[NDArray[np.uint32], Owned]]) -> Bags:
        """The bags of all messages; valid until the next call.

        Raises:
            ConfigurationError: they are more than cells can be numbered.
        """
        heads = [_Head.of(words, owned) for words, owned in messages]
        num_ids = sum(sum(head.ids) for head in heads)
        num_offsets = sum((head.num_samples + 1) * head.num_jagged for head in heads)
        self._ids.reserve(8 * num_ids)
        self._offsets.reserve(8 * num_offsets)
        ids, offsets = self._ids.buffer.array(np.int64, num_ids), self._offsets.buffer.array(np.int64, num_offsets)
        weights = self._room_for_weights(heads, num_ids)
        rows, tables, of_message, bounds = list[tuple[int, ...]](), list[int](), list[int](), [0]
        begin = used = 0
        for number, (head, (words, owned)) in enumerate(zip(heads, messages, strict=True)):
            at = head.begin
            addresses = list[int]()
            for size in head.sizes:
                if size not in (_JAGGED, _ONES):
                    addresses.append(0)
                    continue
                mine = offsets[used : used + head.num_samples + 1]
                addresses.append(mine.ctypes.data)
                used += head.num_samples + 1
                mine[0] = 0
                if size == _JAGGED:
                    np.cumsum(words[at : at + head.num_samples], dtype=np.int64, out=mine[1:])
                    at += head.num_samples
                else:
                    mine[:] = np.arange(head.num_samples + 1)
            count = sum(head.ids)
            ids[begin : begin + count] = words[at : at + count]
            if weights is not None:
                head.read_weights(words[at + count :], weights[begin : begin + count])
            for place, (number_of, size, address) in enumerate(zip(head.ids, head.sizes, addresses, strict=True)):
                cell = (bounds[-1] + place * head.num_samples) * self._dim
                bag_size = 0 if address else size
                rows.append(
                    (begin, begin + number_of, address, bag_size, head.num_samples, cell, self._dim, owned.means[place])
                )
                begin += number_of
            bounds.append(bounds[-1] + head.num_samples * len(head.ids))
            if not head.num_samples:  # kernels know the tables of features by their places
                rows += [(begin, begin, 0, 0, 0, 0, self._dim, 0)] * len(owned.tables)
            tables += owned.tables
            of_message += [number] * len(owned.tables)
        if bounds[-1] * self._dim >= MAX_CELLS:
            raise ConfigurationError(
                f"{bounds[-1]:,} bags of all ranks with {self._dim} elements each are looked up by one owner, which "
                f"numbers fewer than {MAX_CELLS:,} elements; use smaller batches, or send='rows' for some tables"
            )
        order = np.argsort(np.array(tables, np.int64), kind="stable")
        descriptors = np.array(rows, np.int64).reshape(-1, 8)[order]
        has_means = any(head.has_means(owned) for head, (_, owned) in zip(heads, messages, strict=True))
        found = None if weights is None else torch.from_numpy(weights)
        return Bags(
            descriptors,
            np.array(of_message, np.int64)[order],
            torch.from_numpy(ids),
            found,
            weights is not None or has_means,
            bounds,
        )

    def _room_for_weights(self, heads: Sequence[_Head], num_ids: int) -> NDArray[np.floating] | None:
        """Ones, where any message has weights."""
        kind = _WEIGHTS[max((head.kind for head in heads), default=0)]
        if kind is None:
            return None
        self._weights.reserve(8 * num_ids)
        weights = self._weights.buffer.array(kind, num_ids)
        weights[:] = 1
        return weights


class _Head(NamedTuple):
    """The beginning of a message.

    Attributes:
        num_samples: B; 0 where there are no bags.
        kind: of its weights.
        ids, sizes: of each feature.
        begin: which word comes next.
    """

    num_samples: int
    kind: int
    ids: list[int]
    sizes: list[int]
    begin: int

    @staticmethod
    def of(words: NDArray[np.uint32], owned: Owned) -> _Head:
        if not len(words):
            return _Head(0, 0, [], [], 0)
        begin = 2 + 2 * len(owned.features)
        num_samples, kind, *pairs = words[:begin].tolist()
        return _Head(num_samples, kind, pairs[::2], pairs[1::2], begin)

    @property
    def num_jagged(self) -> int:
        """Features whose bags have offsets."""
        return sum(size in (_JAGGED, _ONES) for size in self.sizes)

    def has_means(self, owned: Owned) -> bool:
        """Whether some bag of several ids is a mean."""
        return any(mean and size != 1 for mean, size in zip(owned.means, self.sizes, strict=False))

    def read_weights(self, words: NDArray[np.uint32], into: NDArray[np.floating]) -> None:
        """Copies its weights, where it has some."""
        if (kind := _WEIGHTS[self.kind]) is not None:
            into[:] = words[: len(into) * kind().itemsize // WORD_BYTES].copy().view(kind)
