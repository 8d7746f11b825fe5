"""Equations (1) to (3), by hand on the set-up of Fig. 2."""

import numpy as np
import pytest

from rowmesh.placement import equations

# Three tables on two GPUs that have room for 7 embeddings each; an embedding is one unit, links and look-ups cost 1,
# and both GPUs read each embedding A times: 4 rows of table 0, 3 of table 1, 5 of table 2. The paper's text does not
# print the numbers of the drawing; these are ours, of its shape: every table has a hot head.
A = np.array([9, 3, 2, 1, 8, 2, 1, 6, 2, 1, 1, 0])
S = np.ones(12)
L = np.ones((2, 2))
ON_0, ON_1, COPY = (0, 0), (1, 1), (0, 1)

# From where GPU 0 and GPU 1 fetch each embedding; memory, look-ups and communication, added up by hand.
CASES = {
    # Tables 0 and 1 (15 + 11 accesses) on GPU 0, table 2 (10) on GPU 1.
    "(a) table-wise": ([ON_0] * 7 + [ON_1] * 5, [7, 5], [52, 20], [[26, 10], [26, 10]]),
    # The first half of each table (12 + 10 + 9) on GPU 0, the second (3 + 1 + 1) on GPU 1.
    "(b) row-wise": (
        [ON_0] * 2 + [ON_1] * 2 + [ON_0] * 2 + [ON_1] + [ON_0] * 3 + [ON_1] * 2,
        [7, 5],
        [62, 10],
        [[31, 5], [31, 5]],
    ),
    # 9 + 1 + 2 + 6 + 0 against 3 + 2 + 8 + 1 + 2 + 1 + 1.
    "(c) by embedding": (
        [ON_0, ON_1, ON_1, ON_0, ON_1, ON_0, ON_1, ON_0, ON_1, ON_1, ON_1, ON_0],
        [5, 7],
        [36, 36],
        [[18, 18], [18, 18]],
    ),
    # The two hottest (9 + 8) on both; of the others 1 + 2 + 6 + 1 + 0 on GPU 0 and 3 + 2 + 1 + 2 + 1 on GPU 1.
    "(d) with copies": (
        [COPY, ON_1, ON_1, ON_0, COPY, ON_0, ON_1, ON_0, ON_1, ON_1, ON_0, ON_0],
        [7, 7],
        [37, 35],
        [[27, 9], [10, 26]],
    ),
}


def literally(paths, sizes, accesses, costs):
    """The printed sums, one term at a time (with L[i][j] in the third)."""
    N, M = np.shape(paths)
    P = [[[int(paths[k][i] == j) for j in range(M)] for i in range(M)] for k in range(N)]
    stored = [sum(sizes[k] * (sum(P[k][i][j] for i in range(M)) > 0) for k in range(N)) for j in range(M)]
    looked_up = [
        sum(sizes[k] * accesses[k] * sum(P[k][i][j] for i in range(M)) for k in range(N)) * costs[j][j]
        for j in range(M)
    ]
    moved = [
        [sum(sizes[k] * accesses[k] * P[k][i][j] for k in range(N)) * costs[i][j] for j in range(M)] for i in range(M)
    ]
    return stored, looked_up, moved


@pytest.mark.parametrize("case", CASES)
def test_figure_2(case):
    paths, stored, looked_up, moved = CASES[case]
    P = equations.path_matrices(np.array(paths))
    assert equations.memory(P, S).tolist() == stored
    assert equations.lookup_workload(P, S, A, L).tolist() == looked_up
    assert equations.communication(P, S, A, L).tolist() == moved


def test_any_paths_agree_with_the_printed_sums():
    rng = np.random.default_rng(0)
    M, N = 4, 1500
    paths, sizes = rng.integers(0, M, (N, M)), rng.integers(1, 9, N)
    accesses, costs = rng.integers(0, 50, N), rng.random((M, M))
    P = equations.path_matrices(paths)
    expected = literally(paths, sizes, accesses, costs)
    found = (
        equations.memory(P, sizes),
        equations.lookup_workload(P, sizes, accesses, costs),
        equations.communication(P, sizes, accesses, costs),
    )
    in_parts = equations.evaluate(paths, sizes, sizes * accesses, costs)
    for one, two, three in zip(expected, found, in_parts, strict=True):
        np.testing.assert_allclose(two, one)
        np.testing.assert_allclose(three, one)
