"""The pool of ranks itself: what it returns, and that nothing it runs can hang or stay behind."""

import os
import re
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, RankPool, is_running


def sum_of_ranks(mesh, offset):
    total = torch.tensor([mesh.rank + offset])
    dist.all_reduce(total, group=mesh.group)
    return mesh.rank, int(total)


def fail_on_one(mesh):
    if mesh.rank == 1:
        raise ValueError("this rank has had enough")
    time.sleep(600)


def end(mesh):
    if mesh.rank == 0:
        os._exit(7)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_groups_of_every_size(ranks, world_size):
    expected = sum(range(10, 10 + world_size))
    assert ranks.run(sum_of_ranks, 10, world_size=world_size) == [(rank, expected) for rank in range(world_size)]


def test_failures_name_the_rank_and_leave_nothing():
    pool = RankPool(world_size=2)
    try:
        with pytest.raises(RankError, match=r"(?s)rank 0 failed.*still running.*rank 1.*has had enough"):
            pool.run(fail_on_one)
        assert pool.pids == []
        assert pool.run(sum_of_ranks, 0) == [(0, 1), (1, 1)]  # fresh processes
        pids = pool.pids
        with pytest.raises(RankError, match=re.escape("rank 0 failed:\nthe process ended (exit code 7)")):
            pool.run(end)
    finally:
        pool.close()
    assert not any(is_running(pid) for pid in pids)


def connect(mesh, partition, use):
    group = mesh.subgroup(partition, use)
    total = torch.tensor([mesh.rank])
    dist.all_reduce(total, group=group)
    return int(total)


def test_groups_that_a_test_of_fewer_ranks_makes_are_no_concern_of_the_next(ranks):
    assert ranks.run(connect, [[0, 1, 2]], "of three", world_size=3) == [3, 3, 3]
    assert ranks.run(connect, [[1, 0], [3, 2]], "of four", world_size=4) == [1, 1, 5, 5]
