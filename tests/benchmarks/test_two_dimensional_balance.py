"""Imbalance falls with the number of replicas, and the command says so; nothing here is timed."""

import json

import pytest

from benchmarks import two_dimensional
from benchmarks.shapes import draw
from benchmarks.two_dimensional_balance import SKEWED, costs, multiplied


@pytest.mark.parametrize("strategy", SKEWED)
@pytest.mark.parametrize("deduplicated", [True, False])
def test_imbalance_of_skewed_plans_falls_with_replicas(strategy, deduplicated):
    profile = multiplied(draw("kaggle", scale=0.001).counted, 2)
    found = [cost.imbalance for cost in costs(profile, 32, strategy, [1, 2, 4, 8], deduplicated=deduplicated).values()]
    assert found == sorted(found, reverse=True)
    assert found[0] > 2
    assert found[-1] < found[0] / 1.5


def test_cyclic_rows_are_even_with_and_without_replicas():
    profile = draw("kaggle", scale=0.001).counted
    for cost in costs(profile, 16, "cyclic", [1, 2, 4], deduplicated=True).values():
        assert cost.imbalance < 1.05


def test_tables_are_multiplied_with_bags_of_their_own():
    profile = draw("kaggle", scale=0.001).counted
    more = multiplied(profile, 3)
    assert len({table.name for table in more.tables}) == len(more.tables) == 78
    bags = [table.total_accesses / more.num_samples for table in more.tables]
    assert min(bags) == pytest.approx(1, rel=0.05)
    assert max(bags) > 4


@pytest.mark.slow
def test_every_strategy_and_number_is_reported(capsys, tmp_path):
    output = tmp_path / "lines.jsonl"
    two_dimensional.main(
        ["--balance", "--quick", "--balance-ranks", "8", "--balance-replicas", "1,4", "--output", str(output)]
    )
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert output.read_text().count("\n") == len(lines) + 1 == 2 * 2 * 5 * 2 + 1
    assert all(line["imbalance"] >= 1 and line["lookups_max"] >= line["lookups_mean"] for line in lines)
    assert {line["paper"]["CTR model"] for line in lines} == {5.70, 1.57}
    assert len(last["summary"]) == 2 * 2 * 5


def test_nothing_asked_for_is_a_mistake(capsys):
    with pytest.raises(SystemExit):
        two_dimensional.main([])
    assert "give --balance" in capsys.readouterr().err
