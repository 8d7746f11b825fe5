"""Roll call: waiting ranks, as they recorded it."""

import torch.distributed as dist

from rowmesh.mesh import roll_call
from rowmesh.mesh.roll_call import RollCall
from tests.support.threads import in_threads


class Group:
    group_name = "g"


def test_answers(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(roll_call, "_get_default_store", lambda: store)
    calls = [RollCall(rank, 3, Group()) for rank in range(3)]
    assert calls[0].absent() == [0, 1, 2]
    calls[0].answer()
    calls[2].answer()
    assert [call.absent() for call in calls] == [[1]] * 3
    calls[2].withdraw()
    calls[1].withdraw()  # it never answered
    assert calls[0].absent() == [1, 2]


def test_nobody_knows_where_the_store_is_gone(monkeypatch):
    def fail():
        raise RuntimeError("connection reset")

    assert RollCall(0, 1, None).absent() is None
    monkeypatch.setattr(roll_call, "_get_default_store", fail)
    call = RollCall(0, 2, Group())
    call.answer()
    assert call.absent() is None


def test_a_rank_waits_as_long_as_any_of_its_threads(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(roll_call, "_get_default_store", lambda: store)
    group = Group()
    group.group_name = "threads"
    calls = [RollCall(0, 2, group) for _ in range(2)]
    calls[0].answer()
    calls[1].answer()
    calls[0].withdraw()
    assert calls[0].absent() == [1], "the other thread waits"
    calls[1].withdraw()
    assert calls[0].absent() == [0, 1]


def test_answers_of_many_threads(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(roll_call, "_get_default_store", lambda: store)
    group = Group()
    group.group_name = "many"

    def wait(_):
        call = RollCall(0, 1, group)
        for _ in range(50):
            call.answer()
            assert call.absent() == []
            call.withdraw()

    in_threads(wait, 4)
    assert RollCall(0, 1, group).absent() == [0]
