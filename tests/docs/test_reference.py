"""The API pages of the site have every public name, and no name that is not there."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import rowmesh
import rowmesh.data
import rowmesh.errors
import rowmesh.models

PAGES = Path(__file__).parents[2] / "docs" / "reference"
NAMES = [name for page in sorted(PAGES.glob("*.md")) for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)]


@pytest.mark.parametrize("module", [rowmesh, rowmesh.data, rowmesh.models])
def test_every_public_name_has_a_place(module):
    shown = {name.rpartition(".")[2] for name in NAMES if name.startswith(f"{module.__name__}.")}
    assert sorted(set(module.__all__) - shown - {"RowmeshError"}) == []
    assert "rowmesh.errors" in NAMES  # as a whole, RowmeshError with it


def test_every_name_exists_and_has_one_place():
    assert len(NAMES) > 30
    assert sorted({name for name in NAMES if NAMES.count(name) > 1}) == []
    for name in set(NAMES) - {"rowmesh.errors"}:
        module, _, attribute = name.rpartition(".")
        assert getattr(sys.modules.get(module) or importlib.import_module(module), attribute).__doc__, name


def test_the_list_of_pages_names_what_they_have():
    """Row by row of the table on the first page."""
    for page, names in re.findall(r"^\| \[[^]]+\]\((\w+\.md)\) \| (.*) \|$", (PAGES / "index.md").read_text(), re.M):
        text = (PAGES / page).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^::: [\w.]+\.{name}$", text, re.M) or page == "errors.md", (page, name)
