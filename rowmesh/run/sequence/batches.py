"""Steps of sequence models: what is looked up in a step, and the items that are drawn for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.data.events import SequenceLoader
from rowmesh.data.events.batch import SequenceBatch
from rowmesh.data.events.raw_ids import RawIds
from rowmesh.run.sequence.data import ITEM, SCORED
from rowmesh.run.sequence.options import SequenceOptions
from rowmesh.sparse import SparseBatch

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, eq=False)
class SequencePart:
    """A micro-batch of a step on one rank; P positions, at each of which the item that followed is predicted.

    Attributes:
        events: of its users.
        scored: int64, the items that they are compared with.
        negative_ids: int64 `[S]`, shared by all positions, or `[P, S]`; None where all items are compared.
    """

    events: SequenceBatch
    scored: Tensor
    negative_ids: Tensor | None = None


@dataclass(frozen=True, eq=False)
class SequenceStep:
    """A step on one rank, in micro-batches with about as many ids each.

    Attributes:
        parts: the micro-batches; some are empty where there are few users.
        sparse: a sample is a micro-batch: as `item` its events, as `scored` what they are compared with, and
            by name the side columns that are read.
    """

    parts: tuple[SequencePart, ...]
    sparse: SparseBatch

    @staticmethod
    def of(parts: Sequence[SequencePart], side: Sequence[str] = ()) -> SequenceStep:
        """From its micro-batches, with some side columns."""
        bags = [part.events.items for part in parts] + [part.scored for part in parts]
        bags += [part.events.side[name] for name in side for part in parts]
        ends = torch.tensor([0, *map(len, bags)]).cumsum(0)
        features = (ITEM, SCORED, *side)
        return SequenceStep(tuple(parts), SparseBatch(features, torch.cat(bags), len(parts), jagged_offsets=ends))

    @property
    def num_samples(self) -> int:
        """Users."""
        return sum(len(part.events.users) for part in self.parts)

    @property
    def weight(self) -> float:
        """P of all micro-batches."""
        return float(sum(len(part.events.targets) for part in self.parts))

    def take(self, samples: Tensor) -> SequenceStep:
        """The given micro-batches, in their order."""
        return SequenceStep.of([self.parts[number] for number in samples.tolist()], self.sparse.features[2:])


class Draws:
    """Draws items that did not follow.

    They are a function of seed, step, user and position alone: any number of ranks draws the same.

    Args:
        options: of the model.
        counts: int64 `[M]`, training events of each item.
        seed: of the run.
        raw: by which ids batches name items; None: by their numbers.
    """

    def __init__(
        self, options: SequenceOptions, counts: NDArray[np.int64], seed: int, raw: RawIds | None = None
    ) -> None:
        self._options, self._seed, self._raw = options, np.array([seed], np.uint64), raw
        weights = counts if options.draw == "popularity" else np.ones_like(counts)
        self._ends = weights.cumsum()
        self.chances = weights / weights.sum()
        """float64 `[M]`, the probability with which each item is drawn."""
        with np.errstate(divide="ignore"):  # items that never occur are never drawn
            self._log_q = torch.from_numpy(np.log(self.chances))

    def log_q(self, ids: Tensor) -> Tensor:
        """The log of the probability with which each item is drawn."""
        if self._raw is None:
            return self._log_q[ids]
        return self._log_q[torch.from_numpy(self._raw.numbers(ids.numpy().ravel()))].view(ids.shape)

    def ids(self, events: SequenceBatch, step: int, epoch: int) -> Tensor:
        """int64 `[S]` for all positions of a step of the run, or `[P, S]`."""
        columns = np.arange(self._options.num_negatives, dtype=np.uint64)
        if self._options.shares:
            keys = hashed(hashed(self._seed, np.uint64(step)), columns)
        else:
            users = events.users.numpy().repeat(events.offsets.diff().numpy()).astype(np.uint64)
            places = _places(events.offsets.numpy()).astype(np.uint64)
            keys = hashed(hashed(hashed(hashed(self._seed, np.uint64(epoch)), users), places)[:, None], columns)
        drawn = (keys % np.uint64(self._ends[-1])).astype(np.int64)
        numbers = np.searchsorted(self._ends, drawn, side="right")
        return torch.from_numpy(numbers if self._raw is None else self._raw.ids[numbers])


class StepLoader:
    """The steps of one rank, epoch after epoch.

    Args:
        loader: of the training split.
        scored: this rank's part of all items, or what draws some.
        micro_batches: into how many parts of about as many ids the users of a step are shared out.
        side: columns that are read, too.
    """

    def __init__(
        self, loader: SequenceLoader, scored: range | Draws, micro_batches: int = 1, side: Sequence[str] = ()
    ) -> None:
        self._side = tuple(side)
        self._loader, self._scored, self._micro_batches = loader, scored, micro_batches

    @property
    def waited_s(self) -> float:
        """How long iterating has waited for batches."""
        return self._loader.waited_s

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return self._loader.num_batches

    def __iter__(self) -> Iterator[SequenceStep]:
        for batch in self._loader:
            position = self._loader.state_dict()
            yield self._step(batch, position["epoch"] * self.num_batches + position["batch"] - 1)

    def _step(self, events: SequenceBatch, number: int) -> SequenceStep:
        parts = [events] if self._micro_batches == 1 else events.split(self._micro_batches)
        return SequenceStep.of([self._part(part, number) for part in parts], self._side)

    def _part(self, events: SequenceBatch, number: int) -> SequencePart:
        if isinstance(self._scored, range):
            return SequencePart(events, torch.arange(self._scored.start, self._scored.stop))
        drawn = self._scored.ids(events, number, number // self.num_batches)
        return SequencePart(events, torch.cat([events.targets, drawn.flatten()]), drawn)

    def state_after(self, batches: int) -> dict[str, Any]:
        """The position after so many batches since the first."""
        return self._loader.state_after(batches)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position."""
        self._loader.load_state_dict(state)


def hashed(keys: NDArray[np.uint64], more: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """Random numbers of 64 bits, a function of both: the finalizer of SplitMix64.

    >>> numbers = hashed(np.zeros(3, np.uint64), np.arange(3, dtype=np.uint64))
    >>> len(set(numbers.tolist()))
    3
    """
    with np.errstate(over="ignore"):
        z = keys + _STEP * (np.asarray(more) + np.uint64(1))
        z = (z ^ (z >> np.uint64(30))) * _MIX[0]
        z = (z ^ (z >> np.uint64(27))) * _MIX[1]
        return z ^ (z >> np.uint64(31))


def items_alone(items: Tensor) -> SparseBatch:
    """A look-up of items that are compared with events."""
    return SparseBatch((SCORED,), items, 1, jagged_offsets=torch.tensor([0, len(items)]))


def events_alone(events: SequenceBatch, side: Sequence[str]) -> SparseBatch:
    """A look-up of events, with side columns; of a value without a row, −1, that of row 0."""
    bags = [events.items, *(events.side[name].clamp(min=0) for name in side)]
    ends = torch.arange(len(bags) + 1) * len(events.items)
    return SparseBatch((ITEM, *side), torch.cat(bags), 1, jagged_offsets=ends)


def _places(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of events, counted from the last of each user: the same however much history before them is read."""
    lengths = np.diff(offsets)
    return np.repeat(offsets[1:], lengths) - np.arange(offsets[-1])
