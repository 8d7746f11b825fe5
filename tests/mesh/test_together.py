import os

import pytest

from rowmesh.errors import DataError, StoreError
from rowmesh.mesh import Mesh
from rowmesh.mesh.together import first_failure, on_all_ranks, on_rank_0


def first_pid(mesh):
    return on_rank_0(mesh, "testing", os.getpid), os.getpid()


def fail(mesh, kind):
    def action():
        raise kind("no room")

    try:
        on_rank_0(mesh, "testing", action)
    except kind as error:
        return str(error)
    return None


def test_every_rank_gets_what_rank_0_returned(ranks):
    answers = ranks.run(first_pid, world_size=3)
    assert {answer for answer, _ in answers} == {answers[0][1]}


@pytest.mark.parametrize("kind", [DataError, OSError, MemoryError])
def test_every_rank_fails_as_rank_0_did(ranks, kind):
    assert ranks.run(fail, kind, world_size=3) == ["no room"] * 3


def test_a_single_process_just_does_it():
    assert on_rank_0(Mesh(), "testing", lambda: 3) == on_all_ranks(Mesh(), "testing", lambda: 3) == 3
    with pytest.raises(DataError, match="no label"):
        on_all_ranks(Mesh(), "testing", lambda: raise_error("no label"))


def raise_error(text):
    raise DataError(text)


def fail_on_some(mesh, failing):
    def action():
        if mesh.rank in failing:
            raise (StoreError if mesh.rank == 1 else DataError)(f"rank {mesh.rank}")
        return mesh.rank

    try:
        return on_all_ranks(mesh, "testing", action)
    except (StoreError, DataError) as error:
        return type(error).__name__, str(error)


def test_every_rank_fails_as_the_first_that_failed(ranks):
    assert ranks.run(fail_on_some, [1, 2], world_size=3) == [("StoreError", "rank 1")] * 3
    assert ranks.run(fail_on_some, [2], world_size=3) == [("DataError", "rank 2")] * 3
    assert ranks.run(fail_on_some, [], world_size=3) == [0, 1, 2]


def first_of_all(mesh, failing):
    return first_failure(mesh, ["DataError", f"rank {mesh.rank}"] if mesh.rank in failing else None, "testing")


def test_every_rank_learns_of_the_first_failure(ranks):
    assert first_failure(Mesh(), ["DataError", "no label"], "testing") == ["DataError", "no label"]
    assert ranks.run(first_of_all, [1, 2], world_size=3) == [["DataError", "rank 1"]] * 3
    assert ranks.run(first_of_all, [], world_size=3) == [None] * 3
