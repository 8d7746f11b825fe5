"""The data that placement is measured on: three curves of access frequency, and counts drawn from them.

`shapes.json` holds, for Avazu (8.9 M rows), Criteo Kaggle (33.8 M) and the shape of Criteo Terabyte (242.5 M), how
often every row of every table is read: the frequent rows one by one, then a power law (`fit_shapes`). A profile is what
so many samples would have counted: every count is a Poisson draw (that of the first row makes up for the sum), rows
stand in the order of their counts, and rows of one count in no order, since their order is unknown.

Rows are never drawn one by one. Rows of about one frequency are a *cell*; how many of them were counted c times is a
multinomial draw. So 242 M rows are some hundred thousand numbers, and a plan made from the drawn counts is judged
*out of sample*: by the frequencies behind them, which it has not seen.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rowmesh.placement.plan import TableShape
from rowmesh.placement.profile import Profile, TableProfile

FILE = Path(__file__).with_name("shapes.json")
NAMES = ("avazu", "kaggle", "terabyte")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Cells:
    """Rows of a table by what was counted: `rows[i]` rows of frequency `frequency[i]` stand in run `run[i]`."""

    run: Ints
    frequency: Floats
    rows: Ints


@dataclass(frozen=True, eq=False)
class TrueProfile(Profile):
    """The frequencies behind a drawn profile, over the same runs; a run's rows are judged by their mean."""

    cells: tuple[Cells, ...] = field(default=())

    def presence(self, table: int, samples: int, *, share: float = 1.0, steps: int = 1) -> Floats:
        """The mean over the rows of each run of 1 − (1 − f)^samples; nothing is read but what samples hold."""
        cells, profile = self.cells[table], self.tables[table]
        chance = -np.expm1(samples * np.log1p(-np.minimum(cells.frequency, 1 - 1e-16)))
        return np.bincount(cells.run, cells.rows * chance, len(profile.lengths)) / profile.lengths


@dataclass(frozen=True, eq=False)
class Shape:
    """A data set: what was counted, and what is true."""

    name: str
    counted: Profile
    truth: TrueProfile

    @property
    def num_rows(self) -> int:
        """Of all tables."""
        return sum(shape.num_rows for shape in self.counted.shapes)


@cache
def draw(name: str, seed: int = 1, scale: float = 1.0) -> Shape:
    """One of the three shapes.

    Args:
        name: see NAMES.
        seed: of the counts.
        scale: of the number of rows of large tables, for quick runs.
    """
    data = json.loads(FILE.read_text())[name]
    rng = np.random.default_rng(seed)
    row_bytes = 4 * data["dim"]
    tables, cells = [], []
    for table, curve in data["tables"].items():
        num_rows = max(int(curve["num_rows"] * scale), min(curve["num_rows"], 1000))
        rows, frequency = _curve(curve["head"][:num_rows], num_rows, curve["exponent"], curve["floor"])
        counts, parents, drawn = _draw_counts(rows, frequency, data["num_samples"], rng)
        counts[0] += data["num_samples"] - counts @ drawn
        distinct, run = np.unique(-counts, return_inverse=True)
        lengths = np.bincount(run, drawn).astype(np.int64)
        shape = TableShape(table, num_rows, row_bytes, row_bytes, 4)
        tables.append(TableProfile(shape, lengths, -distinct.astype(np.float64)))
        cells.append(Cells(run, frequency[parents], drawn))
    truth = [
        TableProfile(t.shape, t.lengths, data["num_samples"] * np.bincount(c.run, c.rows * c.frequency) / t.lengths)
        for t, c in zip(tables, cells, strict=True)
    ]
    samples = data["num_samples"]
    return Shape(name, Profile(tuple(tables), samples), TrueProfile(tuple(truth), samples, None, tuple(cells)))


def bins(first: int, last: int, number: int = 3000) -> tuple[Ints, Floats]:
    """Places first … last (counted from 1) in bins of equal width on a log scale: how many each has, and its middle."""
    edges = np.unique(np.round(np.geomspace(first, last + 1, number)).astype(np.int64))
    rows = np.diff(edges)
    return rows, np.sqrt(edges[:-1] * np.maximum(edges[1:] - 1.0, edges[:-1]))


def power_law(num_head: int, num_rows: int, exponent: float, floor: float, mass: float) -> tuple[Ints, Floats]:
    """Rows after the head: how many each bin has, and how often each of them is read; `mass` all together."""
    rows, middle = bins(num_head + 1, num_rows)
    weight = middle**-exponent
    floor = min(floor, mass / rows.sum())
    low, high = 0.0, 1e3 * mass / (weight * rows).sum()
    for _ in range(80):
        scale = (low + high) / 2
        too_much = (np.maximum(scale * weight, floor) * rows).sum() > mass
        low, high = (low, scale) if too_much else (scale, high)
    frequency = np.maximum(low * weight, floor)
    return rows, frequency * (mass / (frequency * rows).sum())


def _curve(head: list[float], num_rows: int, exponent: float, floor: float) -> tuple[Ints, Floats]:
    """Rows and their frequency, from the most to the least read; all accesses together are 1."""
    if len(head) >= num_rows:
        return np.ones(num_rows, np.int64), np.array(head) / sum(head)
    rows, tail = power_law(len(head), num_rows, exponent, floor, max(1 - sum(head), 1e-12))
    frequency = np.concatenate([head, tail])
    rows = np.concatenate([np.ones(len(head), np.int64), rows])
    return rows, frequency / (rows @ frequency)


def _draw_counts(rows: Ints, frequency: Floats, num_samples: int, rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """Poisson counts of all rows: the counts, the bin they are of, and how many rows of it have them."""
    counts, parents, drawn = [], [], []
    for index, (number, mean) in enumerate(zip(rows, frequency * num_samples, strict=True)):
        reach = int(8 * np.sqrt(mean) + 12)
        if number <= 2 * reach:
            values, times = np.unique(rng.poisson(mean, number), return_counts=True)
        else:
            values = np.arange(max(int(mean) - reach, 0), int(mean) + reach)
            times = rng.multinomial(number, _poisson(values, mean))
            values, times = values[times > 0], times[times > 0]
        counts.append(values)
        drawn.append(times)
        parents.append(np.full(len(values), index))
    return np.concatenate(counts), np.concatenate(parents), np.concatenate(drawn)


def _poisson(values: Ints, mean: float) -> Floats:
    """The chances of neighbouring counts, from their ratios: mean / count."""
    log = np.concatenate([[0.0], np.cumsum(np.log(mean / values[1:]))])
    chance = np.exp(log - log.max())
    return chance / chance.sum()


def sorted_counts(profile: Profile, table: int) -> NDArray[np.int32]:
    """Counts of a table row by row, falling."""
    entry = profile.tables[table]
    return np.repeat(entry.accesses.astype(np.int32), entry.lengths)
