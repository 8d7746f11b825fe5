"""A hunt for races: whichever rank is slow, the model is the same, and a step that is left out is found."""

import re
from dataclasses import replace

import pytest

from tests.support import pipelines
from tests.support.plans import in_groups, with_copies
from tests.support.ranks import RankPool
from tests.support.scenario import Scenario
from tests.support.tables import table

TABLES = (
    table("user", 60, 3, "adam", features=("user", "friend")),
    table("item", 200, 16, "row_wise_adagrad"),
    table("word", 20, 16, "adagrad", pooling="none"),
)
JOB = Scenario(tables=TABLES, batch_sizes=(9, 7), num_steps=4, decay=0.9, pipeline={"micro_batches": 3})
JOBS = {
    "collective": JOB,
    "one_sided": JOB,
    "hot rows": replace(JOB, sharing="hot"),
    "naive": replace(JOB, pipeline=JOB.pipeline | {"exchange": "naive"}),
    "two hosts": replace(JOB, ranks_per_node=1),
    "an empty rank": replace(JOB, batch_sizes=(9, 0)),
    "copied rows": replace(JOB, plan=with_copies(TABLES, world_size=2)),
}


@pytest.fixture(scope="module")
def pool():
    """Processes of its own, in which memory may be poisoned and schedules broken."""
    ranks = RankPool(mesh_timeout_s=8.0)
    yield ranks
    ranks.close()


def hunt(pool, name, seeds, world_size=2):
    scenario, transport = JOBS[name], "one_sided" if name == "one_sided" else "collective"
    if world_size == 4:
        scenario = replace(scenario, batch_sizes=(5, 0, 7, 4))
    assert pool.run(pipelines.hunt, scenario, transport, seeds, world_size=world_size) == [[]] * world_size


@pytest.mark.parametrize("name", JOBS)
def test_whoever_is_slow_changes_no_bit(pool, name):
    hunt(pool, name, range(6))


def test_four_ranks(pool):
    hunt(pool, "collective", range(4), world_size=4)


@pytest.mark.parametrize("mode", ["exact", "average"])
def test_two_groups_of_ranks(pool, mode):
    scenario = in_groups(replace(JOB, batch_sizes=(5, 3, 7, 4)), 2, mode=mode)
    assert pool.run(pipelines.hunt, scenario, "collective", range(8), world_size=4) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_hundreds_of_schedules(pool, name):
    hunt(pool, name, range(1000, 1300))


@pytest.mark.slow
def test_hundreds_of_schedules_on_four_ranks(pool):
    hunt(pool, "collective", range(1000, 1150), world_size=4)


# What is broken is found

BROKEN = replace(JOB, sharing="hot", pipeline=JOB.pipeline | {"depth": 1, "disturb": pipelines.late_updates})


def end_broken(pool, transport, how):
    """What each rank says of a job that is verified."""
    scenario = replace(BROKEN, pipeline=BROKEN.pipeline | {"verify": True})
    try:
        return [message for _, message, *_ in pool.run(pipelines.end, scenario, transport, 8.0, how, world_size=2)]
    finally:
        pool.close()  # messages that are not waited for are under way


@pytest.mark.parametrize("how", ["forwarding", "waiting"])
def test_rows_that_are_read_too_early_are_named(pool, how):
    found = end_broken(pool, "collective", how)
    stage = {"forwarding": "final", "waiting": "rows"}[how]
    pattern = (
        rf"rank \d in stage '{stage}' of batch \d+: row \d+ of table '(user|item|word)' was read as batch -?\d+ left "
        r"it, and batch \d+ changes it after that \(\d+ such rows of \d+\)"
    )
    assert any(re.fullmatch(pattern, message) for message in found), found
    assert all(found), "no rank goes on"


@pytest.mark.parametrize("how", ["forwarding", "waiting"])
def test_rows_that_are_read_too_early_train_another_model(pool, how):
    """So the check finds what matters."""
    found = pool.run(pipelines.train_broken, BROKEN, "collective", how, world_size=2)
    assert found == [False] * 2


def test_rows_that_travel_whole_are_checked_too(pool):
    found = end_broken(pool, "one_sided", "waiting")
    pattern = r"rank \d in stage 'rows' of batch (\d+): rows of batch \1 would be read after the update of batch -?\d+"
    assert any(re.fullmatch(pattern, message) for message in found), found
