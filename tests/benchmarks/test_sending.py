"""Contestants by what tables send."""

import numpy as np
import pytest

from benchmarks.command import parse
from benchmarks.sending import counted_profile, ours
from benchmarks.workload import Workload, make_batches

WORKLOAD = Workload(
    max_rows=300,
    global_batch=32,
    steps=3,
    warmup=0,
    num_embeddings_per_feature=(200, 10_000, 5),
    multi_hot_sizes=(40, 1, 2),
)


def test_all_batches_of_all_ranks_are_counted():
    profile = counted_profile(WORKLOAD, num_ranks=2)
    assert [table.total_accesses / (3 * 32) for table in profile.tables] == [40, 1, 2]
    for number, table in enumerate(profile.tables):
        assert table.is_falling
        distinct = [
            len(np.unique(part.bags[number])) for rank in range(2) for part in make_batches(WORKLOAD, rank, 2, 3)
        ]
        assert profile.uniques(number, 16)[-1] * 6 == pytest.approx(sum(distinct), rel=0.01)


def test_there_is_a_contestant_for_each_value():
    options = parse("", ["--quick"], send="rows,sums")
    made = ours(options, WORKLOAD, None, "module", precision="float32")
    assert {name: settings for name, (_, settings) in made.items()} == {
        "rowmesh one_sided": {"transport": "one_sided", "precision": "float32"},
        "rowmesh collective": {"transport": "collective", "precision": "float32"},
        "rowmesh collective, sums": {"transport": "collective", "sums": [0, 1, 2], "precision": "float32"},
    }
    with pytest.raises(SystemExit, match="--send both: there are rows, sums, auto"):
        ours(parse("", ["--send", "both"], send="rows"), WORKLOAD, None, "module")
