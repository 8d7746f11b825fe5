"""A step of two ranks made of the GPU kernels alone, exchanges played by hand, against tables in one piece."""

import pytest
import torch

from rowmesh.ops.merge_update import reference
from rowmesh.placement import AddressMap, Plan, RowRange, TablePlan, TableShape
from rowmesh.tables.update_rules import AdaGrad
from tests.support.triton import kernels_of, refusing_waits

pytestmark = pytest.mark.triton
gathering, merging, updating, routing, uniques = map(
    kernels_of, ("gather", "merge", "merge_update", "route", "segment_unique")
)
WORLD_SIZE, DIM, SIZES = 2, 3, (30, 17)
RULE = AdaGrad(lr=0.1)
PLAN = Plan(
    (
        TablePlan(TableShape("a", 30, 12, 12), (RowRange(0, 10, "fixed", 0, 1), RowRange(10, 30, "cyclic", 0, 0))),
        TablePlan(TableShape("b", 17, 12, 12), (RowRange(0, 17, "cyclic", 1, 0),)),
    ),
    WORLD_SIZE,
    1,
)


class Rank:
    """What one rank holds, asks for and answers."""

    def __init__(self, rank, tables, device):
        self.map, self.device = AddressMap(PLAN, ("a", "b"), rank), device
        self.rows = torch.zeros(self.map.num_slots[rank], DIM, device=device)
        for table, values in enumerate(tables):
            for piece in self.map.owned(table):
                self.rows[list(piece.slots)] = values[list(piece.rows)].to(device)
        self.state = torch.zeros_like(self.rows)
        generator = torch.Generator().manual_seed(rank)
        ids = [torch.randint(size, (count,), generator=generator) for size, count in zip(SIZES, (40, 9), strict=True)]
        self.ids, self.gradients = torch.cat(ids), torch.randn(49, DIM, generator=generator)

    def route(self):
        offsets = torch.tensor([0, 40, 49], device=self.device)
        self.unique = uniques.segment_unique(self.ids.to(self.device), offsets)
        self.device_map = routing.DeviceMap.make(
            self.device,
            self.map.ranges,
            self.map.index,
            num_kinds=len(self.map.kinds),
            world_size=WORLD_SIZE,
            rank=self.map.rank,
            ranks_per_node=1,
            key_stride=self.map.key_stride,
        )
        self.routed = routing.route(self.device_map, self.unique.unique, self.unique.offsets, self.unique.counts)
        assert int(self.routed.accesses.sum()) == len(self.ids)
        self.asked = self.routed.counts.sum(1).tolist()
        self.requests = self.routed.keys[: sum(self.asked)].split(self.asked)

    def sums(self):
        """The gradients of distinct ids, in the order in which their rows were asked for."""
        out = torch.empty(len(self.ids), DIM, device=self.device)
        updating.sum_merged(merging.merge(self.unique.inverse), self.gradients.to(self.device), out)
        return out[self.routed.uniques[: sum(self.asked)].long()].split(self.asked)


def test_a_step(device):
    tables = [torch.randn(size, DIM, generator=torch.Generator().manual_seed(9 + size)) for size in SIZES]
    ranks = [Rank(rank, tables, device) for rank in range(WORLD_SIZE)]
    for rank in ranks:
        rank.route()
    lists = [torch.cat([rank.requests[owner] for rank in ranks]) for owner in range(WORLD_SIZE)]
    answers = [gathering.gather(owner.rows, slots) for owner, slots in zip(ranks, lists, strict=True)]
    for number, rank in enumerate(ranks):
        ahead = [sum(other.asked[owner] for other in ranks[:number]) for owner in range(WORLD_SIZE)]
        replies = torch.cat([answers[o][ahead[o] : ahead[o] + rank.asked[o]] for o in range(WORLD_SIZE)])
        found = torch.empty_like(replies)
        found[rank.routed.uniques[: sum(rank.asked)].long()] = replies
        first, second = rank.ids.split([40, 9])
        looked_up = found[rank.unique.inverse.long()].cpu()
        assert torch.equal(looked_up, torch.cat([tables[0][first], tables[1][second]]))
    sums = [rank.sums() for rank in ranks]
    for number, owner in enumerate(ranks):
        merged = merging.merge(lists[number], most=WORLD_SIZE)
        gradients = torch.cat([of[number] for of in sums])
        updating.update(owner.rows, (owner.state,), merged, gradients, RULE.name, RULE.numbers(0.1, 0.5, 1))
    for table, (values, part) in enumerate(zip(tables, (slice(0, 40), slice(40, 49)), strict=True)):
        touched, total = reference.merge([rank.ids[part] for rank in ranks], [rank.gradients[part] for rank in ranks])
        reference.update(RULE.name, values, {"sum": torch.zeros_like(values)}, touched, total * 0.5, 0.1, RULE.eps)
        for rank in ranks:
            for piece in rank.map.owned(table):
                torch.testing.assert_close(
                    rank.rows[list(piece.slots)].cpu(), values[list(piece.rows)], rtol=1e-6, atol=1e-6
                )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="in the interpreter there is no device to wait for")
def test_the_host_does_not_wait(device):
    """Torch raises where it would; the first time, while kernels are compiled, it may."""
    tables = [torch.randn(size, DIM) for size in SIZES]
    rank = Rank(0, tables, device)
    rank.route()
    slots, gradients = rank.requests[0], rank.gradients.to(device)
    numbers = RULE.numbers(0.1, 1.0, 1)

    def work():
        found = uniques.segment_unique(rank.unique.unique, rank.unique.offsets)
        routing.route(rank.device_map, found.unique, found.offsets, found.counts)
        merged = merging.merge(slots)
        updating.update(rank.rows, (rank.state,), merged, gradients, RULE.name, numbers)

    work()
    with refusing_waits():
        work()
