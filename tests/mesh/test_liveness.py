"""Liveness: waiting ranks, as they recorded it."""

import torch.distributed as dist

from rowmesh.mesh import liveness
from rowmesh.mesh.liveness import LivenessCheck, forget_store, keep_store
from tests.support.threads import in_threads


class Group:
    group_name = "g"


def test_answers(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(liveness, "_get_default_store", lambda: store)
    calls = [LivenessCheck(rank, range(3), Group()) for rank in range(3)]
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

    assert LivenessCheck(0, range(1), None).absent() is None
    monkeypatch.setattr(liveness, "_get_default_store", fail)
    call = LivenessCheck(0, range(2), Group())
    call.answer()
    assert call.absent() is None


def test_a_rank_waits_as_long_as_any_of_its_threads(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(liveness, "_get_default_store", lambda: store)
    group = Group()
    group.group_name = "threads"
    calls = [LivenessCheck(0, range(2), group) for _ in range(2)]
    calls[0].answer()
    calls[1].answer()
    calls[0].withdraw()
    assert calls[0].absent() == [1], "the other thread waits"
    calls[1].withdraw()
    assert calls[0].absent() == [0, 1]


def test_answers_of_many_threads(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(liveness, "_get_default_store", lambda: store)
    group = Group()
    group.group_name = "many"

    def wait(_):
        call = LivenessCheck(0, range(1), group)
        for _ in range(50):
            call.answer()
            assert call.absent() == []
            call.withdraw()

    in_threads(wait, 4)
    assert LivenessCheck(0, range(1), group).absent() == [0]


class Connectable:
    """Which can be connected to until its process is gone; connecting would then wait for it."""

    def __init__(self, values=None):
        self.values, self.is_gone = {} if values is None else values, False

    def clone(self):
        assert not self.is_gone, "waits for the process"
        return Connectable(self.values)

    def set(self, key, value):
        self.values[key] = value

    def check(self, keys):
        return all(key in self.values for key in keys)


def test_a_store_that_is_gone_is_not_connected_to(monkeypatch):
    store = Connectable()
    monkeypatch.setattr(liveness, "_get_default_store", lambda: store)
    forget_store()
    keep_store()
    store.is_gone = True
    calls = LivenessCheck(1, range(2), object())
    calls.answer()
    assert calls.absent() == [0]
    forget_store()
