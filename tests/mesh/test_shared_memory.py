"""Shared memory without names: what one process writes another reads, and nothing is left when the last view goes."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rowmesh.errors import PeerError
from rowmesh.mesh import SharedBuffer
from rowmesh.mesh.shared_memory import is_supported
from rowmesh.ops.memory import HUGE_PAGE

pytestmark = pytest.mark.skipif(not is_supported(), reason="this system has no memfd_create")


def mapped():
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:rowmesh")


@pytest.mark.parametrize("num_bytes", [0, 1, 4097, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_two_mappings_of_one_memory(num_bytes):
    buffer = SharedBuffer.create(num_bytes)
    other = SharedBuffer.attach(os.getpid(), buffer.descriptor, buffer.num_bytes, rank=0)
    buffer.use_huge_pages()
    other.use_huge_pages()
    assert buffer.num_bytes >= max(num_bytes, 64)
    assert other.address != buffer.address
    assert buffer.address % (HUGE_PAGE if num_bytes >= HUGE_PAGE else 64) == 0
    assert not other.bytes.any()
    buffer.bytes[:] = np.arange(buffer.num_bytes) % 251
    assert np.array_equal(other.bytes, buffer.bytes)
    other.array(np.int64, 2, 2, offset=16)[:] = -1
    assert buffer.tensor(torch.int64, 2, 2, offset=16).tolist() == [[-1, -1], [-1, -1]]


def test_memory_goes_with_the_last_view():
    before = mapped()
    buffer = SharedBuffer.create(10_000)
    other = SharedBuffer.attach(os.getpid(), buffer.descriptor, buffer.num_bytes, rank=0)
    view = other.tensor(torch.float32, 5)
    buffer.close()
    buffer.close()
    del buffer, other
    assert mapped() == before + 1
    view.fill_(1.0)
    del view
    assert mapped() == before


def test_descriptors_are_closed():
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        buffer = SharedBuffer.create(100)
        SharedBuffer.attach(os.getpid(), buffer.descriptor, buffer.num_bytes, rank=0)
    del buffer
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_process_that_is_gone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(PeerError, match=rf"rank 3 \(process {process.pid}\) died while its memory"):
        SharedBuffer.attach(process.pid, 5, 100, rank=3)


def test_more_than_there_is():
    with pytest.raises(MemoryError, match="MiB of shared memory"):
        SharedBuffer.create(2**60)
