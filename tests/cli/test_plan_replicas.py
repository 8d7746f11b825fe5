"""`rowmesh plan --replicas`."""

import re

import pytest

from rowmesh.placement import Plan


def test_each_number_and_arrangement_is_a_line_and_the_plan_is_written(run, tmp_path):
    files = [tmp_path / "plan.json", tmp_path / "report.html"]
    out = run("--topology", "2x4", "--replicas", "1,2,4", "--out", files[0], "--report", files[1])
    found = re.findall(r"^ (→|  )? *(1|2|4) +all ", out, re.MULTILINE)
    assert [count for _, count in found] == ["1", "2", "2", "4", "4"]
    assert len(re.findall("→", out)) == 1
    assert "memory    40 GB a rank" in out
    assert "replicas  synchronised in every step (exact)" in out
    plan = Plan.load(files[0])
    assert plan.notes["why"] in out
    assert plan.notes["why"] in files[1].read_text()
    assert plan.world_size == 8
    assert all(f"wrote {file}" in out for file in files)
    assert max(map(len, out.splitlines())) <= max(160, len(plan.notes["why"]))


def test_messages_in_bfloat16_make_rows_cheaper_and_not_sums(run):
    asked = ("--topology", "2x4", "--replicas", "1,2")
    whole, narrow = (run(*asked, *more) for more in ((), ("parallel.wire_dtype=bfloat16",)))
    lines = [
        [line for line in out.splitlines() if re.match(r"^ (→|  )? *(1|2) +all ", line)] for out in (whole, narrow)
    ]
    assert lines[0] != lines[1]
    assert "values and gradients travel as bfloat16" in narrow


def test_a_number_alone_is_taken(run, tmp_path):
    out = run(
        "--ranks",
        4,
        "--replicas",
        2,
        "--synchronization",
        "average",
        "--sync-every",
        8,
        "--strategy",
        "cyclic",
        "--out",
        tmp_path / "plan.json",
    )
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.replica_counts == (2,)
    assert plan.strategy == "cyclic"
    assert "synchronised every 8 steps; a step pays 1 / 8 of it (average)" in out
    assert "nothing limits a rank's memory" in out
    assert re.search(r"^ C1 +\d+ +2 ", out, re.MULTILINE)


def test_explain_speaks_of_a_group(run):
    table = run("--ranks", 4, "--replicas", 2, "--explain", "C1")
    assert "C1 has 2 replicas, each on a group of 2 ranks: [0, 1], [2, 3]" in table
    assert re.search(r"^C1: .* slots", table, re.MULTILINE)
    row = run("--ranks", 4, "--replicas", 2, "--explain", "C1:3")
    assert re.search(r"^  why      \S", row, re.MULTILINE)
    assert "has 1 replicas" not in run("--ranks", 4, "--replicas", 1, "--explain", "C1:3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--synchronization", "exact"], "--synchronization is for replicas: give --replicas auto"),
        (["--sync-every", 2], "--sync-every is for replicas"),
        (["--replicas", "many"], "--replicas: 'many' is no number of replicas; write auto, 4 or 1,2,4"),
        (["--replicas", "3"], "4 ranks cannot form 3 replica groups of equal size; the number of replicas can be 1, 2"),
        (["--replicas", "2", "--sync-every", 3], "exact synchronization is sparse and of every step"),
        (["--replicas", "2", "--sync-every", 0], "every 1 or more steps, not every 0"),
        (["--replicas", "2", "--explain", "C9"], "the plan has no table 'C9'"),
        (["--replicas", "2", "--explain", "C1:99999"], "no row 99999"),
        (["--replicas", "4", "--memory", "10kB"], "One of these would make it fit: use "),
        (["--replicas", "auto", "--memory", "1kB"], "One of these would make it fit: use "),
    ],
)
def test_mistakes_are_one_message(run, options, message):
    text = run("--ranks", 4, *options, status=2)
    assert message in text
    assert text.count("\n") == 1
