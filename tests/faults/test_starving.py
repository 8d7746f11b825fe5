"""Ranks that come late, and machines on which ranks outnumber the cores: who waits is told, and all can begin again."""

import re

import pytest

from tests.support import starving
from tests.support.ranks import RankPool
from tests.support.scenario import Scenario
from tests.support.tables import table

TABLES = (table("user", 60, 3, "adam"), table("item", 200, 16, "row_wise_adagrad"))
TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def pool():
    """Of its own: a rank is held longer than others wait."""
    ranks = RankPool(mesh_timeout_s=60.0)
    yield ranks
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_after_a_rank_came_too_late_the_next_pipeline_runs(pool, tmp_path, world_size, overlap):
    """On the same mesh, in new tables; the old ones were left within a step, and say so."""
    options = {"depth": 1, "micro_batches": 1, "overlap": overlap}
    scenario = Scenario(tables=TABLES, batch_sizes=(4,) * world_size, num_steps=4, pipeline=options)
    found = pool.run(starving.begin_again, scenario, tmp_path, TIMEOUT_S, world_size=world_size)
    for rank, (first, second, threads, is_same) in enumerate(found):
        who = (
            r"rank 0 \(process \d+, alive\).* gave up waiting"
            if rank == starving.LATE
            else "waited in vain for rank 1 "
        )
        assert re.search(rf"rank {rank}( in stage 'update' of batch 1: rank {rank})?: {who}", first), first
        assert "make their EmbeddingCollection anew and load a checkpoint" in second, second
        assert threads == []
        assert is_same
