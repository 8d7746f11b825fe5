"""Which process group moves tensors of devices."""

import pytest
import torch

from rowmesh.mesh import Mesh
from rowmesh.mesh import device_group as module
from rowmesh.mesh.device_group import device_group

CUDA = torch.device("cuda", 0)
NCCL = object()


class Group:
    """A process group that moves the tensors of GPUs with some backend.

    Args:
        backend: None where it moves none.
    """

    def __init__(self, backend):
        self._name = backend

    def _get_backend(self, device):
        assert device.type == "cuda"
        if self._name is None:
            raise RuntimeError("no backend for cuda")
        return self

    def name(self):
        return self._name


GLOO = Group("gloo")


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


@pytest.mark.parametrize("backend", ["nccl", None])
def test_ranks_that_share_a_gpu_have_gloo_whatever_the_default_group_has(monkeypatch, backend):
    made = []
    monkeypatch.setattr(module, "gather_objects", lambda mesh, mine, doing: ["a", "a"])
    monkeypatch.setattr(module, "gpu_identity", lambda device: "a")
    monkeypatch.setattr(module.dist, "new_group", lambda ranks, timeout, backend: made.append(backend) or GLOO)
    mesh = Mesh(world_size=2, hosts=(0, 0), group=Group(backend))
    assert device_group(mesh, CUDA)[:2] == (GLOO, "gloo")
    assert made == ["gloo"]


def test_every_use_has_a_group_of_its_own_also_of_meshes_apart(monkeypatch):
    monkeypatch.setattr(module, "gather_objects", lambda mesh, mine, doing: ["a", "b"])
    monkeypatch.setattr(module, "gpu_identity", lambda device: "a")
    monkeypatch.setattr(module.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(module.dist, "new_group", lambda ranks, timeout, backend: Group(backend))
    mesh = Mesh(world_size=2, hosts=(0, 0), group=GLOO)
    rows, network = device_group(mesh.with_process_group("tables"), CUDA)[0], device_group(mesh, CUDA, "network")[0]
    assert rows is not network
    assert device_group(mesh.with_process_group("tables"), CUDA)[0] is rows
