"""Sharing the sums of copied rows: what members say is what every holder applies. Whole jobs are in test_plans.py."""

import numpy as np
import torch

from rowmesh._support.counters import CommonCounters, GroupCounters
from rowmesh.exchange.copies import Copies
from rowmesh.ops.merge_update import Merger
from rowmesh.tables import DenseArena, TableSpec, fuse
from rowmesh.tables.update_rules import SGD, Update

DIM = 3


class Exchange:
    """A group with 40 rows of zeros."""

    gradient_bytes = 4 * DIM

    def __init__(self):
        (self.group,) = fuse([TableSpec(name="a", num_rows=40, dim=DIM, optimizer=SGD(lr=1.0))])
        self.arena = DenseArena(self.group, 40)
        self.counters = GroupCounters("a")

    def apply(self, merged, update):
        self.arena.apply(merged, update.lr, update.scaling, update.step)


class Channel:
    """Two members, of which the other sends what the test sets."""

    size, member = 2, 1

    def __init__(self, *other):
        self.other = list(other)

    def gather(self, mine, everyone, counters, doing):
        theirs = self.other.pop(0)
        everyone[0].fill_(255)  # what is behind the sums must not be read
        everyone[0][: len(theirs)] = theirs
        everyone[1].copy_(mine)


def merged(slots, gradients):
    """A merger that holds one request a slot."""
    merger, lists = Merger(1), torch.tensor(slots, dtype=torch.int32)
    offsets = np.array([0, len(slots)])
    merger([(lists.data_ptr(), offsets.ctypes.data, gradients.data_ptr())], 4 * DIM, len(slots))
    merger.keep = (lists, offsets, gradients)
    return merger


def message(slots, gradients):
    """Gradients, then slots."""
    return torch.cat([gradients.flatten().view(torch.uint8), torch.tensor(slots, dtype=torch.int32).view(torch.uint8)])


def test_sums_of_all_members_are_applied_and_passed_on():
    gradients, theirs = torch.randn(3, DIM), torch.randn(2, DIM)
    exchange = Exchange()
    replicas = Copies(exchange, CommonCounters())
    merger = merged([7, 30, 2], gradients)
    received = replicas.share(merger, (1, 3), Channel(torch.tensor([2]), message([5, 39], theirs)), Update(1.0, 0.5, 1))
    expected = torch.zeros(40, DIM)
    expected[[30, 2]], expected[[5, 39]] = -0.5 * gradients[1:], -0.5 * theirs
    assert torch.equal(exchange.arena.rows, expected)
    assert [len(slots) for _, slots in received] == [8, 8]

    said = []

    class Listening(Channel):
        def gather(self, mine, everyone, counters, doing):
            said.append(mine)
            super().gather(mine, everyone, counters, doing)

    replicas.pass_on(received, Listening(torch.tensor([0]), torch.zeros(0, dtype=torch.uint8)), Update(1.0, 0.5, 1))
    assert torch.equal(exchange.arena.rows, expected), "what a rank passes on it does not apply again"
    assert said[0].tolist() == [4]
    everything = torch.cat([theirs, gradients[1:]])
    assert torch.equal(said[1], message([5, 39, 30, 2], everything))


def test_nothing_to_share():
    exchange = Exchange()
    replicas = Copies(exchange, CommonCounters())
    merger = merged([7], torch.ones(1, DIM))
    received = replicas.share(merger, (1, 1), Channel(torch.tensor([0])), Update(1.0, 1.0, 1))
    assert [len(slots) for _, slots in received] == [0, 0]
    assert not exchange.arena.rows.any()


def test_members_may_have_different_numbers_of_rows():
    exchange = Exchange()
    theirs = torch.randn(20, DIM)
    other = Channel(torch.tensor([20]), message(list(range(20)), theirs))
    merger = merged([30], torch.ones(1, DIM))
    Copies(exchange, CommonCounters()).share(merger, (0, 1), other, Update(1.0, 1.0, 1))
    assert torch.equal(exchange.arena.rows[:20], -theirs)
    assert exchange.arena.rows[30].tolist() == [-1.0] * DIM


def test_buffers_are_kept_and_counted():
    """What grows at the first step is used by the next ones; a message in between may be smaller."""
    exchange = Exchange()
    replicas = Copies(exchange, CommonCounters())
    before, sizes = replicas.num_bytes, []
    for count in (30, 30, 3, 30):
        slots, gradients = list(range(count)), torch.ones(count, DIM)
        other = Channel(torch.tensor([count]), message(slots, gradients))
        received = replicas.share(merged(slots, gradients), (0, count), other, Update(1.0, 1.0, 1))
        replicas.pass_on(received, Channel(torch.tensor([0]), torch.zeros(0)), Update(1.0, 1.0, 1))
        sizes.append(replicas.num_bytes)
    assert sizes[0] >= before + 30 * (4 + 4 * DIM)
    assert sizes == [sizes[0]] * 4
