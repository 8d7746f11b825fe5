"""The choice of a transport, and why."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rowmesh import EmbeddingCollection, Mesh
from rowmesh.errors import ConfigurationError
from rowmesh.exchange import device_collective, transports
from rowmesh.exchange.transports import make_transport, reader_for
from rowmesh.mesh import symmetric_memory
from rowmesh.placement.measure import Messages, SharedRows, measure_topology
from tests.support import behaviour

ONE_HOST = Mesh(rank=0, world_size=2, hosts=(0, 0), pids=(1, 2))
CPU = torch.device("cpu")
TWO_HOSTS = Mesh(rank=0, world_size=4, hosts=(0, 0, 1, 1), pids=(1, 2, 1, 2))


@pytest.mark.parametrize(
    "name, mesh, chosen, reason",
    [
        ("auto", Mesh(), "local", "there is one rank"),
        ("collective", Mesh(), "local", "there is one rank"),
        ("auto", ONE_HOST, "one_sided", "all 2 ranks share a host's memory"),
        ("one_sided", ONE_HOST, "one_sided", "asked for"),
        ("collective", ONE_HOST, "collective", "asked for"),
        ("auto", TWO_HOSTS, "collective", "the 4 ranks are on 2 hosts (or in separate containers)"),
    ],
)
def test_what_a_mesh_allows(name, mesh, chosen, reason):
    transport, why = make_transport(name, mesh, 1)
    assert (transport.name, why) == (chosen, reason)


def test_shared_memory_across_hosts_is_refused():
    with pytest.raises(ConfigurationError, match=r"'one_sided' cannot work: the 4 ranks are on 2 hosts.*'collective'"):
        make_transport("one_sided", TWO_HOSTS, 1)


def test_systems_without_anonymous_files(monkeypatch):
    monkeypatch.setattr(transports, "is_supported", lambda: False)
    assert make_transport("auto", ONE_HOST, 1)[0].name == "collective"
    with pytest.raises(ConfigurationError, match=r"cannot work: this system has no memfd_create"):
        make_transport("one_sided", ONE_HOST, 1)


def test_unknown_transports_are_refused():
    with pytest.raises(ConfigurationError, match=r"'auto', 'collective' or 'one_sided', got 'nccl'"):
        EmbeddingCollection(behaviour.TABLES, transport="nccl")  # type: ignore[arg-type]


# Between devices


class Fake:
    """A transport between devices that needs no ranks."""

    def __init__(self, *arguments):
        self.name, self.reason = "collective", "nccl between devices: each of 2 ranks has a GPU of its own"


@pytest.fixture
def found(monkeypatch):
    """Sets the obstacle that is found."""
    monkeypatch.setattr(device_collective, "DeviceCollective", Fake)
    return lambda obstacle: monkeypatch.setattr(symmetric_memory, "find_obstacle", lambda *_: obstacle)


@pytest.mark.parametrize(
    ("name", "chosen", "end"),
    [
        ("one_sided", "one_sided", "asked for; kernels are interpreted on CPUs of one host"),
        ("collective", "collective", "each of 2 ranks has a GPU of its own"),
        ("auto", "collective", "not one_sided: it has not run on GPUs yet, and is taken where it is asked for"),
    ],
)
def test_one_sided_between_devices_is_taken_where_it_is_asked_for(found, name, chosen, end):
    found(None)
    transport, reason = make_transport(name, ONE_HOST, 1, CPU)
    assert transport.name == chosen
    assert reason.endswith(end)


def test_one_sided_between_devices_is_refused_where_it_cannot_be(found):
    found("ranks 0 and 1 share a GPU")
    pattern = "'one_sided' cannot work between devices: ranks 0 and 1 share a GPU; use 'collective' or 'auto'"
    with pytest.raises(ConfigurationError, match=pattern):
        make_transport("one_sided", ONE_HOST, 1, CPU)


# What reads as the transport does, for measured topologies


def measured(mesh, transport, hosts):
    """The reader, the topology, and how many messages of bytes the ranks sent each other meanwhile."""
    mesh = replace(mesh, hosts=hosts)
    sent, send = [], dist.send
    dist.send = lambda tensor, *args, **kwargs: (sent.append(tensor.numel()), send(tensor, *args, **kwargs))[1]
    try:
        reader = reader_for(transport, mesh)
        topology = measure_topology(mesh, reader=reader, repeats=3, sizes=(64, 1 << 12, 1 << 16))
    finally:
        dist.send = send
    return type(reader), topology.cost, topology.latency_s, topology.source, len(sent)


@pytest.mark.parametrize(
    ("transport", "hosts", "reader", "text"),
    [
        ("auto", (0, 0, 0), SharedRows, "one-sided reads of rows of 64 bytes"),
        ("one_sided", (0, 0, 0), SharedRows, "one-sided reads of rows of 64 bytes"),
        ("collective", (0, 0, 0), Messages, "reads in messages"),
        ("auto", (0, 1, 2), Messages, "reads in messages"),
    ],
)
def test_links_are_measured_as_they_are_used(ranks, transport, hosts, reader, text):
    results = ranks.run(measured, transport, hosts, world_size=3)
    for kind, cost, latency, source, num_messages in results:
        assert kind is reader
        assert text in source
        assert (num_messages == 0) == (reader is SharedRows)
        assert np.array_equal(cost, results[0][1])
        assert np.all((cost > 0) & np.isfinite(cost))
        assert np.all(latency >= 0)


def one_sided_across_hosts(mesh):
    with pytest.raises(ConfigurationError, match="'one_sided' cannot work"):
        reader_for("one_sided", replace(mesh, hosts=(0, 1)))


def test_what_cannot_be_used_is_not_measured(ranks):
    ranks.run(one_sided_across_hosts)
