"""The command `rowmesh plan`."""

import re

import pytest

from rowmesh.data import Prepared
from rowmesh.data.profile import profile_prepared
from rowmesh.placement import Plan, TableShape
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import QUICK
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.summary import plan_levels
from rowmesh.placement.topology import Topology
from tests.support.commands import run_on


def test_it_prints_strategies_ranks_and_levels(run, config_file):
    out = run("--topology", "2x4", "--mode", "infer")
    assert max(map(len, out.splitlines())) <= 200
    for name in QUICK:
        assert re.search(rf"^ *(→ )? *{name} ", out, re.MULTILINE)
    assert len(re.findall("→", out)) == 1
    assert "tables    clicks: 3 tables" in out
    assert "counts of 20,000 samples" in out
    assert "ranks     8 = 2 × 4 (2x4); Two nodes of 4 A100 (40 GB)" in out
    assert "step      100 samples a rank, infer; minimized: the sum over links" in out
    assert re.search(r"^\w+: a step costs [\d.]+ .s summed over links, [\d.]+ % less than", out, re.MULTILINE)
    assert [line.split()[0] for line in out.splitlines() if re.match(r" [0-7] ", line)] == list("01234567")
    assert re.search(r"^ C1 +\d+ .* %", out, re.MULTILINE)


def test_the_numbers_are_those_of_the_cost_model(run, config_file, tmp_path):
    out = run("--ranks", 4, "--strategy", "row_wise", "--out", tmp_path / "plan.json")
    prepared = Prepared.open(config_file.parent / "prepared")
    shapes = [TableShape(table.name, table.num_rows, 64, 64, 4) for table in prepared.tables]
    problem = Problem(profile_prepared(prepared, shapes), Topology.uniform(4), Request(batch_size=200))
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.strategy == "row_wise"
    assert [table.shape for table in plan.tables] == shapes
    cost = problem.cost(plan)
    line = next(line for line in out.splitlines() if line.startswith(" → row_wise"))
    assert f"({cost.memory_balance:.3f})" in line
    assert f"{cost.lookups.max():,.0f} ({cost.lookup_balance:.3f})" in line


def test_many_ranks_are_summed_up(run):
    out = run("--topology", "16x8", "--strategy", "cyclic")
    assert re.search(r"^ least .*\n most ", out, re.MULTILINE)
    assert not re.search(r"^ 17 ", out, re.MULTILINE)


def test_files_are_written_and_read_back(run, tmp_path):
    files = [tmp_path / name for name in ("plan.json", "report.html", "links.toml")]
    ranks = ("--ranks", 4, "--ranks-per-node", 2)
    out = run(*ranks, "--out", files[0], "--report", files[1], "--topology-out", files[2])
    assert all(f"wrote {file}" in out for file in files)
    plan = Plan.load(files[0])
    assert Plan.from_json(plan.to_json()) == plan
    assert (plan.world_size, plan.ranks_per_node) == (4, 2)
    assert plan.notes["why"] in out
    assert plan.notes["why"] in files[1].read_text()
    again = run("--topology", files[2], "--out", tmp_path / "again.json")
    assert "4 = 2 × 2" in again
    assert Plan.load(tmp_path / "again.json").tables == plan.tables


def test_explain_is_all_that_is_printed(run):
    table = run("--ranks", 4, "--explain", "C1")
    assert re.search(r"^C1: .* slots", table, re.MULTILINE)
    assert "busiest link" not in table
    row = run("--ranks", 4, "--explain", "C1:3")
    assert re.search(r"^  why      \S", row, re.MULTILINE)
    assert "owner: rank" in row


def test_what_the_configuration_says_is_the_default(run, config_file, tmp_path):
    out = run("placement.topology=2x4", "placement.strategy=row_wise", "placement.objective=slowest_link")
    assert "minimized: the slowest link" in out
    assert " → row_wise" in out
    path = tmp_path / "plan.json"
    run("placement.topology=2x4", "--ranks", 2, "--strategy", "cyclic", "--out", path, "tables.dim=8")
    plan = Plan.load(path)
    assert (plan.world_size, plan.strategy, plan.tables[0].shape.value_bytes) == (2, "cyclic", 32)


def test_dear_fetches_make_copies_in_training(run, tmp_path):
    path = tmp_path / "plan.json"
    asked = ["placement.fetch_weight=3.0", "placement.strategy=cyclic", "--ranks", 2, "--out", path]
    run(*asked)
    assert plan_levels(Plan.load(path))["hot"] > 0
    assert "copied to every rank, get" in Plan.load(path).notes["copies"]
    run(*asked, "--fetch-weight", 1)
    assert plan_levels(Plan.load(path))["hot"] == 0
    assert "copies" not in Plan.load(path).notes
    run("placement.fetch_weight=3.0", "--mode", "infer", "--ranks", 2, "--out", path)
    weighted = Plan.load(path)
    run("--mode", "infer", "--ranks", 2, "--out", path)
    assert Plan.load(path).notes == weighted.notes  # without gradients there is nothing to weigh


def test_memory_is_kept(run, tmp_path):
    plain = run("--ranks", 4, "--mode", "infer", "--extra-memory", 0)
    assert " 0 B of them for copies" in plain
    run("--ranks", 4, "--mode", "infer", "--memory", "30 kB", "--out", tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert 20_000 < max(plan.memory_bytes) <= 30_000


def test_batches_that_hold_a_row_are_counted(run):
    assert "samples in batches of" in run("--ranks", 2, "--count-batches", "--strategy", "cyclic")


def test_an_infeasible_request_says_what_would_fit(run, tmp_path):
    message = run("--ranks", 2, "--memory", "10kB", "--out", tmp_path / "plan.json", status=2)
    assert re.search(
        r"needs [\d,]+ bytes a rank, [\d,]+ more than the limit of 10,000; the biggest table is 'C1'", message
    )
    assert re.search(r"One of these would make it fit: use \d+ ranks; .* allow [\d,]+ bytes a rank", message)
    assert list(tmp_path.iterdir()) == []


def test_a_strategy_whose_plan_is_too_big_is_refused(run, tmp_path):
    message = run("--ranks", 2, "--strategy", "table_wise", "--out", tmp_path / "plan.json", status=2)
    assert re.search(r"rank 0 would hold [\d,]+ bytes .* more than the limit", message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "for which ranks? Give --ranks 8 (and --ranks-per-node 4), --topology with one of 16x8"),
        (["--ranks", 2, "--topology", "2x4"], "--ranks and --topology each say which ranks there are"),
        (["--measure"], "start it with torchrun"),
        (["--topology", "2x4", "--ranks-per-node", 2], "leave out --ranks-per-node"),
        (["--ranks", 6, "--ranks-per-node", 4], "--ranks 6 do not make nodes of --ranks-per-node 4"),
        (["--ranks", 0], "--ranks 0: there is no such number of ranks; give 1 or more"),
        (["--ranks", 4, "--ranks-per-node", 0], "--ranks-per-node 0: there is no such number of ranks"),
        (["--topology", "3x3"], "no topology '3x3': give one of 16x8"),
        (["--ranks", 2, "--memory", "lots"], "--memory: 'lots' is no size"),
        (["--ranks", 2, "--memory", "1GB", "--extra-memory", 0.1], "give one of them"),
        (["--ranks", 2, "--strategy", "deal"], "no placement strategy 'deal'; there are auto, cyclic"),
        (["--ranks", 2, "--explain", "C9"], "the plan has no table 'C9'"),
        (["--ranks", 2, "--explain", "C2:40000"], "no row 40000"),
        (["--ranks", 2, "--fetch-weight", 0], "a placement's fetch_weight is 0.0, but must be above 0"),
        (["--ranks", 2, "placement.extra_memory=-1"], "placement.extra_memory: "),
        (["--ranks", 2, "data.folder=/nowhere"], "/nowhere holds no prepared data set"),
    ],
)
def test_mistakes_are_one_message(run, options, message):
    text = run(*options, status=2)
    assert message in text
    assert text.count("\n") == 1


def test_messages_in_bfloat16_are_known_to_the_plan(run):
    """Values and gradients are half as wide, where they travel in messages: not between the ranks of one host."""
    asked = ["--ranks", 4, "--strategy", "row_wise"]
    narrow = "parallel.wire_dtype=bfloat16"
    apart = [run(*asked, "--ranks-per-node", 2, *more) for more in ((), (narrow,))]
    costs = [re.findall(r"^row_wise, as asked for: a step costs ([\d.]+) ([kM]B) ", out, re.MULTILINE) for out in apart]
    ((whole, unit),), ((less, _),) = costs
    assert unit == "kB"
    assert float(less) / float(whole) == pytest.approx((4 + 32 + 32) / (4 + 64 + 64), rel=0.01)
    assert "; values and gradients travel as bfloat16" in apart[1]
    assert run(*asked, narrow) == run(*asked)
    assert "travel as bfloat16" in run(*asked, narrow, "parallel.transport=collective")


def test_links_are_measured_on_the_running_mesh(config_file, ranks, tmp_path):
    files = ["--out", str(tmp_path / "plan.json"), "--topology-out", str(tmp_path / "links.toml")]
    done = run_on(ranks, ["plan", str(config_file), "--measure", "--strategy", "cyclic", *files], ranks=2)
    assert done.status == 0, done.err
    assert done.out.count("a step costs") == 1
    assert "measured on 2 ranks" in done.out
    assert "one-sided reads" in Topology.load(tmp_path / "links.toml").source  # as training on one host does
    assert Topology.load(tmp_path / "links.toml").world_size == Plan.load(tmp_path / "plan.json").world_size == 2
