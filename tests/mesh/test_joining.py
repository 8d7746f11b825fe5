"""Ranks that came, as they recorded it while they joined."""

import subprocess
import sys

import pytest
import torch.distributed as dist

from rowmesh.errors import PeerError
from rowmesh.mesh import joining
from rowmesh.mesh.joining import Arrivals, host_identity
from rowmesh.mesh.plain import encode


@pytest.fixture
def store():
    return dist.HashStore()


def arrive(store, rank, host, pid):
    store.set(f"rowmesh/arrived/{rank}", encode([host, pid]).decode())


def test_ranks_that_did_not_come(store):
    arrivals = Arrivals(store, 0, 12)
    assert arrivals.missing_text() == (
        f"{', '.join(f'rank {rank}' for rank in range(1, 9))} and 3 more did not come; its own output says why"
    )
    for rank in range(1, 12):
        arrive(store, rank, "elsewhere", 1)
    assert Arrivals(store, 0, 12).missing_text() == ""


def test_a_rank_that_came_and_died(store, monkeypatch):
    monkeypatch.setattr(joining, "CERTAIN_S", 0.0)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    arrive(store, 1, host_identity(), process.pid)
    arrive(store, 2, "elsewhere", process.pid)
    arrivals = Arrivals(store, 0, 3)
    arrivals.check_alive()  # it may just have ended in peace
    with pytest.raises(PeerError, match=rf"rank 0: rank 1 \(process {process.pid}\) died while joining;"):
        arrivals.check_alive()


@pytest.mark.parametrize("text", ["", "3", '["a"]', '["a", "b"]', "{"])
def test_what_is_no_host_and_process_is_refused(store, text):
    store.set("rowmesh/arrived/1", text)
    with pytest.raises(PeerError, match="while joining, rank 1 sent what this rank cannot read"):
        Arrivals(store, 0, 2).missing()


def test_a_store_that_is_gone_ends_nothing():
    class Gone:
        def set(self, key, value):
            pass

        def check(self, keys):
            raise RuntimeError("connection reset")

        def clone(self):
            return self

    arrivals = Arrivals(Gone(), 0, 2)
    assert arrivals.missing() == [0, 1]
