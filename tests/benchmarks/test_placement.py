"""What `placement` promises about the default strategy, on the smallest shape; search times are not tested."""

import json
import re

import pytest

from benchmarks import placement


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    output = tmp_path_factory.mktemp("placement") / "lines.jsonl"
    asked_for = ["--table", "2", "--figure", "10", "--topology", "2x4"]
    placement.main([*asked_for, "--shape", "avazu", "--quick", "--output", str(output)])
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("promise", "least", "most", "count"),
    [
        ("table2 avazu raw: cyclic, no copies over 1 %", 10, 100, 1),
        ("worst of cyclic over partitioned by (true|counted) accesses", 0, 1 + 1e-5, 4),
        ("cyclic's balance of (memory|lookup|link) over the best", 0.99, 1, 6),
        ("cyclic's busiest link over the best", 0, 1.01, 2),
        ("cyclic over the bound by expected accesses", 1 - 1e-9, 1.01, 2),
        ("cyclic over the best strategy", 0, 1, 3),
        ("slowest link between nodes over slowest within, by expected accesses", 0.99, 1.01, 1),
    ],
)
def test_the_default_strategy_reaches_its_targets(lines, promise, least, most, count):
    reached = {case: ratio for case, ratio in lines[-1]["summary"].items() if re.search(promise, case)}
    assert len(reached) == count
    assert all(least <= ratio <= most for ratio in reached.values()), reached


@pytest.mark.slow
def test_every_strategy_has_a_line_in_every_part(lines):
    for part in ({"table": 2}, {"figure": 10}, {"topology": "2x4"}):
        found = {line["strategy"] for line in lines if part.items() <= line.items() and "strategy" in line}
        assert found >= {"cyclic", "partitioned", "memory_greedy", "access_greedy", "table_wise", "row_wise"}


def test_nothing_asked_for_is_a_mistake(capsys):
    with pytest.raises(SystemExit):
        placement.main([])
    assert "give --table, --figure, --topology, --profile or --traces" in capsys.readouterr().err
