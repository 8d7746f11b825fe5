"""Draws where a row lies and what names it there: `python docs/site/rows.py` writes the picture.

Tables a and b are one group on two ranks; b's first two rows are hot, each rank has a copy. Table c is tiered, d is
dynamic; of both one rank is drawn. `tests/docs/test_drawings.py` compares all of it with rowmesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from svg import picture, text

PICTURE = Path(__file__).parents[1] / "assets" / "rows.svg"
NUM_ROWS = {"a": 6, "b": 5}
HOT = 2  # rows of b with a copy on both ranks
ASKED = ("a5", "a2", "b4", "b0", "a3")  # distinct ids of rank 0's batch, as they come
IN_CACHE = (6, 5, 2, 7)  # of table c: the slot in each cache slot
PINS = ("kept", "t", "t, t+1", "t+1")  # of each, the batches under way that pin it
NUM_SLOTS = 8  # of table c
FRAMES = ("evicted", "55", "907", "12", "13", "free", "", "", "zero")  # of table d: the id in each
VISITORS = range(6, 8)  # frames for unknown ids in evaluation

WIDTH, HEIGHT = 900, 434
CELL = 28
LEFT, SLOTS, BUFFER = 24, 270, 560  # where columns begin
TOP, SECOND = 12, 262  # of the lanes


class Place(NamedTuple):
    """Where a row is asked for."""

    rank: int
    segment: int
    slot: int


def place(row: str) -> Place:
    """Of a row of a or b. Segments: 0 and 1 of a and b where owners send rows, 2 and 3 where all ranks have copies."""
    table, number = row[0], int(row[1:])
    if table == "a":
        return Place(number % 2, 0, number // 2)
    if number < HOT:
        return Place(number % 2, 3, 3 + number)
    return Place((number - HOT + 1) % 2, 1, 5 + (number - HOT) // 2)


def slots(rank: int) -> list[str]:
    """The row in each slot of a rank."""
    rows = [f"{table}{number}" for table, count in NUM_ROWS.items() for number in range(count)]
    mine = {place(row).slot: row for row in rows if place(row).rank == rank or place(row).segment == 3}
    return [mine.get(slot, "") for slot in range(7)]


def sent() -> list[str]:
    """What rank 0 asks for, as its send buffer lists it: by owner, then by segment."""
    return sorted(ASKED, key=lambda row: place(row)[:2])


def draw() -> str:
    """The picture."""
    return picture("Row, slot, key and segment; cache slot; frame", WIDTH, HEIGHT, [*_group(), *_tiered(), *_dynamic()])


def _group() -> Iterator[str]:
    yield from _lane(12, TOP, WIDTH - 24, 238)
    for x, name, what in (
        (LEFT, "row", "a number of a table"),
        (SLOTS, "slot", "a place in a rank's memory"),
        (BUFFER, "key, segment", "what rank 0 asks, sorted"),
    ):
        yield text(x, TOP + 24, name, "stage left")
        yield text(x, TOP + 42, what, "left")
    for top, (table, count) in zip((TOP + 84, TOP + 158), NUM_ROWS.items(), strict=True):
        yield text(LEFT, top - 8, f"table {table}" + (f", rows 0 and {HOT - 1} hot" if table == "b" else ""), "left")
        for number in range(count):
            yield from _cell(LEFT, number, top, f"{table}{number}", _color(f"{table}{number}"))
    for rank, top in enumerate((TOP + 84, TOP + 158)):
        yield text(SLOTS, top - 8, f"rank {rank}", "left")
        for slot, row in enumerate(slots(rank)):
            yield from _cell(SLOTS, slot, top, row, _color(row))
            yield text(SLOTS + CELL * (slot + 0.5) - 1, top + 42, str(slot))
    rows, before = sent(), 0
    for rank, top in enumerate((TOP + 84, TOP + 158)):
        mine = [row for row in rows if place(row).rank == rank]
        yield text(BUFFER, top - 8, f"for rank {rank}: entries {before} to {before + len(mine) - 1}", "left")
        for number, row in enumerate(mine):
            yield from _cell(BUFFER, 3.4 * number, top, str(place(row).slot), _color(row))
            yield text(BUFFER + CELL * (3.4 * number + 1.15), top + 17, row, "left")
            yield text(BUFFER + CELL * 3.4 * number, top + 42, f"segment {place(row).segment}", "left")
        before += len(mine)
    segments = "direct: owners send rows of a in segment 0, of b in 1; copied: of a in 2, of b in 3"
    yield text(LEFT, TOP + 226, segments, "left")
    yield text(BUFFER, TOP + 226, "in a cell: the key, which is the owner's slot", "left")


def _tiered() -> Iterator[str]:
    width = 408
    yield from _lane(12, SECOND, width, 160)
    yield text(LEFT, SECOND + 24, "cache slot", "stage left")
    yield text(LEFT + 92, SECOND + 24, "where a row of a tiered table is in fast memory", "left")
    above, below = SECOND + 52, SECOND + 108
    yield text(LEFT, above + 15, "store", "left")
    yield text(LEFT, below + 15, "cache", "left")
    begin = LEFT + 60
    for slot in range(NUM_SLOTS):
        still = "" if slot in IN_CACHE else " still"
        yield from _cell(begin, slot, above, str(slot), "r1" + still)
    for cache_slot, slot in enumerate(IN_CACHE):
        at, to = begin + CELL * (slot + 0.5) - 1, begin + CELL * (1.5 * cache_slot + 0.5) - 1
        yield from _cell(begin, 1.5 * cache_slot, below, str(slot), "r1" if PINS[cache_slot] != "kept" else "mixed")
        yield text(to, below + 42, PINS[cache_slot])
        path = f"M{at} {above + 27}C{at} {above + 42} {to} {above + 36} {to} {below - 7}"
        yield f'<path class="a1" d="{path}" marker-end="url(#h1)"/>'
    yield text(begin + CELL * NUM_SLOTS + 8, above + 15, "slots 0 to 7", "left")
    yield text(begin + CELL * NUM_SLOTS + 8, below + 15, "0 to 3", "left")
    yield text(begin + CELL * NUM_SLOTS + 8, below + 42, "pinned by batch", "left")


def _dynamic() -> Iterator[str]:
    left, width = 432, 456
    yield from _lane(left, SECOND, width, 160)
    yield text(left + 12, SECOND + 24, "frame", "stage left")
    yield text(left + 64, SECOND + 24, "the row of a dynamic table that an id is given", "left")
    top, pitch = SECOND + 74, 48
    for frame, holds in enumerate(FRAMES):
        x = left + 12 + pitch * frame
        kind = "mixed" if frame in VISITORS or holds in ("free", "evicted", "zero") else "r0"
        still = " still" if holds in ("", "free", "zero") else ""
        yield f'<rect class="{kind}{still}" x="{x}" y="{top}" width="{pitch - 4}" height="26" rx="3"/>'
        words = "−4" if holds == "evicted" else holds
        yield text(x + (pitch - 4) / 2, top + 17, words, f"id{still}")
        yield text(x + (pitch - 4) / 2, top + 42, str(frame))
    yield text(left + 12, top - 10, "id in it; −4 has left: its frame stays pinned", "left")
    yield text(left + 12, top + 66, "ids and batches under way", "left")
    yield text(left + 12 + pitch * 7 - 2, top + 66, "unknown ids of evaluation; zeros")


def _color(row: str) -> str:
    """The class of a row: its owner, or that all ranks have it."""
    if not row:
        return "mixed still"
    return "mixed" if place(row).segment == 3 else f"r{place(row).rank}"


def _lane(x: float, y: float, width: float, height: float) -> Iterator[str]:
    yield f'<rect class="lane" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'


def _cell(begin: float, number: float, top: float, words: str, kind: str) -> Iterator[str]:
    """One of the cells of a strip."""
    x = begin + CELL * number
    yield f'<rect class="{kind}" x="{x:g}" y="{top}" width="{CELL - 2}" height="26" rx="3"/>'
    if words:
        yield text(round(x + CELL / 2 - 1, 1), top + 17, words, "id still" if "still" in kind else "id")


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
