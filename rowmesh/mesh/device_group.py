"""Device group: the process group that moves tensors of devices between the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rowmesh.mesh.mesh import Mesh
from rowmesh.mesh.waiting import gather_objects


def device_group(mesh: Mesh, device: torch.device) -> tuple[Any, str, str]:
    """The process group for tensors on the ranks' devices, its backend, and why that one. Collective.

    NCCL where every rank of the run has a GPU of its own, so that all parts of it have the same; else the ranks' gloo
    group, which takes a device's memory through that of the host: for ranks that share a GPU, and for interpreted
    kernels.

    Args:
        mesh: the ranks, or a part of them; all ranks of the run then name the same parts.
        device: of this rank.

    Raises:
        PeerError: a rank did not come within the timeout.
    """
    mine = None if device.type == "cpu" else gpu_identity(device)
    run = mesh
    while run.whole is not None:
        run = run.whole
    everyone = gather_objects(run, mine, "telling devices")
    if None in everyone:
        return mesh.group, "gloo", "kernels are interpreted on the CPU"
    pairs = list(zip(run.hosts, everyone, strict=True))
    if len(set(pairs)) < len(pairs):
        return mesh.group, "gloo", f"{len(pairs)} ranks share {len(set(pairs))} GPU(s), which NCCL cannot"
    if not dist.is_nccl_available():
        return mesh.group, "gloo", "this torch is built without NCCL"
    group = mesh.subgroup([range(mesh.world_size)], use="devices", backend="nccl")
    return group, "nccl", f"each of {len(pairs)} ranks has a GPU of its own"


def gpu_identity(device: torch.device | int) -> str:
    """Equal for two ranks of one host that use the same GPU, whatever number they know it by."""
    return str(torch.cuda.get_device_properties(device).uuid)
