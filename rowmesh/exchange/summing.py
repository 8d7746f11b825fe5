"""Summing: bags of some tables travel to the owner of all their rows, which answers with one vector a bag.

Where bags have many ids, the rows that a rank needs are more bytes than the ids that it has and the vectors that it
gets. A plan says of which tables (`TablePlan.send`); each has one owner. Beside the rows of other tables travel

    ids         of the bags, with their lengths and weights, in one message (`rowmesh.exchange.bags`)
    vectors     one for each bag, pooled at the owner as they would be here
    gradients   one for each bag, which the owner sums by row

The owner looks the bags of all ranks up at once.

[Note: bags by source]
Tables that send sums train to the bit as if rows travelled. There a rank sums the gradients of its own ids by row, and
the owner adds these sums up in the order of the ranks, node by node. So bags, and the cells of their gradients, stand
rank by rank: the cells of a row are in that order, and a sum that is closed where a rank ends, and where a node ends,
is made of the same additions. `update_by_source` does that as it changes rows; no sum by row and rank is written.
Where other requests name the same rows (several look-ups in a step, or a rank that needs the rows themselves), or
replicas need sums, each rank's sums are written, and merged as its requests.

A bag of one id is the row itself where the batch says that all have one, else the row added to zero, as here. Where
the batches of ranks differ in that, the sign of a zero may.

[Note: which look-ups send rows]
A rank sends requests for rows, and none of its bags, where weights of ids need gradients, which are products with
rows, and in pipelines. Owners serve both. Tiered tables, devices and transports that read rows in place send no sums.

Source: TorchRec's table-wise sharding. Differs: by table, within a group whose other rows travel; the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh._support.counters import CommonCounters
from rowmesh.exchange.bag_look_ups import BagLookUp, OwnedBags
from rowmesh.exchange.bags import WORD_BYTES, BagReader, Owned
from rowmesh.exchange.collective_group import CollectiveGroup
from rowmesh.exchange.host_group import HostGroupExchange, HostRouteGroup
from rowmesh.exchange.incoming import Incoming, sizes_of
from rowmesh.mesh.channel import Channel, Message
from rowmesh.ops.look_up import HostLookUp, HostLookUps
from rowmesh.ops.memory import Buffer, Memory, Scratch
from rowmesh.ops.merge_update.sources import Sources
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.placement import AddressMap
from rowmesh.sparse import SparseBatch
from rowmesh.tables import CachedArena, DenseArena, TableGroup
from rowmesh.tables.update_rules import Update


def summed_features(group: TableGroup, address_map: AddressMap) -> list[Owned]:
    """What each rank owns of the features whose sums travel."""
    owned = []
    for rank in range(address_map.plan.world_size):
        features = [
            (feature, number, table.pooling == "mean", table.num_rows)
            for number, (table, plan) in enumerate(zip(group.tables, address_map.tables, strict=True))
            if plan.send == "sums" and plan.ranges[0].rank == rank
            for feature in range(*group.feature_bounds[number : number + 2])
        ]
        owned.append(Owned(*zip(*features, strict=True)) if features else Owned())
    return owned


class SummingExchange(HostGroupExchange):
    """A group of tables some of which send sums.

    Args:
        group, address_map, arena, allocate, wire_dtype: as for `HostGroupExchange`.
        owned: what each rank owns of the features whose sums travel.

    Attributes:
        owned: as given.
        summed_segments: of tables that send sums.
    """

    kind = BagLookUp

    def __init__(
        self,
        group: TableGroup,
        address_map: AddressMap,
        arena: DenseArena | CachedArena,
        allocate: Callable[[int], Memory] = Buffer,
        *,
        owned: Sequence[Owned],
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, address_map, arena, allocate, wire_dtype=wire_dtype)
        self.owned = owned
        self._is_summed = np.zeros(len(group.features), bool)
        self._is_summed[[feature for each in owned for feature in each.features]] = True
        mine = np.array(owned[self.rank].tables, np.int64)
        self._owned_look_ups = self._look_ups_of(np.sort(np.tile(mine, self.world_size)))
        self._look_ups_by_rank = self._look_ups_of(mine)
        self._idle, self._made = list[OwnedBags](), list[OwnedBags]()
        self.summed_segments = sorted({table for each in owned for table in each.tables})

    def _look_ups_of(self, tables: NDArray[np.int64]) -> HostLookUps:
        """Look-ups of other features, of which it is given the tables, whose rows this rank has or must ask for."""
        header = self.address_map.header(self.arenas.ctypes.data, self.row_bytes)
        shape = self.world_size, self.num_segments
        made = HostLookUps(self.address_map.num_rows, tables, header, shape, self.group.dim, self.group.dtype, Buffer)
        made.read_in_place()
        return made

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers, lent or idle; without the arena."""
        own = self._owned_look_ups.num_bytes + self._look_ups_by_rank.num_bytes
        return super().num_bytes + own + sum(each.num_bytes for each in self._made)

    def take_owned(self) -> OwnedBags:
        """Memory for the bags of a fetch."""
        try:
            return self._idle.pop()
        except IndexError:
            per_node, look_ups = self.address_map.plan.ranks_per_node, (self._owned_look_ups, self._look_ups_by_rank)
            made = OwnedBags(self.owned[self.rank], self.rank, per_node, *look_ups, self._idle.append)
            self._made.append(made)
            return made

    def route(
        self, batch: SparseBatch, layout: GroupLayout, inverse: int, *, sends_rows: bool = False
    ) -> HostRouteGroup:
        """As for any group; features of tables that send sums send bags, see [Note: which look-ups send rows]."""
        weights = batch.weights
        if sends_rows or (weights is not None and weights.requires_grad and torch.is_grad_enabled()):
            group = super().route(batch, layout, inverse, sends_rows=True)
            assert isinstance(group.look_up, BagLookUp)
            group.look_up.drop_bags(self.world_size)
            return group
        near = _without(layout, self._is_summed)
        group = super().route(batch, near, inverse)
        assert isinstance(group.look_up, BagLookUp)
        try:
            if not group.look_up.take_bags(batch, layout, self.owned, self.rows_of):
                batch = batch.with_ids(self._mapped(batch.ids, _without(layout, ~self._is_summed)))
                group.look_up.take_bags(batch, layout, self.owned, self.rows_of)
        except BaseException:
            group.release()
            raise
        self.count_bags(layout.num_ids - near.num_ids)
        return group

    def rows_of(self, look_up: BagLookUp) -> HostLookUp:
        """The rows that are in the bags of a look-up, with the sums of their gradients; made anew each time."""
        read = BagReader(self.group.dim)
        bags = read(look_up.messages(self.owned))
        look_ups = self._look_ups_of(np.sort(np.concatenate([each.tables for each in self.owned]).astype(np.int64)))
        layout, inverse = bags.layout(), Scratch()
        found = look_ups.look_up(bags.ids, layout, inverse)
        if layout.is_weighted:
            found.weigh(layout, bags.weights)
        found.backward(layout, look_up.gradients)
        return found


def _without(layout: GroupLayout, features: NDArray[np.bool_]) -> GroupLayout:
    """The layout of a batch that has no ids and no samples of some features."""
    descriptors = layout.features.copy()
    descriptors[features, 0], descriptors[features, 4] = descriptors[features, 1], 0
    return GroupLayout(descriptors, int((descriptors[:, 1] - descriptors[:, 0]).sum()), layout.is_weighted)


class IncomingBags(Incoming):
    """The requests of other ranks, and their bags."""

    __slots__ = ("bags",)

    def __init__(self, offsets: NDArray[np.int64], accesses: NDArray[np.int64], num_replying: int, bags: OwnedBags):
        super().__init__(offsets, accesses, num_replying)
        self.bags = bags

    def add_to(self, sources: Sources, rank: int) -> None:
        """Adds what a rank asks for beside its requests."""
        self.bags.add_to(sources, rank)

    def release(self) -> None:
        """The route is gone, or fetched anew."""
        self.bags.release()


class _Both(Message):
    """Two messages under way."""

    __slots__ = ("first", "second")

    def __init__(self, first: Message, second: Message) -> None:
        self.first, self.second = first, second

    def wait(self) -> Tensor:
        """The messages of the first."""
        into = self.first.wait()
        self.second.wait()
        return into


class SummingGroup(CollectiveGroup):
    """The messages of a group some of whose tables send sums; as for `CollectiveGroup`."""

    exchange: SummingExchange

    def __init__(
        self, exchange: SummingExchange, everyone: Channel, ranks_per_node: int, common: CommonCounters
    ) -> None:
        super().__init__(exchange, everyone, ranks_per_node, common)
        self.exchange = exchange
        self._apart: OwnedBags | None = None  # whose gradients the update sums
        self._by_rank: list[OwnedBags] = []  # of the routes that are pushed, whose gradients are merged with others

    @property
    def num_columns(self) -> int:
        """Numbers that say what a rank asks of another, the last one how many words its bags have."""
        return super().num_columns + 1

    def counts(self, group: HostRouteGroup) -> list[np.ndarray]:
        """These numbers."""
        return [*super().counts(group), np.array(_bag_look_up(group).sizes)[:, None]]

    def expect(self, group: HostRouteGroup, counts: np.ndarray) -> None:
        """Takes the numbers of all ranks."""
        bags = self.exchange.take_owned()
        bags.expect(counts[:, -1].tolist())
        split = self.exchange.num_segments + 1
        group.keep(IncomingBags(counts[:, :split], counts[:, split:-1], self._num_replying, bags))

    def make_room(self, group: HostRouteGroup) -> None:
        """For what travels."""
        super().make_room(group)
        _bag_look_up(group).reserve_vectors()
        _owned_bags(group).reserve_words()

    def post_keys(self, group: HostRouteGroup) -> Message:
        """Sends requests, and bags."""
        keys = super().post_keys(group)
        look_up, bags = _bag_look_up(group), _owned_bags(group)
        out = look_up.words.buffer.items(WORD_BYTES, sum(look_up.sizes))
        into = bags.words.buffer.items(WORD_BYTES, sum(bags.sizes))
        return _Both(keys, self._post_bags(out, look_up.sizes, bags.sizes, into))

    def _post_bags(
        self, out: Tensor, sizes_out: list[int], sizes_in: list[int], into: Tensor, *, copies_own: bool = True
    ) -> Message:
        """Sends this rank's own, too, since owners look the bags of all ranks up alike; nothing is rounded."""
        counters = self.exchange.counters
        return self._everyone.post(out, sizes_out, sizes_in, counters, self._doing, into, copies_own=copies_own)

    def post_rows(self, group: HostRouteGroup, keys: Message) -> Message:
        """Replies with rows, and with vectors."""
        assert isinstance(keys, _Both)
        rows = super().post_rows(group, keys.first)
        look_up, bags = _bag_look_up(group), _owned_bags(group)
        keys.second.wait()
        bags.pool()
        look_up.take_own(bags, self.exchange.rank)
        sizes = bags.num_bags, sizes_of(look_up.bag_bounds)
        vectors = self._post_bags(bags.vectors, *sizes, look_up.vectors, copies_own=False)
        if torch.is_grad_enabled() and not self.exchange.is_frozen:
            bags.compress()
        return _Both(rows, vectors)

    def post_gradients(self, group: HostRouteGroup) -> Message:
        """Sends the gradients of rows, and of vectors."""
        of_rows = super().post_gradients(group)
        look_up, bags = _bag_look_up(group), _owned_bags(group)
        return _Both(
            of_rows, self._post_bags(look_up.gradients, sizes_of(look_up.bag_bounds), bags.num_bags, bags.vectors)
        )

    def prepare(self, groups: Sequence[HostRouteGroup]) -> None:
        """Does what may fail of `push`, without messages."""
        self._apart, self._by_rank = None, []
        if len(groups) == 1 and self.exchange.replicated is None and not self._asks_for_summed_rows(groups[0]):
            self._apart = _owned_bags(groups[0])
            self._apart.compress()
        else:
            self._by_rank = [_owned_bags(group) for group in groups]
            for bags in self._by_rank:
                bags.find_by_rank()
            self.forget()  # what was merged lacks them
        super().prepare(groups)

    def _asks_for_summed_rows(self, group: HostRouteGroup) -> bool:
        """Whether a rank asks for rows of tables that send sums."""
        segments, me = self.exchange.summed_segments, self.exchange.rank
        others = group.opened_as(IncomingBags).accesses[:, segments]
        return bool(others.any() or group.look_up.send.accesses[me, segments].any())

    def _merge(self, groups: Sequence[HostRouteGroup]) -> None:
        super()._merge(groups)
        if self._by_rank:
            self._merged = None

    def push(self, groups: Sequence[HostRouteGroup], gradients: Sequence[Message], update: Update) -> None:
        """Updates rows, once gradients are here."""
        both = [message for message in gradients if isinstance(message, _Both)]
        if self._by_rank:
            for message, bags in zip(both, self._by_rank, strict=True):
                message.second.wait()
                bags.sum_by_rank()
            self._by_rank = []
        super().push(groups, [message.first for message in both], update)
        bags, self._apart = self._apart, None
        if bags is not None:
            both[0].second.wait()
            look_up, unsummed = bags.unsummed()
            self.exchange.apply(unsummed, update)
            send, me = look_up.send, self.exchange.rank
            self.exchange.counters.count_tables(send.accesses[me], send.segment_offsets[me])


def _bag_look_up(group: HostRouteGroup) -> BagLookUp:
    assert isinstance(group.look_up, BagLookUp)
    return group.look_up


def _owned_bags(group: HostRouteGroup) -> OwnedBags:
    return group.opened_as(IncomingBags).bags
