"""The choice of a transport, and why."""

import pytest

from rowmesh import EmbeddingCollection, Mesh
from rowmesh.errors import ConfigurationError
from rowmesh.exchange import choice
from rowmesh.exchange.choice import choose_transport
from tests.support import behaviour

ONE_HOST = Mesh(rank=0, world_size=2, hosts=(0, 0), pids=(1, 2))
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
    transport, why = choose_transport(name, mesh, 1)
    assert (transport.name, why) == (chosen, reason)


def test_shared_memory_across_hosts_is_refused():
    with pytest.raises(ConfigurationError, match=r"'one_sided' cannot work: the 4 ranks are on 2 hosts.*'collective'"):
        choose_transport("one_sided", TWO_HOSTS, 1)


def test_systems_without_anonymous_files(monkeypatch):
    monkeypatch.setattr(choice, "is_supported", lambda: False)
    assert choose_transport("auto", ONE_HOST, 1)[0].name == "collective"
    with pytest.raises(ConfigurationError, match=r"cannot work: this system has no memfd_create"):
        choose_transport("one_sided", ONE_HOST, 1)


def test_unknown_transports_are_refused():
    with pytest.raises(ConfigurationError, match=r"'auto', 'collective' or 'one_sided', got 'nccl'"):
        EmbeddingCollection(behaviour.TABLES, transport="nccl")  # type: ignore[arg-type]
