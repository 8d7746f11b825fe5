"""Which sequences of a batch are computed together: those of similar length, as padded blocks of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_MOST_PADDING = 0.2  # of a group's longest sequence: products of padding cost time, more groups more calls


class Chunk(NamedTuple):
    """Sequences that are computed at once.

    Attributes:
        first: where their events begin among the padded ones.
        num: how many sequences.
        length: of each, with padding.
        group: the number of their first among all sequences, as they are ordered.
    """

    first: int
    num: int
    length: int
    group: int

    @property
    def events(self) -> slice:
        """Theirs among the padded ones."""
        return slice(self.first, self.first + self.num * self.length)


@dataclass(frozen=True)
class Layout:
    """Sequences by length, each padded to the longest of its group by copies of its last event.

    An attention that is causal needs no more: padding stands behind everything that looks back.

    Attributes:
        offsets: int64 `[B + 1]`.
        groups: number of sequences and length of each group, the longest first; empty sequences are in none.
        index: int64 `[P]`, of each padded event its place in the batch.
        places: int64 `[N]`, of each event its place among the padded ones.
        lengths: int64, of the sequences as they are ordered.
        padding: int64, places among the padded events that are copies.
    """

    offsets: Tensor
    groups: tuple[tuple[int, int], ...]
    index: Tensor
    places: Tensor
    lengths: Tensor
    padding: Tensor

    @staticmethod
    def of(offsets: Tensor) -> Layout:
        """Groups sequences; offsets on another device than the CPU are read, which waits for it."""
        bounds = offsets.cpu().numpy()
        lengths = np.diff(bounds)
        order = np.argsort(-lengths, kind="stable")[: int((lengths > 0).sum())]
        ordered = lengths[order]
        groups = tuple(_groups(ordered))
        padded = np.repeat([length for _, length in groups], [count for count, _ in groups]).astype(np.int64)
        starts = padded.cumsum() - padded
        place = np.arange(int(padded.sum())) - np.repeat(starts, padded)
        length, first = np.repeat(ordered, padded), np.repeat(bounds[order], padded)
        is_event = place < length
        index = first + np.minimum(place, length - 1)
        places = np.empty(int(bounds[-1]), np.int64)
        places[index[is_event]] = np.flatnonzero(is_event)
        arrays = (index, places, ordered, np.flatnonzero(~is_event))
        return Layout(offsets, groups, *(torch.from_numpy(each).to(offsets.device) for each in arrays))

    def chunks(self, most_elements: int) -> Iterator[Chunk]:
        """Parts of groups whose square matrices have at most so many elements, or of one sequence."""
        first = number = 0
        for count, length in self.groups:
            at_once = max(most_elements // length**2, 1)
            for start in range(0, count, at_once):
                part = min(at_once, count - start)
                yield Chunk(first, part, length, number)
                first += part * length
                number += part


def _groups(ordered: np.ndarray) -> Iterator[tuple[int, int]]:
    """Count and length of each group, of descending lengths."""
    first = 0
    while first < len(ordered):
        longest = int(ordered[first])
        shortest = longest - int(longest * _MOST_PADDING)
        end = int(np.searchsorted(-ordered, -shortest, side="right"))
        yield end - first, longest
        first = end
