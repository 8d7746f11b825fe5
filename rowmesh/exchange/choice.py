"""The choice of a transport: what a mesh allows, and what was asked for."""

from __future__ import annotations

from typing import Literal

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.collective import CollectiveTransport
from rowmesh.exchange.one_sided import OneSidedTransport
from rowmesh.exchange.transport import LocalTransport, Transport
from rowmesh.mesh import Mesh
from rowmesh.mesh.shared_memory import is_supported

TransportName = Literal["auto", "collective", "one_sided"]


def check_name(name: str) -> None:
    """Raises ConfigurationError for a transport that there is not."""
    if name not in ("auto", "collective", "one_sided"):
        raise ConfigurationError(f"transport must be 'auto', 'collective' or 'one_sided', got {name!r}")


def transport_for(name: TransportName, mesh: Mesh) -> tuple[str, str]:
    """The name of the transport for a mesh, and why.

    Raises:
        ConfigurationError: the name is unknown, or one-sided was asked for where it cannot work.
    """
    check_name(name)
    if mesh.world_size == 1:
        return "local", "there is one rank"
    obstacle = None
    if not mesh.is_one_host:
        obstacle = f"the {mesh.world_size} ranks are on {len(set(mesh.hosts))} hosts (or in separate containers)"
    elif not is_supported():
        obstacle = "this system has no memfd_create (Linux has)"
    if name == "one_sided" and obstacle:
        raise ConfigurationError(f"transport 'one_sided' cannot work: {obstacle}; use 'collective' or 'auto'")
    if name == "one_sided" or (name == "auto" and obstacle is None):
        return "one_sided", "asked for" if name == "one_sided" else f"all {mesh.world_size} ranks share a host's memory"
    return "collective", "asked for" if name == "collective" else str(obstacle)


def choose_transport(name: TransportName, mesh: Mesh, num_groups: int) -> tuple[Transport, str]:
    """The transport for a mesh, and why.

    Raises:
        ConfigurationError: as `transport_for`.
    """
    chosen, reason = transport_for(name, mesh)
    if chosen == "local":
        return LocalTransport(), reason
    return OneSidedTransport(mesh, num_groups) if chosen == "one_sided" else CollectiveTransport(mesh), reason
