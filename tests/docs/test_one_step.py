"""The picture of one step, on README and docs/why.md, is what its script draws, and that is what a step does."""

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

from rowmesh import Plan
from rowmesh.ops.segment_unique import segment_unique
from rowmesh.placement import TableShape

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "site" / "one_step.py"


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_step", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_what_the_script_draws(drawing: ModuleType):
    found = drawing.PICTURE.read_text(encoding="utf-8")
    assert found == drawing.draw(), "run: python docs/site/one_step.py"
    ElementTree.fromstring(found)
    for page in ("README.md", "docs/why.md"):
        assert f"]({drawing.PICTURE.relative_to((ROOT / page).parent)})" in (ROOT / page).read_text(), page


def test_owners_and_distinct_ids_are_those_of_rowmesh(drawing: ModuleType):
    world_size = len(drawing.BAGS)
    shape = TableShape("item", drawing.NUM_ROWS, value_bytes=16, gradient_bytes=16, state_bytes=0)
    (table,) = Plan.cyclic([shape], world_size).tables
    (rows,) = table.ranges
    assert [drawing.owner(row) for row in range(drawing.NUM_ROWS)] == [
        rows.owner(row, world_size) for row in range(drawing.NUM_ROWS)
    ]
    for bags in drawing.BAGS:
        ids = torch.tensor(bags).flatten()
        unique, *_ = segment_unique(ids, torch.tensor([0, len(ids)]))
        assert drawing.distinct(bags) == unique.tolist()
        assert drawing.routed(bags) == sorted(unique.tolist(), key=drawing.owner)


def test_it_is_readable_in_the_dark(drawing: ModuleType):
    """Every colour of text, card and lane has one for dark pages, and the card hides the page behind it."""
    light, _, dark = drawing.STYLE.partition("@media(prefers-color-scheme:dark)")
    for kind in ("text", ".stage", ".card", ".lane", ".a0", ".a1"):
        assert f"{kind}{{" in light
        assert f"{kind}{{" in dark
    assert "opacity" not in light.partition(".card{")[2].partition("}")[0]
