"""Which process group moves tensors of devices."""

import pytest
import torch

from rowmesh.mesh import Mesh
from rowmesh.mesh import device_group as module
from rowmesh.mesh.device_group import device_group

CUDA = torch.device("cuda", 0)
GLOO, NCCL = object(), object()


@pytest.mark.parametrize(
    ("device", "gpus", "hosts", "has_nccl", "expected"),
    [
        (torch.device("cpu"), [None, None], (0, 0), True, (GLOO, "gloo", "kernels are interpreted on the CPU")),
        (CUDA, ["a", "b"], (0, 0), True, (NCCL, "nccl", "each of 2 ranks has a GPU of its own")),
        (CUDA, ["a", "a"], (0, 1), True, (NCCL, "nccl", "each of 2 ranks has a GPU of its own")),
        (CUDA, ["a", "a"], (0, 0), True, (GLOO, "gloo", "2 ranks share 1 GPU(s), which NCCL cannot")),
        (CUDA, ["a", "b"], (0, 0), False, (GLOO, "gloo", "this torch is built without NCCL")),
        (torch.device("cpu"), [None, "b"], (0, 0), True, (GLOO, "gloo", "kernels are interpreted on the CPU")),
    ],
)
def test_nccl_where_every_rank_has_a_gpu(monkeypatch, device, gpus, hosts, has_nccl, expected):
    monkeypatch.setattr(module, "gather_objects", lambda mesh, mine, doing: gpus)
    monkeypatch.setattr(module, "gpu_identity", lambda device: "a")
    monkeypatch.setattr(module.dist, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(module.dist, "new_group", lambda ranks, timeout, backend: NCCL)
    assert device_group(Mesh(world_size=2, hosts=hosts, group=GLOO), device) == expected
