"""What [Note: GPU kernels] promises of every `cuda.py`, as far as the source shows it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "rowmesh/ops"
SOURCES = sorted(ROOT.glob("*/cuda.py"))
# Each makes the host wait for the device, or has a shape that only the device knows.
WAITING = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "unique_consecutive",
    "bincount",
    "synchronize",
    "is_nonzero",
}
OF_WHOLE_NUMBERS = {
    "segment_unique": {"atomic_cas", "atomic_min", "atomic_add"},
    "bound_ids": {"atomic_add"},
    "dynamic_index": {"atomic_add"},
    "merge": {"atomic_add"},
}


def calls(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func.value), node.func.attr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.parent.name)
def test_the_host_never_waits(path):
    assert not [f"{owner}.{name}()" for owner, name in calls(path) if name in WAITING]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.parent.name)
def test_atomics_are_of_whole_numbers(path):
    """Atomics whose results do not depend on order. Before you list another one here, look at its type."""
    atomics = {name for owner, name in calls(path) if owner == "tl" and name.startswith("atomic_")}
    assert atomics == OF_WHOLE_NUMBERS.get(path.parent.name, set())


def test_there_are_kernels():
    assert {"merge_update", "route", "average", "tensor_train"} <= {path.parent.name for path in SOURCES}
