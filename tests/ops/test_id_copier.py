"""Ids are copied to a device beside what it does: streams that are late must find those of their batch."""

from unittest import mock

import numpy as np
import pytest
import torch

from rowmesh.ops.look_up.device_ids import IdCopier
from tests.support.streams import LateStream, Machine

CPU = torch.device("cpu")


def copy_some(seed, num_batches=12):
    """Whether kernels that read the ids late find those that were looked up; batches grow and shrink."""
    machine, draw = Machine(seed, eagerness=float(seed % 4)), np.random.default_rng(seed)
    copier, seen, given = IdCopier(CPU, machine, many_bytes=0), [], []
    for _ in range(num_batches):
        given.append(torch.from_numpy(draw.integers(1000, size=draw.integers(1, 40))))
        with copier.copied(given[-1]) as here:
            machine.compute.run(lambda here=here: seen.append(here.clone()))
    machine.finish()
    return all(torch.equal(mine, theirs) for mine, theirs in zip(seen, given, strict=True))


def test_every_batch_finds_its_ids():
    assert all(copy_some(seed) for seed in range(40))


@pytest.mark.parametrize("is_compute", [True, False])
def test_each_wait_is_needed(is_compute):
    """Without those of the stream that reads, or of the stream that copies, some order comes out wrong."""
    real = LateStream.wait_for

    def wait_for(stream, marks):
        if (stream is stream._machine.compute) != is_compute:
            real(stream, marks)

    with mock.patch.object(LateStream, "wait_for", wait_for):
        assert not all(copy_some(seed) for seed in range(40))


def test_few_ids_need_no_stream_of_their_own():
    machine, ids = Machine(0, eagerness=0.0), torch.arange(9)
    with IdCopier(CPU, machine, many_bytes=73).copied(ids) as here:
        assert here is ids
    assert not machine.compute.queue


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, whose streams these are")
def test_on_a_gpu():
    device = torch.device("cuda")
    copier, draw = IdCopier(device, many_bytes=0), np.random.default_rng(0)
    work, seen, given = torch.ones(3000, 3000, device=device), [], []
    for _ in range(50):
        given.append(torch.from_numpy(draw.integers(1000, size=draw.integers(1, 300_000))))
        with copier.copied(given[-1]) as here:
            work = work @ work / 3000  # the device is behind
            seen.append(here.clone())
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(seen, given, strict=True))
