"""How many threads a rank gets: its share of the cores, unless the user chose."""

import logging
import os
from types import SimpleNamespace

import pytest

from rowmesh._support import control_groups
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.mesh import Mesh, threads
from rowmesh.mesh.threads import fair_threads, fit_threads, share_of, warn_of_threads
from rowmesh.tables import TableSpec

EIGHT = frozenset(range(8))


@pytest.mark.parametrize(
    "mine, of_host, options, expected",
    [
        (EIGHT, [EIGHT], {}, 8),
        (EIGHT, [EIGHT] * 4, {}, 2),
        (EIGHT, [EIGHT] * 3, {}, 2),
        (EIGHT, [EIGHT] * 20, {}, 1),
        ({0, 1}, [{0, 1}, {2, 3}, {4, 5}], {}, 2),  # each bound to cores of its own
        ({0, 1}, [{0, 1}, {0, 1}, {4, 5}], {}, 1),
        (EIGHT, [EIGHT] * 2, {"threads_per_core": 2}, 2),
        (EIGHT, [EIGHT] * 2, {"limit": 4.0}, 2),
        (EIGHT, [EIGHT] * 2, {"limit": 64.0}, 4),
        (EIGHT, [EIGHT] * 2, {"limit": 0.5}, 1),
        ({3}, [{3}], {"threads_per_core": 2}, 1),
    ],
)
def test_shares(mine, of_host, options, expected):
    assert fair_threads(mine, of_host, **options) == expected


@pytest.fixture
def machine(monkeypatch):
    """Eight cores without a limit, and a torch that has a thread for each."""
    state = SimpleNamespace(threads=8)
    monkeypatch.setattr(threads, "processors", lambda pid=0: EIGHT)
    monkeypatch.setattr(control_groups, "processor_limit", lambda: None)
    monkeypatch.setattr(threads.psutil, "cpu_count", lambda logical=True: 8)
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: state.threads)
    monkeypatch.setattr(threads.torch, "set_num_threads", lambda count: setattr(state, "threads", count))
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return state


def mesh_of(hosts, rank=0):
    return Mesh(rank=rank, world_size=len(hosts), hosts=hosts, pids=tuple(range(1, len(hosts) + 1)))


def test_threads_are_lowered_to_the_share(machine):
    said = fit_threads(mesh_of((0, 0, 0, 0, 1)))
    assert machine.threads == 2
    assert said
    assert said.startswith("2 of torch on each rank, not 8")
    assert fit_threads(mesh_of((0, 0, 0, 0, 1))) is None


def test_a_rank_alone_on_its_host_keeps_them(machine):
    assert fit_threads(mesh_of((0, 0, 0, 0, 1), rank=4)) is None
    assert fit_threads(Mesh()) is None
    assert machine.threads == 8


def test_threads_are_never_raised(machine):
    machine.threads = 1
    assert fit_threads(mesh_of((0, 0))) is None
    assert machine.threads == 1


@pytest.mark.parametrize("name", threads.VARIABLES)
def test_who_chose_keeps_the_choice(machine, monkeypatch, name):
    monkeypatch.setenv(name, "8")
    assert fit_threads(mesh_of((0, 0))) is None
    assert machine.threads == 8


@pytest.mark.parametrize(
    "rank, number, warns", [(0, 8, True), (1, 8, False), (2, 8, True), (0, 4, False), (0, 1, False)]
)
def test_the_library_warns_and_changes_nothing(machine, caplog, rank, number, warns):
    """On the first rank of each host."""
    machine.threads = number
    warn_of_threads(mesh_of((0, 0, 1, 1), rank))
    assert ("set OMP_NUM_THREADS=4" in caplog.text) == warns
    assert machine.threads == number


def test_a_collection_of_one_rank_does_not_warn(machine, caplog):
    machine.threads = 64
    with caplog.at_level(logging.WARNING):
        EmbeddingCollection([TableSpec(name="item", num_rows=5, dim=4)])
    assert not caplog.records


def test_processors_of_this_system():
    everything = set(threads.processors())
    assert everything == set(threads.processors(os.getpid()))
    assert threads.processors(2**30) == range(os.cpu_count() or 1)
    assert 1 <= share_of(Mesh()) <= len(everything)


def warn_in_a_collection(mesh):
    """What a collection logs where each rank has four threads per processor."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    threads.logger.addHandler(handler)
    before, count = threads.torch.get_num_threads(), 4 * len(threads.processors())
    threads.torch.set_num_threads(count)
    try:
        EmbeddingCollection([TableSpec(name="item", num_rows=5, dim=4)], mesh=mesh).close()
    finally:
        threads.logger.removeHandler(handler)
        threads.torch.set_num_threads(before)
    return [text for text in records if "OMP_NUM_THREADS" in text]


def test_a_collection_warns_on_one_rank_of_a_host(ranks):
    first, second = ranks.run(warn_in_a_collection, world_size=2)
    assert len(first) == 1
    assert second == []
