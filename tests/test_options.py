"""Pairs and triples of options: `python -m tests.options` draws as many as one likes."""

from itertools import combinations
from typing import Any

import pytest

from tests.options import PAIRS, Refusal, drawn, run_case

PIPELINE = {"depth": 2, "micro_batches": 1}
PLAN = {"rules": ["replicated", "node", "fixed"], "shift": 1, "hops": True, "hosts": 1}
QUICK = [
    {"pipeline": PIPELINE, "evaluate": True, "checkpoint": 3},
    {"transport": "one_sided", "plan": PLAN, "optimizer": "adam"},
    {"storage": {"kind": "dynamic", "tables": ["user", "item"], "rules": {"admit_after": 2}}, "replicas": 2},
    {"storage": {"kind": "demoting", "tables": ["item"]}, "break": [2]},
    {"pipeline": {**PIPELINE, "micro_batches": 3}, "pooling": "mixed", "weights": "given"},
]
BLOCK = 10


@pytest.mark.parametrize("options", QUICK, ids=" and ".join)
def test_a_few(ranks, options):
    line = run_case(ranks, options, 1)
    assert (line["outcome"], line["problem"]) == ("equal to the bit", "")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, BLOCK))
def test_two_hundred(ranks, first):
    lines = [run_case(ranks, drawn(0, number), number) for number in range(first, first + BLOCK)]
    assert [line for line in lines if line["problem"]] == []
    assert sum(line["outcome"] == "refused" for line in lines) < BLOCK // 2


def test_every_pair_is_among_the_first_two_hundred():
    for seed in range(3):
        found = {pair for number in range(200) for pair in combinations(drawn(seed, number), 2)}
        assert found == set(PAIRS)


class Ranks:
    """In place of ranks: they all say the same."""

    def __init__(self, *told: Any) -> None:
        self._told = list(told)

    def run(self, *args: Any, **options: Any) -> list[Any]:
        return self._told


@pytest.mark.parametrize(
    "told, problem",
    [
        ([Refusal("ConfigurationError", "no PIPELINE here")] * 2, ""),
        ([Refusal("ConfigurationError", "no such thing")] * 2, "names none of the options"),
        ([Refusal("DataError", "a pipeline"), Refusal("RowmeshError", "a pipeline")], "different errors"),
        ([Refusal("DataError", "a pipeline"), None], "others trained"),
    ],
)
def test_refusals_name_an_option_on_every_rank(told, problem):
    line: Any = run_case(Ranks(*told), {"pipeline": PIPELINE, "frozen": ["user"]}, 1)  # type: ignore[arg-type]
    assert problem in line["problem"]
    assert line["outcome"] == ("failed" if problem else "refused")
