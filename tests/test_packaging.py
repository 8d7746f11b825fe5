"""What a package index shows is true; `python -m build` and an installation are checked by hand before a release."""

import re
import tomllib
from pathlib import Path

import rowmesh

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_one_version():
    """The package's; pyproject.toml reads it."""
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "rowmesh/__init__.py"
    assert f"\nversion: {rowmesh.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_link_of_the_readme_works_on_a_package_index():
    """Links to files become links to the repository, pictures become files of it, and the files are there."""
    rules = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    shown = (ROOT / "README.md").read_text()
    for rule in rules:
        shown = re.sub(rule["pattern"], rule["replacement"], shown)
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert links
    assert all(link.startswith("https://") for link in links), links
    raw = "https://raw.githubusercontent.com/rowmesh/rowmesh/main/"
    for begin, least in ((PROJECT["project"]["urls"]["Homepage"] + "/blob/main/", 10), (raw, 1)):
        inside = [link.removeprefix(begin).partition("#")[0] for link in links if link.startswith(begin)]
        assert len(inside) >= least
        assert not [path for path in inside if not (ROOT / path).exists()]


def test_extras_that_errors_name_exist():
    named = set()
    for path in (ROOT / "rowmesh").rglob("*.py"):
        named |= set(re.findall(r"(?:rowmesh|'\.)\[(\w+)\]", path.read_text()))
        named |= set(re.findall(r'extras\.load\(\s*"[\w.]+", "(\w+)"', path.read_text()))
    assert named == set(PROJECT["project"]["optional-dependencies"]) - {"dev", "docs"}
    readme = (ROOT / "README.md").read_text()
    assert all(f"`rowmesh[{name}]`" in readme for name in named)
