"""What `exchange_rounds` counts, on real ranks; nothing here is timed."""

import pytest

from benchmarks.ranks.exchange_rounds import Collections
from benchmarks.ranks.setup import table_specs
from benchmarks.workload import Workload, make_batches

WORKLOAD = Workload(max_rows=50, global_batch=8, steps=2, warmup=0)


def count_two_steps(mesh, sizes):
    """Rounds and bytes of two steps of all tables, split into collections of so many tables."""
    tables = iter(table_specs(WORKLOAD))
    parts = [[next(tables) for _ in range(size)] for size in sizes]
    variant = Collections(parts, make_batches(WORKLOAD, mesh.rank, mesh.world_size, 2), mesh)
    for number in range(2):
        variant.step(number)
    return variant.totals()


@pytest.mark.parametrize(("sizes", "rounds_a_step"), [([26], 5), ([1] * 26, 26 * 5)])
def test_every_round_of_a_step_is_counted(ranks, sizes, rounds_a_step):
    for rounds, num_bytes in ranks.run(count_two_steps, sizes):
        assert rounds == 2 * rounds_a_step
        opening = 8 * (len(sizes) + 2 * 26 + len(sizes))  # which operation, and of every group offsets and accesses
        assert num_bytes > 2 * 2 * opening, "counts, what is pushed, and more"
