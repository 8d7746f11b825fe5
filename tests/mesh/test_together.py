import os

import pytest

from rowmesh.errors import DataError
from rowmesh.mesh import Mesh
from rowmesh.mesh.together import on_rank_0


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
    assert on_rank_0(Mesh(), "testing", lambda: 3) == 3
