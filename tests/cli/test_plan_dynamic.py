"""`rowmesh plan` and dynamic tables: what they take, and plans beside them."""

import pytest

from rowmesh.data import Prepared
from rowmesh.placement import Plan

RULES = ["tables.storage=dynamic", "tables.initializer.bound=0.01"]


def cells(out, name):
    (line,) = (line for line in out.splitlines() if line.split()[:1] == [name])
    return line.split()[1:]


def test_it_says_what_dynamic_tables_take(run):
    out = run("--ranks", 4, *RULES, "tables.dynamic.capacity=800", "tables.dynamic.spare_frames=50", "tables.dim=4")
    assert max(map(len, out.splitlines())) <= 200
    assert "all tables are dynamic tables: there is nothing to place, and no plan to write" in out
    capacity, seen, memory, unit = cells(out, "C1")[:4]
    assert (capacity, seen) == ("800", "706")
    # One shard of 800 ids is on one rank: rows of 16 bytes, 4 of the optimizer, 40 of the index.
    assert (memory, unit) == ("48", "kB")
    more = run("--ranks", 4, *RULES, "tables.dynamic.capacity=400", "tables.dynamic.shards=4")
    assert "C1: the data have 706 ids, and the table holds 400; others are evicted" in more


def test_look_ups_are_those_of_cyclic_rows(run):
    out = run("--ranks", 4, *RULES, "tables.dynamic.capacity=800")
    rows = run("--ranks", 4, "--strategy", "cyclic")
    (line,) = (line for line in rows.splitlines() if line.startswith(" → cyclic"))
    of_all = sum(float(line.split()[-3]) for line in out.splitlines() if line[1:2] == "C" and "kB" in line)
    expected = float(line.split("(")[1].split()[-1])
    assert of_all == pytest.approx(expected, abs=8)


def test_other_tables_are_placed_beside_them(run, config_file, tmp_path):
    options = ["tables.C1.storage=dynamic", "tables.C1.dynamic.capacity=800", "tables.C1.initializer.bound=0.01"]
    out = run("--ranks", 4, *options, "--out", tmp_path / "plan.json")
    assert "Dynamic tables are not placed" in out
    placed = [table.name for table in Prepared.open(config_file.parent / "prepared").tables if table.name != "C1"]
    assert [table.shape.name for table in Plan.load(tmp_path / "plan.json").tables] == placed
    assert "M = 1" in run("--ranks", 4, "--replicas", "1,2", *options)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--memory", "10KB"], "does not hold the 259,200 bytes that dynamic tables take on a rank"),
        (["data.source=raw", "data.raw_schema=criteo"], "plans are made by the counts of prepared data"),
    ],
)
def test_what_cannot_be_planned_is_refused(run, options, message):
    assert message in run("--ranks", 4, *RULES, "tables.dynamic.capacity=800", *options, status=2)
