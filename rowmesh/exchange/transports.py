"""Which transport links the ranks of a mesh: what the mesh and the device allow, and what was asked for."""

from __future__ import annotations

from typing import Literal

import torch

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.collective import CollectiveTransport
from rowmesh.exchange.one_sided import OneSidedTransport
from rowmesh.exchange.transport import LocalTransport, Transport
from rowmesh.mesh import Mesh
from rowmesh.mesh.grid import Grid
from rowmesh.mesh.shared_memory import is_supported
from rowmesh.placement.measure import Messages, Reader, SharedRows

TransportName = Literal["auto", "collective", "one_sided"]
_OWNERS_PREFETCH = "owners prefetch the rows that they are asked for into fast memory"


def check_name(name: str) -> None:
    """Raises ConfigurationError for a transport that there is not."""
    if name not in ("auto", "collective", "one_sided"):
        raise ConfigurationError(f"transport must be 'auto', 'collective' or 'one_sided', got {name!r}")


def transport_for(name: TransportName, mesh: Mesh) -> tuple[str, str]:
    """The name of the transport between the hosts' memory of a mesh, and why that one.

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


def make_transport(
    name: TransportName, mesh: Mesh, num_groups: int, device: torch.device | None = None, *, is_tiered: bool = False
) -> tuple[Transport, str]:
    """The transport between ranks, and why that one. Collective where rows are on devices.

    Between devices "auto" is collective also where GPUs could read each other, until one-sided has run on GPUs.

    Args:
        name: what was asked for.
        mesh: the ranks, or a replica group of them; all ranks of the run then name the same groups.
        num_groups: groups of tables that it serves.
        device: of this rank's rows; None for the host's memory.
        is_tiered: whether the tables are; their rows always travel in messages.

    Raises:
        ConfigurationError: the name is unknown, or one-sided was asked for where it cannot work; between devices on
            all ranks of the run, whichever replica group cannot.
    """
    wanted: TransportName = "collective" if is_tiered else name
    if device is not None:
        transport, reason = _between_devices(wanted, mesh, device)
        if is_tiered and name == "one_sided":
            reason += f"; not one_sided: {_OWNERS_PREFETCH}"
        return transport, reason
    chosen, reason = transport_for(wanted, mesh)
    reason = _OWNERS_PREFETCH if is_tiered else reason
    if chosen == "local":
        return LocalTransport(), reason
    return OneSidedTransport(mesh, num_groups) if chosen == "one_sided" else CollectiveTransport(mesh), reason


def _between_devices(name: TransportName, mesh: Mesh, device: torch.device) -> tuple[Transport, str]:
    from rowmesh.exchange.device_collective import DeviceCollective
    from rowmesh.exchange.device_one_sided import DeviceOneSided
    from rowmesh.mesh import symmetric_memory

    check_name(name)
    if mesh.world_size == 1:
        reason = f"there is one rank, on {device}"
        return LocalTransport(reason, mesh.name(0)), reason
    if name == "one_sided":
        if obstacle := symmetric_memory.find_obstacle(mesh, device):
            raise ConfigurationError(
                f"transport 'one_sided' cannot work between devices: {obstacle}; use 'collective' or 'auto'"
            )
        linked = "GPUs read each other" if device.type == "cuda" else "kernels are interpreted on CPUs of one host"
        reason = f"asked for; {linked}"
        return DeviceOneSided(mesh, device, symmetric_memory.peer_memory(mesh, device), reason), reason
    transport = DeviceCollective(mesh, device)
    if name == "auto":
        return transport, (
            f"{transport.reason}; not one_sided: it has not run on GPUs yet, and is taken where it is asked for"
        )
    return transport, transport.reason


def common_name(name: TransportName, mesh: Mesh, grid: Grid) -> TransportName:
    """The transport to ask for, so that hosts' memory is linked alike in all replica groups, as far as it must be.

    Raises:
        ConfigurationError: one-sided was asked for, and a group is on several hosts; on all ranks.
    """
    spread = [group for group in grid.groups if len({mesh.hosts[rank] for rank in group}) > 1]
    if not spread:
        return name
    if name == "one_sided":
        raise ConfigurationError(
            f"transport 'one_sided' cannot work: ranks {[mesh.name(rank) for rank in spread[0]]} hold a replica and "
            "are on several hosts; use 'collective' or 'auto'"
        )
    return name if len(spread) == grid.replicas else "collective"


def reader_for(name: TransportName, mesh: Mesh) -> Reader:
    """The reader of rows that a run on a mesh would use, given the transport that it is configured with.

    Collective and blocking where ranks share memory.

    Raises:
        ConfigurationError: as `transport_for`.
    """
    chosen, _ = transport_for(name, mesh)
    return SharedRows(mesh) if chosen == "one_sided" else Messages(mesh)
