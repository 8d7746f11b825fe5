"""Draws one training step of two ranks, as it is on README: `python docs/site/one_step.py` writes the picture.

The batches are below, in `BAGS`; all else follows from them, as in a step. `tests/docs/test_one_step.py` compares what
follows with rowmesh, `tests/docs/test_drawings.py` the file with what is drawn here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from svg import picture, text

PICTURE = Path(__file__).parents[1] / "assets" / "one_step.svg"
NUM_ROWS = 10
BAGS = ([[5, 2], [5, 8]], [[3, 8], [1, 3]])  # of each rank: the ids of its samples

WIDTH, HEIGHT = 900, 390
CELL = 24  # the pitch of ids and rows
DIM = 4  # squares of a drawn row
LANES = (58, 278)  # tops of what a rank does
LANE_HEIGHT, TABLE_TOP = 98, 205
BATCH, ROUTE, FETCH, POOL, NETWORK, PUSH = 82, 214, 346, 462, 586, 756  # middles of the stages
STAGES = {
    BATCH: ("batch", "ids of 2 samples"),
    ROUTE: ("route", "distinct, by owner"),
    FETCH: ("fetch", "rows [U, D]"),
    POOL: ("pool", "vectors [B, D]"),
    NETWORK: ("network", "loss, backward"),
    PUSH: ("push", "summed gradients [U, D]"),
}


def owner(row: int) -> int:
    """The rank of a row: rows are dealt in turn."""
    return row % len(BAGS)


def distinct(bags: Sequence[Sequence[int]]) -> list[int]:
    """The distinct ids of a rank's samples, in order of first appearance."""
    return list(dict.fromkeys(row for bag in bags for row in bag))


def routed(bags: Sequence[Sequence[int]]) -> list[int]:
    """The distinct ids by owner, those of one owner in their order."""
    return sorted(distinct(bags), key=owner)


def draw() -> str:
    """The picture."""
    parts = []
    for middle, (verb, what) in STAGES.items():
        parts += [text(middle, 24, verb, "stage"), text(middle, 42, what)]
    for rank, top in enumerate(LANES):
        parts += _lane(rank, top)
    parts += _table(FETCH, is_after=False)
    parts += _table(PUSH, is_after=True)
    parts.append(text(24, TABLE_TOP + 5, "the table:", "left"))
    parts.append(text(24, TABLE_TOP + 21, "row r is on rank r mod 2", "left"))
    begin, end = FETCH + NUM_ROWS * CELL / 2 + 8, PUSH - NUM_ROWS * CELL / 2 - 10
    parts.append(f'<path class="flow" d="M{begin} {TABLE_TOP + 11}H{end}" marker-end="url(#h)"/>')
    parts.append(text((begin + end) / 2, TABLE_TOP + 4, "owners add, update"))
    return picture("One training step: two ranks, one table", WIDTH, HEIGHT, parts)


def _lane(rank: int, top: int) -> Iterator[str]:
    """Draws the work of a rank, from its samples to its gradients."""
    bags, rows = BAGS[rank], routed(BAGS[rank])
    below = rank == 0  # where the table is
    yield f'<rect class="lane" x="12" y="{top}" width="{WIDTH - 24}" height="{LANE_HEIGHT}" rx="6"/>'
    yield f'<rect class="r{rank}" x="12" y="{top}" width="5" height="{LANE_HEIGHT}" rx="2"/>'
    yield text(26, top + (16 if below else LANE_HEIGHT - 8), f"rank {rank}", "left")
    middle = top + LANE_HEIGHT / 2
    for number, bag in enumerate(bags):
        yield from _ids(BATCH, middle + (number - 0.5) * (CELL + 4), bag)
    yield from _ids(ROUTE, middle, rows)
    yield from _vectors(FETCH, middle, [f"r{owner(row)}" for row in rows])
    yield from _vectors(POOL, middle, ["mixed"] * len(bags))
    yield f'<rect class="box" x="{NETWORK - 38}" y="{middle - 20}" width="76" height="40" rx="6"/>'
    yield text(NETWORK, middle + 4, "your model")
    yield from _vectors(PUSH, middle, [f"r{owner(row)}" for row in rows])
    for begin, end in ((122, 166), (262, 298), (394, 428), (496, 540), (632, 706)):
        yield f'<path class="flow" d="M{begin} {middle}H{end}" marker-end="url(#h)"/>'
    edge = middle + (30 if below else -30)
    table = TABLE_TOP - 3 if below else TABLE_TOP + CELL + 1
    for place, row in enumerate(rows):
        for stage in (FETCH, PUSH):
            at, there = _across(stage, place, len(rows)), _across(stage, row, NUM_ROWS)
            if stage == FETCH:  # from the table
                yield _curve(owner(row), there, table, at, edge)
            else:
                yield _curve(owner(row), at, edge, there, table)


def _across(middle: float, place: int, count: int) -> float:
    """The middle of one of `count` cells beside each other."""
    return middle + (place - (count - 1) / 2) * CELL


def _ids(middle: float, y: float, rows: Sequence[int]) -> Iterator[str]:
    for place, row in enumerate(rows):
        x = _across(middle, place, len(rows))
        yield f'<rect class="r{owner(row)}" x="{x - 11}" y="{y - 11}" width="22" height="22" rx="3"/>'
        yield text(x, y + 4, str(row), "id")


def _vectors(middle: float, y: float, kinds: Sequence[str]) -> Iterator[str]:
    for place, kind in enumerate(kinds):
        x = _across(middle, place, len(kinds))
        for number in range(DIM):
            top = y + (number - DIM / 2) * 14 + 1
            yield f'<rect class="{kind}" x="{x - 8}" y="{top}" width="16" height="12" rx="2"/>'


def _table(middle: float, *, is_after: bool) -> Iterator[str]:
    """The rows, before the step or after it; those that the step reads stand out."""
    touched = {row for bags in BAGS for row in distinct(bags)}
    for row in range(NUM_ROWS):
        x = _across(middle, row, NUM_ROWS)
        still = "" if row in touched else " still"
        yield f'<rect class="r{owner(row)}{still}" x="{x - 11}" y="{TABLE_TOP}" width="22" height="22" rx="3"/>'
        yield text(x, TABLE_TOP + 15, f"{row}′" if is_after and row in touched else str(row), f"id{still}")


def _curve(color: int, x: float, y: float, to_x: float, to_y: float) -> str:
    """An arrow that leaves and arrives upright."""
    tip = to_y + (-6 if to_y > y else 6)
    half = (y + tip) / 2
    path = f"M{x} {y}C{x} {half} {to_x} {half} {to_x} {tip}"
    return f'<path class="a{color}" d="{path}" marker-end="url(#h{color})"/>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
