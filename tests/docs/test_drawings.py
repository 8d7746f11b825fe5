"""Every drawing is what its script draws, is on the pages that speak of it, and shows what rowmesh does."""

from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from rowmesh import Plan, TableSpec
from rowmesh.placement import AddressMap, TableShape
from rowmesh.placement.plan import RowRange, TablePlan
from rowmesh.tables import CachedArena, Dynamic, fuse
from rowmesh.tables.dynamic.layout import num_frames, num_used
from rowmesh.tables.dynamic.shards import DynamicShards
from tests.support.drawings import ROOT, load

PAGES = {
    "one_step": ("README.md", "docs/why.md", "CONTRIBUTING.md"),
    "halves": ("README.md", "CONTRIBUTING.md"),
    "rows": ("docs/internals.md",),
}


@pytest.mark.parametrize("name", PAGES)
def test_the_file_is_what_the_script_draws(name: str):
    drawing = load(name)
    found = drawing.PICTURE.read_text(encoding="utf-8")
    assert found == drawing.draw(), f"run: python docs/site/{name}.py"
    ElementTree.fromstring(found)
    for page in PAGES[name]:
        assert f"]({drawing.PICTURE.relative_to((ROOT / page).parent)})" in (ROOT / page).read_text(), page


def test_they_are_readable_in_the_dark():
    """Every colour of text, card and lane has one for dark pages, and the card hides the page behind it."""
    light, _, dark = load("svg").STYLE.partition("@media(prefers-color-scheme:dark)")
    for kind in ("text", ".stage", ".card", ".lane", ".a0", ".a1"):
        assert f"{kind}{{" in light
        assert f"{kind}{{" in dark
    assert "opacity" not in light.partition(".card{")[2].partition("}")[0]


def test_each_room_is_drawn_in_its_half():
    drawing = load("halves")
    assert {room for half in drawing.halves() for room in half} == set(drawing.HAS)


def test_rows_are_in_the_slots_and_segments_that_are_drawn():
    drawing = load("rows")
    a, b = (TableShape(name, rows, 16, 16, 0) for name, rows in drawing.NUM_ROWS.items())
    hot, rest = RowRange(0, drawing.HOT, "replicated"), RowRange(drawing.HOT, b.num_rows, "cyclic", shift=1)
    plan = Plan((TablePlan(a, (RowRange(0, a.num_rows),)), TablePlan(b, (hot, rest))), world_size=2, ranks_per_node=2)
    maps = [AddressMap(plan, ["a", "b"], rank) for rank in range(2)]
    for number, shape in enumerate((a, b)):
        for row in range(shape.num_rows):
            rank, key, kind = maps[0].locate(number, row)
            segment = maps[0].kinds.index(kind) * maps[0].num_tables + number
            assert drawing.place(f"{shape.name}{row}") == (rank, segment, key)
    for rank, each in enumerate(maps):
        held = {
            slot: f"{shape.name}{row}"
            for number, shape in enumerate((a, b))
            for piece in each.held(number)
            for row, slot in zip(piece.rows, piece.slots, strict=True)
        }
        assert drawing.slots(rank) == [held.get(slot, "") for slot in range(each.num_slots[rank])]

    def order(row: str) -> tuple[int, int]:
        number = "ab".index(row[0])
        rank, _, kind = maps[0].locate(number, int(row[1:]))
        return rank, maps[0].kinds.index(kind) * maps[0].num_tables + number

    assert drawing.sent() == sorted(drawing.ASKED, key=order)


def test_rows_of_tiered_tables_are_in_the_cache_slots_that_are_drawn():
    drawing = load("rows")
    (group,) = fuse([TableSpec(name="c", num_rows=drawing.NUM_SLOTS, dim=4)])
    arena = CachedArena(group, drawing.NUM_SLOTS, num_cached=len(drawing.IN_CACHE))
    whole = SimpleNamespace(rows=range(drawing.NUM_SLOTS), slots=range(drawing.NUM_SLOTS))
    arena.initialize(0, [[whole]])
    batches = {
        batch: [slot for slot, pins in zip(drawing.IN_CACHE, drawing.PINS, strict=True) if batch in pins.split(", ")]
        for batch in ("kept", "t", "t+1")
    }
    for batch, slots in batches.items():
        pinned = arena.pin(np.array(slots, np.uint32))
        assert [drawing.IN_CACHE[cache_slot] for cache_slot in pinned.cache_slots] == slots
        if batch == "kept":
            pinned.unpin()
    arena.close()


def test_ids_of_dynamic_tables_are_in_the_frames_that_are_drawn():
    drawing = load("rows")
    rules = Dynamic(capacity=4, shards=1, spare_frames=2)
    assert num_frames(rules, 0, 1) == len(drawing.FRAMES)
    used = num_used(rules, range(1))
    assert used == drawing.VISITORS.start
    shards, found = DynamicShards("d", rules, range(1), num_frames=used), dict[int, int]()
    evicted: list[int] = []
    for step, ids in enumerate(([-4, 55, 907], [12, 907], [13])):
        opened = shards.open(np.array(ids), np.ones(len(ids), np.int64), step=step)
        found |= dict(zip(opened.frames.tolist(), ids, strict=True))
        evicted += opened.evicted_frames.tolist()
    drawn = {frame: holds for frame, holds in enumerate(drawing.FRAMES) if holds.isdigit() or holds == "evicted"}
    assert drawn == {frame: "evicted" if frame in evicted else str(each) for frame, each in found.items()}
