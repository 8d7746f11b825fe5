"""Every way to keep copies equal gives the same sums; nothing here is timed."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.contestant import ContestantError
from benchmarks.ranks.sparse_all_reduce import VARIANTS, Commands, touched_rows
from benchmarks.sparse_all_reduce import OURS, PEERS, cases, check
from benchmarks.workload import Workload

WORKLOAD = Workload(dim=16, steps=1, warmup=1)
NUM_ROWS = 300


def run_cases(mesh, hosts):
    """The answers of a rank to each case, and the bytes of its variants."""
    commands = Commands(WORKLOAD, replace(mesh, hosts=hosts), NUM_ROWS)
    answers = []
    for share, overlap in ((0.1, "independent"), (0.2, "same"), (0.25, "disjoint"), (1.0, "same")):
        drawn = commands.draw(share, overlap)
        answers.append((drawn, commands.check(), commands.count()))
    return answers


@pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 0, 0), (0, 0, 1, 1), (0, 1)])
def test_all_variants_agree(ranks, hosts):
    world_size = len(hosts)
    of_ranks = ranks.run(run_cases, hosts, world_size=world_size)
    for number in range(len(of_ranks[0])):
        drawn, _, sent = of_ranks[0][number]
        errors = check([answers[number][1] for answers in of_ranks])
        assert set(errors) == {OURS, *PEERS} == set(VARIANTS)
        rows = drawn["touched_rows"]
        assert sent["dense"] == 2 * (world_size - 1) / world_size * NUM_ROWS * 64
        assert sent["all_gather"] == (world_size - 1) * (8 + rows * 68)
        assert rows <= drawn["union_rows"] <= min(world_size * rows, NUM_ROWS)


def test_wrong_sums_and_unequal_copies_are_refused():
    good = {name: {"error": 1e-8, "digest": "a"} for name in (OURS, *PEERS)}
    assert check([good, good])[OURS] == 1e-8
    with pytest.raises(ContestantError, match="sums are wrong by more than 1e-06"):
        check([good, good | {"dense": {"error": 2e-6, "digest": "a"}}])
    with pytest.raises(ContestantError, match="copies differ between ranks"):
        check([good, good | {OURS: {"error": 1e-8, "digest": "b"}}])


def test_overlaps_are_what_they_are_called():
    def of_ranks(share, overlap):
        return [set(touched_rows(100, share, overlap, 4, r, np.random.default_rng(1)).tolist()) for r in range(4)]

    assert all(part == of_ranks(0.2, "same")[0] for part in of_ranks(0.2, "same"))
    assert len(set().union(*of_ranks(0.25, "disjoint"))) == 100
    assert 20 < len(set().union(*of_ranks(0.2, "independent"))) < 80
    assert all(len(part) == 20 for part in of_ranks(0.2, "independent"))


def test_disjoint_rows_must_be_enough():
    assert (0.5, "disjoint") in cases(2, quick=False)
    assert (0.5, "disjoint") not in cases(4, quick=False)
    assert (1.0, "same") in cases(4, quick=False)
