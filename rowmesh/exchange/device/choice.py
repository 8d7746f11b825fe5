"""The choice of a transport for devices: what links them, and what was asked for."""

from __future__ import annotations

import torch

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.choice import TransportName, check_name
from rowmesh.exchange.device_collective import DeviceCollective
from rowmesh.exchange.device_one_sided import DeviceOneSided
from rowmesh.exchange.transport import LocalTransport
from rowmesh.mesh import Mesh
from rowmesh.mesh.symmetric_memory import find_obstacle, peer_memory

DeviceTransport = LocalTransport | DeviceCollective | DeviceOneSided


def choose_device_transport(name: TransportName, mesh: Mesh, device: torch.device) -> DeviceTransport:
    """The transport between the devices of all ranks; its `reason` says why. Collective.

    "auto" takes the collective one also where GPUs could read each other, until the one-sided one has run on GPUs.

    Args:
        name: what was asked for.
        mesh: the ranks, or a part of them; all ranks of the run then name the same parts.
        device: of this rank.

    Raises:
        ConfigurationError: the name is unknown, or one-sided was asked for where it cannot work; on all ranks of the
            run, whichever part cannot.
    """
    check_name(name)
    if mesh.world_size == 1:
        return LocalTransport(f"there is one rank, on {device}", mesh.name(0))
    if name == "one_sided":
        if obstacle := find_obstacle(mesh, device):
            raise ConfigurationError(
                f"transport 'one_sided' cannot work between devices: {obstacle}; use 'collective' or 'auto'"
            )
        linked = "GPUs read each other" if device.type == "cuda" else "kernels are interpreted on CPUs of one host"
        return DeviceOneSided(mesh, device, peer_memory(mesh, device), f"asked for; {linked}")
    transport = DeviceCollective(mesh, device)
    if name == "auto":
        transport.reason += "; not one_sided: it has not run on GPUs yet, and is taken where it is asked for"
    return transport
