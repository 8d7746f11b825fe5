"""Planted events: users who walk between groups of items, so that the best ranking of what comes next is known.

Items have a group and a popularity. After an item of group g the next one is drawn from those that the user has not
seen::

    p(j | g) ∝ transitions[g, group_j] · popularity_j

so that ranking by this product is the best that any model can do.
Users and items are about half, and lengths a third, of MovieLens 1M's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmesh.data.events.prepare import prepare_events
from rowmesh.data.events.schema import EventSchema
from rowmesh.data.events.sequences import Sequences
from rowmesh.data.progress import Progress, silent
from rowmesh.errors import ConfigurationError

CUTOFFS = (1, 5, 10, 20, 50, 100, 200)
SCHEMA = EventSchema(user="user_id", item="item_id", time="timestamp")
_START, _HOUR = 946_684_800, 3600  # the year 2000
_USERS = 512  # drawn at a time


@dataclass(frozen=True, kw_only=True)
class PlantedEvents:
    """The parameters of drawn events.

    Attributes:
        num_users: every user has 20 events or more.
        num_items: a user sees no item twice.
        num_groups: of items.
        mean_events: of a user.
        signal: how much likelier the successors of a group are than other groups: the standard deviation of the log of
            the transitions.
        skew: how fast popularity falls within a group: p ∝ rank^−skew.
        seed: equal seeds give equal events.
    """

    num_users: int = 3000
    num_items: int = 1500
    num_groups: int = 25
    mean_events: int = 60
    signal: float = 2.5
    skew: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_users, self.num_groups) < 1 or self.mean_events < 20:
            raise ConfigurationError("planted events need 1 user, 1 group and a mean of 20 events or more")
        if self.num_items < max(10 * self.num_groups, 8 * self.mean_events):
            raise ConfigurationError(
                f"{self.num_items} items are too few for {self.num_groups} groups of 10 and {self.mean_events} events "
                "of a user, who sees none twice; give more items, or fewer of the others"
            )


def synthesize_events(
    out: Path, planted: PlantedEvents, *, overwrite: bool = False, progress: Progress = silent
) -> Sequences:
    """Draws events and prepares them; what the best ranking reaches on the held-out events is kept beside them.

    The last event of every user is the test's, the one before it the validation's.

    Args:
        out: the folder to write.
        planted: what to draw.
        overwrite: whether a folder that was prepared before may be replaced.
        progress: is told how far it is.
    """
    optimum: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "planted.csv"
        ranks: list[NDArray[np.int64]] = []
        with file.open("w", encoding="ascii") as stream:
            stream.write("user_id,item_id,timestamp\n")
            for first, items, lengths, found in _users(planted):
                ranks.append(found)
                stream.writelines(_lines(planted, first, items, lengths))
                progress("draw", min((first + _USERS) / planted.num_users, 1.0))
        held_out = np.concatenate(ranks)
        for column, split in enumerate(("validation", "test")):
            optimum[split] = _scores(held_out[:, column])
        return prepare_events(
            [file], out, SCHEMA, overwrite=overwrite, progress=progress, optimum=optimum, request=drawn_request(planted)
        )


def drawn_request(planted: PlantedEvents) -> dict[str, Any]:
    """The inputs that the output of `synthesize_events` depends on."""
    return {"drawn": asdict(planted)}


def _users(
    planted: PlantedEvents,
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Some users at a time: the first, items `[U, longest]`, lengths, and ranks `[U, 2]` of the last two items."""
    random = np.random.default_rng([planted.seed, 1])
    groups = random.integers(planted.num_groups, size=planted.num_items)
    places = np.zeros(planted.num_items)
    for group in range(planted.num_groups):
        members = np.flatnonzero(groups == group)
        places[members] = 1 + random.permutation(len(members))
    transitions = random.normal(0.0, planted.signal, (planted.num_groups, planted.num_groups))
    weights = np.exp(transitions)[:, groups] * places**-planted.skew  # [G, M]
    for first in range(0, planted.num_users, _USERS):
        count = min(_USERS, planted.num_users - first)
        spread = random.gamma(1.0, planted.mean_events - 20 + 1e-9, count)
        lengths = np.minimum(20 + spread.astype(np.int64), 4 * planted.mean_events)
        items, ranks = _walk(random, weights, groups, lengths)
        yield first, items, lengths, ranks


def _walk(
    random: np.random.Generator, weights: NDArray[np.float64], groups: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Items of some users, and how the best ranking places their last two."""
    count, users = len(lengths), np.arange(len(lengths))
    unseen = np.ones((count, len(groups)), np.bool_)
    items, ranks = np.full((count, lengths.max()), -1), np.zeros((count, 2), np.int64)
    group = random.integers(len(weights), size=count)
    for step in range(lengths.max()):
        going = users[step < lengths]
        chances = weights[group[going]] * unseen[going]
        ends = chances.cumsum(axis=1)
        drawn = (ends < random.random(len(going))[:, None] * ends[:, -1:]).sum(axis=1)
        for column, before_end in enumerate((2, 1)):
            held = np.flatnonzero(lengths[going] - before_end == step)
            own = chances[held, drawn[held]]
            ranks[going[held], column] = 1 + (chances[held] > own[:, None]).sum(axis=1)
        items[going, step], group[going], unseen[going, drawn] = drawn, groups[drawn], False
    return items, ranks


def _lines(planted: PlantedEvents, first: int, items: NDArray[np.int64], lengths: NDArray[np.int64]) -> Iterator[str]:
    for user, length in enumerate(lengths.tolist()):
        random = np.random.default_rng([planted.seed, 2, first + user])
        times = _START + _HOUR + random.exponential(_HOUR, length).cumsum().astype(np.int64) + np.arange(length)
        for item, time in zip(items[user, :length].tolist(), times.tolist(), strict=True):
            yield f"{first + user + 1},{item + 1},{time}\n"


def _scores(ranks: NDArray[np.int64]) -> dict[str, float]:
    """HR@K, NDCG@K and MRR of ranks, as `RankingMetrics` has them."""
    gains, found = 1 / np.log2(1 + ranks), {}
    for k in CUTOFFS:
        found |= {f"hr@{k}": float((ranks <= k).mean()), f"ndcg@{k}": float((gains * (ranks <= k)).mean())}
    return {**found, "mrr": float((1 / ranks).mean())}
