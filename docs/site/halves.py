"""Draws the two halves of the package, room by room: `python docs/site/halves.py` writes the picture.

The rooms and their layers are those of `tests/test_house.py`, which holds the package to them. What each room has is
below, in `HAS`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from svg import picture, text

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "assets" / "halves.svg"
HOUSE = ROOT / "tests" / "test_house.py"
HAS = {
    "errors": "what a user can meet",
    "_support": "files, faults, counters, words for messages",
    "ops": "kernels: reference, cpu, cuda",
    "sparse": "ids of a batch, in bags",
    "tables": "what a table is, and where its rows lie",
    "tensor_train": "tables that are products of cores",
    "mesh": "ranks, messages, shared memory, waiting",
    "placement": "plans: which rank owns a row, who has copies",
    "exchange": "route, fetch, push; transports; copies",
    "collection": "EmbeddingCollection, its optimizer, its state",
    "checkpoint": "save, load, checkpoints beside steps",
    "pipeline": "batches ahead, micro-batches",
    "models": "networks in plain torch",
    "observe": "lines, counters and progress of a run",
    "data": "from raw files to batches",
    "publish": "versions for servers",
    "run": "rowmesh train: configuration, loop, resuming",
    "report": "pages, charts, tables",
    "doctor": "what is slow on this machine",
    "cli": "the commands",
}

WIDTH, ROW, TOP, GAP = 900, 32, 66, 40
HALF = (WIDTH - 24 - GAP) / 2
PITCH = 34


def halves() -> tuple[list[str], list[str]]:
    """The rooms of the library and of the program, lowest first, as the test of the house has them."""
    assigned = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.parse(HOUSE.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
    }
    library, program = (list(ast.literal_eval(assigned[name])) for name in ("LIBRARY", "PROGRAM"))
    return library, [room for room in program if room != "__main__"]


def draw() -> str:
    """The picture."""
    library, program = halves()
    bottom = TOP + PITCH * max(len(library), len(program))
    left, right = 12, 12 + HALF + GAP
    parts = [
        text(left + HALF / 2, 26, "the library", "stage"),
        text(left + HALF / 2, 46, "never imports the program"),
        text(right + HALF / 2, 26, "the program", "stage"),
        text(right + HALF / 2, 46, "what the command rowmesh runs"),
        *_rooms(left, bottom, library, "r0"),
        *_rooms(right, bottom, program, "r1"),
        text(
            WIDTH / 2,
            bottom + 22,
            "a room imports rooms below it; the program imports the library, the library never the program",
        ),
    ]
    middle, wall = (TOP + bottom) / 2, WIDTH / 2
    parts.append(f'<path class="flow" stroke-dasharray="5 4" d="M{wall} {TOP - 44}V{bottom}"/>')
    parts.append(f'<path class="a1" d="M{right - 3} {middle}H{left + HALF + 10}" marker-end="url(#h1)"/>')
    return picture("The two halves of rowmesh, room by room", WIDTH, bottom + 36, parts)


def _rooms(left: float, bottom: float, rooms: Sequence[str], color: str) -> Iterator[str]:
    """A half: the lowest room stands at the bottom."""
    for number, room in enumerate(rooms, start=1):
        top = bottom - PITCH * number
        yield f'<rect class="lane" x="{left}" y="{top}" width="{HALF}" height="{ROW - 4}" rx="5"/>'
        yield f'<rect class="{color}" x="{left}" y="{top}" width="5" height="{ROW - 4}" rx="2"/>'
        yield text(left + 16, top + 19, room, "stage left")
        yield text(left + 128, top + 18, HAS[room], "left")


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
