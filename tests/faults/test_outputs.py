"""Outputs that are one file: on a full disk what stood there stays."""

import ast
import errno
from pathlib import Path

import pytest

from rowmesh._support.faults import arm
from rowmesh.data.schema import Categorical, Schema
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.observe.trace import write_trace
from rowmesh.placement import Plan, TableShape
from rowmesh.placement.comparison import compare
from rowmesh.placement.topology import Topology
from rowmesh.placement.two_dimensional import compare_replicas
from rowmesh.report.plan_page import write_report
from rowmesh.report.replica_page import write_replica_report
from tests.placement.problems import problem

ROOT = Path(__file__).parents[2] / "rowmesh"
WRITERS = {
    "plan": Plan.cyclic([TableShape("item", 10, 64, 64, 4)], 2).save,
    "topology": Topology.uniform(2).save,
    "profile": lambda path: problem().profile.save(path),
    "schema": Schema(label="label", dense=["x"], categorical=[Categorical(name="c")]).save,
    "trace": lambda path: write_trace(path, [[]]),
    "report": lambda path: write_report(compare(problem(), "cyclic"), path, "title"),
    "report of replicas": lambda path: write_replica_report(
        compare_replicas(problem(), "cyclic", Synchronization(), [1]), path, "title"
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_what_was_there(tmp_path, name):
    path = tmp_path / "output"
    WRITERS[name](path)
    before = path.read_bytes() + b"\n"
    path.write_bytes(before)
    with arm("files.write=ENOSPC"), pytest.raises(OSError) as caught:
        WRITERS[name](path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def opened_for_writing(path):
    """The lines of a module that write a file without `rowmesh._support.files`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            modes = {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}
            if node.func.attr in ("write_text", "write_bytes") or (
                node.func.attr == "open" and modes & {"w", "wb", "x"}
            ):
                yield node.lineno


@pytest.mark.parametrize("package", ["checkpoint", "cli", "observe", "placement", "report", "run"])
def test_files_are_written_by_one_mechanism(package):
    found = [f"{path}:{line}" for path in (ROOT / package).rglob("*.py") for line in opened_for_writing(path)]
    assert not found, "use rowmesh._support.files.atomic"
