"""Shared memory without names: nothing can be left behind, however a process ends.

A segment is an anonymous file (memfd) of the rank that made it. A rank on the same host maps it through
/proc/<pid>/fd/<number>; the kernel frees it with the last mapping. Unlike files in /dev/shm it needs no clean-up
after a crash, and it is not bound by the small /dev/shm of a container.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Sequence

import numpy as np

from rowmesh.errors import PeerError
from rowmesh.mesh.mesh import Mesh
from rowmesh.mesh.waiting import barrier, gather_objects
from rowmesh.ops.memory import HUGE_PAGE, Memory, advise_huge_pages, collapse_huge_pages, round_up

if sys.platform != "win32":
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED, _MAP_FAILED = 0x10, ctypes.c_void_p(-1).value


def is_supported() -> bool:
    """Whether this system has anonymous shared files that other processes can open."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


class SharedBuffer(Memory):
    """Memory that the ranks of a host share.

    Make one with `create`, hand (os.getpid(), buffer.descriptor, buffer.num_bytes) to a peer, and `attach` there.
    """

    def __init__(self, descriptor: int, num_bytes: int, owns_descriptor: bool) -> None:
        self.num_bytes = num_bytes
        self._mapped = round_up(num_bytes, HUGE_PAGE if num_bytes >= HUGE_PAGE else mmap.PAGESIZE)
        self.address = _map_aligned(descriptor, self._mapped)
        self.descriptor = descriptor if owns_descriptor else -1  # last: a failed mapping leaves it to the caller
        array = (ctypes.c_uint8 * num_bytes).from_address(self.address)
        # Views keep the array alive, and the array the mapping: nothing dangles, whatever is dropped first.
        weakref.finalize(array, _libc.munmap, self.address, self._mapped).atexit = False
        self.bytes: np.ndarray = np.ctypeslib.as_array(array)

    @classmethod
    def create(cls, num_bytes: int) -> SharedBuffer:
        """A new segment of zeros.

        Raises:
            MemoryError: the system has no room for it.
        """
        num_bytes = max(num_bytes, 64)
        descriptor = os.memfd_create("rowmesh", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, round_up(num_bytes, HUGE_PAGE if num_bytes >= HUGE_PAGE else mmap.PAGESIZE))
            buffer = cls(descriptor, num_bytes, owns_descriptor=True)
        except OSError as error:
            os.close(descriptor)
            raise MemoryError(f"no {num_bytes / 2**20:.0f} MiB of shared memory: {error}") from error
        advise_huge_pages(buffer.address, buffer._mapped)
        return buffer

    @classmethod
    def attach(cls, pid: int, descriptor: int, num_bytes: int, rank: int) -> SharedBuffer:
        """Maps the segment of another process.

        Raises:
            PeerError: the process is gone, or belongs to another user or container.
        """
        try:
            opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise PeerError(f"rank {rank} (process {pid}) died while its memory was mapped") from error
        except OSError as error:
            raise PeerError(f"cannot map the memory of rank {rank} (process {pid}): {error}") from error
        try:
            return cls(opened, num_bytes, owns_descriptor=False)
        finally:
            os.close(opened)

    def use_huge_pages(self) -> None:
        """Touches all pages and moves them to huge pages where the system allows; worth it for what lives long."""
        collapse_huge_pages(self.address, self._mapped)

    def close(self) -> None:
        """No further rank can attach; the memory is freed with its last view on the last rank."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            self.close()


def share(mesh: Mesh, buffers: Sequence[SharedBuffer]) -> list[list[SharedBuffer]]:
    """Maps the buffers of every rank, in the order of the ranks; this rank's stay as they are. Collective and blocking.

    They cannot be mapped later; each is freed with its last view on the last rank.

    Args:
        mesh: ranks of one host.
        buffers: of this rank; equally many on all.

    Raises:
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    doing, mapped = "mapping shared memory", []
    mine = [(buffer.descriptor, buffer.num_bytes) for buffer in buffers]
    for rank, theirs in enumerate(gather_objects(mesh, mine, doing)):
        pid, name = mesh.pids[rank], mesh.name(rank)
        if rank == mesh.rank:
            mapped.append(list(buffers))
        else:
            mapped.append([SharedBuffer.attach(pid, descriptor, size, name) for descriptor, size in theirs])
    barrier(mesh, doing)  # all have mapped them
    for buffer in buffers:
        buffer.close()
    return mapped


def _map_aligned(descriptor: int, num_bytes: int) -> int:
    """Maps a file at an address that allows huge pages: over the aligned part of a larger reservation."""
    alignment = HUGE_PAGE if num_bytes >= HUGE_PAGE else mmap.PAGESIZE
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = _libc.mmap(None, num_bytes + alignment, 0, anonymous, -1, 0)
    if reserved == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "cannot reserve address space")
    address = round_up(reserved, alignment)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = _libc.mmap(address, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)
    if mapped != address:
        error = ctypes.get_errno()
        _libc.munmap(reserved, num_bytes + alignment)
        raise OSError(error, "cannot map shared memory")
    for begin, end in ((reserved, address), (address + num_bytes, reserved + num_bytes + alignment)):
        if end > begin:
            _libc.munmap(begin, end - begin)
    return address
