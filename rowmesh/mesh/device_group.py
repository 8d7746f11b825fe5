"""Device group: the process group that moves tensors of devices between the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rowmesh.mesh.groups import backend_name
from rowmesh.mesh.mesh import Mesh
from rowmesh.mesh.waiting import gather_objects


def device_group(mesh: Mesh, device: torch.device, use: str = "devices") -> tuple[Any, str, str]:
    """The process group for tensors on the ranks' devices, its backend, and why that one. Collective.

    NCCL where every rank of the run has a GPU of its own, so that all parts of it have the same; else the ranks' gloo
    group, which takes a device's memory through that of the host: for ranks that share a GPU, and for interpreted
    kernels.

    Args:
        mesh: the ranks, or a part of them; all ranks of the run then name the same parts.
        device: of this rank.
        use: each use has its own NCCL groups. A sender with a thread of its own needs its own use, whichever mesh
            it has: messages of a group must be posted in the same order on all ranks.

    Raises:
        PeerError: a rank did not come within the timeout.
    """
    mine = None if device.type == "cpu" else gpu_identity(device)
    run = mesh.run
    everyone = gather_objects(run, mine, "exchanging device names")
    if None in everyone:
        return mesh.group, "gloo", "kernels are interpreted on the CPU"
    pairs = list(zip(run.hosts, everyone, strict=True))
    if len(set(pairs)) < len(pairs):
        return _gloo_group(mesh, use), "gloo", f"{len(pairs)} ranks share {len(set(pairs))} GPU(s), which NCCL cannot"
    if not dist.is_nccl_available():
        return _gloo_group(mesh, use), "gloo", "this torch is built without NCCL"
    group = mesh.subgroup([range(mesh.world_size)], use, "nccl")
    return group, "nccl", f"each of {len(pairs)} ranks has a GPU of its own"


def _gloo_group(mesh: Mesh, use: str) -> Any:
    """The ranks' group where gloo moves the tensors of GPUs, too; else, as of "cpu:gloo,cuda:nccl", another one."""
    if backend_name(mesh.group, "cuda") == "gloo":
        return mesh.group
    return mesh.subgroup([range(mesh.world_size)], use, "gloo")


def gpu_identity(device: torch.device | int) -> str:
    """Equal for two ranks of one host that use the same GPU, whatever number they know it by."""
    return str(torch.cuda.get_device_properties(device).uuid)
