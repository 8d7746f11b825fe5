"""Names on the pages for contributors exist: files, definitions, attributes, threads and process groups."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from rowmesh.pipeline.schedule import COMPUTE, make_schedule

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rowmesh"
PAGES = ("CONTRIBUTING.md", "docs/internals.md")
QUESTIONS = (
    "Who owns a row?",
    "Where do bytes leave the rank?",
    "Where does an optimizer change a row?",
    "Where is a copy kept equal?",
    "Where does a batch wait for rows?",
    "Where is a row saved?",
)
_NAMED = re.compile(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, (?:and )?|; )?)+)")


@functools.cache
def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


def members(node: ast.ClassDef) -> set[str]:
    """Names of methods and attributes that a class gives its objects, without those of its bases."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(each.name)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            found.add(each.id)
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            found.add(each.attr)
    return found


@functools.cache
def classes() -> dict[str, list[ast.ClassDef]]:
    found = defaultdict(list)
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(node)
    return found


def has(cls: str, name: str) -> bool:
    """Whether a class of that name, or a base of it, has such a method or attribute."""
    return any(
        name in members(node) or any(has(ast.unparse(base).split("[")[0], name) for base in node.bases)
        for node in classes()[cls]
    )


def defined(path: Path) -> set[str]:
    """What is defined at the top of a file."""
    nodes = trees()[path].body
    found = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return found | {name for node in nodes for name in _assigned(node)}


def _assigned(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        for leaf in ast.walk(node):
            if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Store):
                yield leaf.id


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str):
    paths = set(re.findall(r"`([\w*<>/]+(?:\.\w+|/))`", text(page)))
    assert paths
    missing = [
        path
        for path in paths
        if "/" in path and not any(list(root.glob(path.replace("<op>", "*"))) for root in (PACKAGE, ROOT))
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_definitions_are_in_the_files_that_are_named(page: str):
    found = _NAMED.findall(text(page))
    assert found
    missing = []
    for path, names in found:
        for name in re.findall(r"`([\w.]+)`", names):
            first, _, attribute = name.partition(".")
            if first != "rowmesh" and (
                first not in defined(PACKAGE / path) or (attribute and not has(first, attribute))
            ):
                missing.append((path, name))
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_attributes_exist(page: str):
    found = {pair for pair in re.findall(r"`([A-Z]\w+)\.(\w+)`", text(page)) if pair[1] not in ("md", "py")}
    assert found
    assert not [f"{cls}.{name}" for cls, name in found if not has(cls, name)]


def test_each_of_six_questions_has_one_file():
    table = text("CONTRIBUTING.md").partition("## Six questions")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| Wh")]
    assert tuple(row[0].removeprefix("| ") for row in rows) == QUESTIONS
    for _, where, *_ in rows:
        assert re.fullmatch(r"`[\w/]+\.py`: `[\w.]+`", where), where


def test_every_thread_is_on_the_page():
    schedules = (
        make_schedule(1, 2, is_tiered=True, is_on_device=is_on_device, copies=True, joins=joins)
        for is_on_device in (False, True)
        for joins in (False, True)
    )
    found = {f"rowmesh {resource}" for schedule in schedules for resource in schedule.resources if resource != COMPUTE}
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called.endswith("ThreadPoolExecutor"):
                    found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
                elif called.endswith(("Thread", "Worker")):
                    found |= {
                        each.value.value
                        for each in node.keywords
                        if each.arg == "name" and isinstance(each.value, ast.Constant)
                    }
    table = text("docs/internals.md").partition("### Threads")[2].partition("\n### ")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == found


def test_every_process_group_is_on_the_page():
    found = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("USE", "USES"):
                value = ast.literal_eval(node.value)
                found |= {value} if isinstance(value, str) else set(value)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".with_process_group", ".agreement")):
                found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    found = {each for each in found if isinstance(each, str)}
    table = text("docs/internals.md").partition("### Process groups")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == found
