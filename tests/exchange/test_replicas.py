"""Sharing the sums of copied rows: what members say is what every holder applies. Whole jobs are in test_plans.py."""

import numpy as np
import torch

from rowmesh.exchange.counters import CommonCounters, GroupCounters
from rowmesh.exchange.replicas import Replicas
from rowmesh.exchange.transport import Update
from rowmesh.ops.merge_update import Merger
from rowmesh.optim import SGD
from rowmesh.tables import DenseArena, TableSpec, fuse

DIM = 3


class Exchange:
    """A group with 40 rows of zeros."""

    gradient_bytes = 4 * DIM

    def __init__(self):
        (self.group,) = fuse([TableSpec(name="a", num_rows=40, dim=DIM, optimizer=SGD(lr=1.0))])
        self.arena = DenseArena(self.group, 40)
        self.counters = GroupCounters("a")


class Channel:
    """Two members, of which the other says what it is told to say."""

    size, member = 2, 1

    def __init__(self, *other):
        self.other = list(other)

    def gather(self, mine, counters, doing):
        theirs = self.other.pop(0)
        padded = torch.zeros_like(mine)
        padded[: len(theirs)] = theirs
        return [padded, mine]


def merged(slots, gradients):
    """A merger that holds one request a slot."""
    merger, lists = Merger(1), torch.tensor(slots, dtype=torch.int32)
    offsets = np.array([0, len(slots)])
    merger([(lists.data_ptr(), offsets.ctypes.data, gradients.data_ptr())], 4 * DIM, len(slots))
    merger.keep = (lists, offsets, gradients)
    return merger


def message(slots, gradients):
    """Slots, then gradients from the next multiple of 64 bytes."""
    head = torch.zeros(-(-4 * len(slots) // 64) * 64, dtype=torch.uint8)
    head[: 4 * len(slots)] = torch.tensor(slots, dtype=torch.int32).view(torch.uint8)
    return torch.cat([head, gradients.flatten().view(torch.uint8)])


def test_sums_of_all_members_are_applied_and_passed_on():
    gradients, theirs = torch.randn(3, DIM), torch.randn(2, DIM)
    exchange = Exchange()
    replicas = Replicas(exchange, CommonCounters())
    merger = merged([7, 30, 2], gradients)
    received = replicas.share(
        merger, (1, 3), Channel(torch.tensor([2]), message([5, 39], theirs)), Update(1.0, 0.5, 1)
    )  # fmt: skip
    expected = torch.zeros(40, DIM)
    expected[[30, 2]], expected[[5, 39]] = -0.5 * gradients[1:], -0.5 * theirs
    assert torch.equal(exchange.arena.rows, expected)
    assert [count for count, _ in received] == [2, 2]

    said = []

    class Listening(Channel):
        def gather(self, mine, counters, doing):
            said.append(mine)
            return super().gather(mine, counters, doing)

    replicas.pass_on(received, Listening(torch.tensor([0]), torch.zeros(0, dtype=torch.uint8)), Update(1.0, 0.5, 1))
    assert torch.equal(exchange.arena.rows, expected), "what a rank passes on it does not apply again"
    assert said[0].tolist() == [4]
    everything = torch.cat([theirs, gradients[1:]])
    assert torch.equal(said[1], message([5, 39, 30, 2], everything))


def test_nothing_to_share():
    exchange = Exchange()
    replicas = Replicas(exchange, CommonCounters())
    merger = merged([7], torch.ones(1, DIM))
    received = replicas.share(merger, (1, 1), Channel(torch.tensor([0])), Update(1.0, 1.0, 1))
    assert [count for count, _ in received] == [0, 0]
    assert not exchange.arena.rows.any()


def test_members_may_have_different_numbers_of_rows():
    exchange = Exchange()
    theirs = torch.randn(20, DIM)
    other = Channel(torch.tensor([20]), message(list(range(20)), theirs)[: 64 * 2 + 80 * DIM])
    merger = merged([30], torch.ones(1, DIM))
    Replicas(exchange, CommonCounters()).share(merger, (0, 1), other, Update(1.0, 1.0, 1))
    assert torch.equal(exchange.arena.rows[:20], -theirs)
    assert exchange.arena.rows[30].tolist() == [-1.0] * DIM
