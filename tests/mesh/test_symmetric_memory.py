"""What stands against GPUs that read each other, and how torch's symmetric memory is called; without a GPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._C import _distributed_c10d
from torch.distributed import _symmetric_memory

from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.mesh import symmetric_memory as module
from rowmesh.mesh.symmetric_memory import Link, SymmetricPeerMemory, find_obstacle, obstacle_between

CUDA = torch.device("cuda", 1)
LINKS = [Link(name, number, frozenset("abc") - {name}, None) for number, name in enumerate("abc")]
MESH = Mesh(rank=1, world_size=3, hosts=(0, 0, 0), group=SimpleNamespace(group_name="7"))


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({}, None),
        ({2: {"missing": "this torch has no symmetric memory"}}, "on rank 12 this torch has no symmetric memory"),
        ({1: {"identity": "a"}}, "ranks 10 and 11 share a GPU"),
        (
            {1: {"readable": frozenset("a")}},
            "the GPU of rank 11 cannot read that of rank 12: no peer access, or CUDA_VIS",
        ),
        (
            {2: {"number": 0}},
            "ranks 10 and 12 both call their GPU cuda:0; give all ranks the same CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_what_stands_against_it(changes, obstacle):
    links = [replace(link, **changes.get(rank, {})) for rank, link in enumerate(LINKS)]
    found = obstacle_between(links, [10, 11, 12])
    assert found is None if obstacle is None else found is not None and found.startswith(obstacle)


def test_ranks_tell_what_their_gpus_can_read(monkeypatch):
    """Three GPUs, of which the last cannot be read; this rank uses the second."""
    cuda = SimpleNamespace(
        current_device=lambda: 1,
        device_count=lambda: 3,
        can_device_access_peer=lambda own, other: other != 2,
        get_device_properties=lambda number: SimpleNamespace(uuid="abc"[number]),
    )
    sent = []

    def gather(mesh, mine, doing):
        sent.append(mine)
        return [LINKS[0].to_plain(), mine, LINKS[2].to_plain()]

    monkeypatch.setattr(module.torch, "cuda", cuda)
    monkeypatch.setattr(_symmetric_memory, "get_backend", lambda device: "CUDA")
    monkeypatch.setattr(module, "gather_objects", gather)
    assert find_obstacle(MESH, CUDA) == (
        "the GPU of rank 1 cannot read that of rank 2: no peer access, or CUDA_VISIBLE_DEVICES hides it"
    )
    assert sent == [Link("b", 1, frozenset("a"), None).to_plain()]
    monkeypatch.setattr(_symmetric_memory, "get_backend", lambda device: "NVSHMEM")
    assert (
        find_obstacle(MESH, CUDA) == "on rank 1 symmetric memory is that of NVSHMEM, not of CUDA: unset TORCH_SYMMMEM"
    )
    assert "ranks 0 and 2 are on different hosts" in str(find_obstacle(replace(MESH, hosts=(0, 0, 1)), CUDA))


class Handle:
    """What a rendezvous gives: here every rank's part is a copy of this one's."""

    def __init__(self, tensor):
        self.tensor, self.barriers = tensor, []

    def get_buffer(self, rank, sizes, dtype):
        return torch.full(sizes, rank, dtype=dtype)

    def barrier(self, channel, timeout_ms):
        self.barriers.append((channel, timeout_ms))


@pytest.fixture
def handles(monkeypatch):
    """The handles of all rendezvous; memory is that of the CPU."""
    made = []

    def rendezvous(tensor, group_name):
        assert group_name == "7"
        made.append(Handle(tensor))
        return made[-1]

    def empty(size, stride, dtype, device):
        assert (stride, dtype, device) == ((1,), torch.uint8, CUDA)
        if size > (10**9,):
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.empty(size, dtype=dtype)

    monkeypatch.setattr(_distributed_c10d._SymmetricMemory, "empty_strided_p2p", empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(module, "gather_objects", lambda mesh, mine, doing: [None, mine, None])
    return made


def test_every_buffer_is_shared_once_and_barriers_have_one_of_their_own(handles):
    memory = SymmetricPeerMemory(MESH, CUDA)
    buffers = [memory.allocate(size) for size in (100, 0)]
    memory.share(buffers)
    memory.share([memory.allocate(5)])
    assert [len(handle.tensor) for handle in handles] == [16, 100, 16, 16]
    assert [part.tolist() for part in buffers[0].parts] == [[rank] * 100 for rank in range(3)]
    memory.barrier()
    memory.barrier()
    assert [handle.barriers for handle in handles] == [[(0, 300_000)] * 2, [], [], []]


def test_no_room_and_no_link_are_said(handles, monkeypatch):
    memory = SymmetricPeerMemory(MESH, CUDA)
    with pytest.raises(MemoryError, match=r"no 954 MiB of symmetric memory on cuda:1: CUDA driver error"):
        memory.allocate(10**9 + 1)

    def fail(tensor, group_name):
        raise RuntimeError("invalid device ordinal")

    monkeypatch.setattr(_symmetric_memory, "rendezvous", fail)
    with pytest.raises(ConfigurationError, match=r"rank 1: GPUs cannot map .* transport 'collective': invalid device"):
        memory.share([])


def test_ranks_refuse_memory_that_another_one_cannot_map(handles, monkeypatch):
    """This one can; all go on alike."""
    memory = SymmetricPeerMemory(MESH, CUDA)
    monkeypatch.setattr(module, "gather_objects", lambda mesh, mine, doing: [None, mine, "too many open files"])
    with pytest.raises(ConfigurationError, match=r"rank 2: GPUs cannot map .* 'collective': too many open files"):
        memory.share([memory.allocate(5)])
