"""Bag look-ups: what each end keeps of bags that travel, the rank that has them and the owner of their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.errors import RowmeshError
from rowmesh.exchange.bags import WORD_BYTES, BagReader, Bags, Owned, write_bags
from rowmesh.exchange.incoming import bounds_of, sizes_of
from rowmesh.ops import columns
from rowmesh.ops.look_up import HostLookUp, HostLookUps, SendBuffer
from rowmesh.ops.memory import Scratch, held_bytes
from rowmesh.ops.merge_update.handles import UnsummedBySource
from rowmesh.ops.merge_update.sources import Sources
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.ops.simd import STORAGE
from rowmesh.sparse import SparseBatch


class BagLookUp(HostLookUp):
    """A look-up some of whose features send bags; the rows of the others are looked up.

    Attributes:
        words: the messages of its bags.
        sizes: words for each owner.
        bag_bounds: where the vectors from each owner begin, and how many there are.
    """

    def __init__(self, of: HostLookUps, send: SendBuffer) -> None:
        super().__init__(of, send)
        self.words, self._vectors, self._gradients = Scratch(), Scratch(), Scratch()
        self._dim, self._dtype = of.dim, of.dtype
        self._find_rows: Callable[[BagLookUp], HostLookUp] | None = None
        self._own: OwnedBags | None = None
        self._own_bags = [0, 0]
        self._kernels = columns.kernels(of.dim, STORAGE[of.dtype])
        self.drop_bags(of.world_size)

    def drop_bags(self, world_size: int) -> None:
        """Sends no bags."""
        self.sizes, self.bag_bounds, self._columns = (
            [0] * world_size,
            [0] * (world_size + 1),
            np.empty((0, 2), np.int64),
        )

    def take_nothing(self) -> None:
        """Asks for no row, and sends no bags."""
        super().take_nothing()
        self.drop_bags(len(self.sizes))

    def take_bags(
        self,
        batch: SparseBatch,
        layout: GroupLayout,
        owned: Sequence[Owned],
        find_rows: Callable[[BagLookUp], HostLookUp],
    ) -> bool:
        """Sends bags, unless an id is no row of its table.

        Args:
            batch: whose they are.
            layout: of the whole group.
            owned: what sends bags to each owner.
            find_rows: looks the rows up that are in the bags.
        """
        weights = None if batch.weights is None else batch.weights.detach()
        if weights is not None and weights.dtype not in (torch.float32, torch.float64):
            weights = weights.float()
        given = None if weights is None else weights.numpy()
        sizes = write_bags(self.words, batch.ids.numpy(), given, layout.features, owned)
        if sizes is None:
            return False
        self.sizes = sizes
        num_bags = np.array([len(each.features) * batch.batch_size for each in owned])
        self.bag_bounds = bounds_of(num_bags).tolist()
        features = [feature for each in owned for feature in each.features]
        self._columns = np.empty((len(features), 2), np.int64)
        self._columns[:, 0] = layout.features[features, 5]
        self._columns[:, 1] = np.arange(len(features)) * batch.batch_size
        self._find_rows = find_rows
        return True

    @property
    def num_bags(self) -> int:
        """Bags that travel."""
        return self.bag_bounds[-1]

    def reserve_vectors(self) -> None:
        """Makes room for the vectors of its bags, and for their gradients."""
        num_bytes = self.num_bags * self._dim * self._dtype.itemsize
        self._vectors.reserve(num_bytes)
        self._gradients.reserve(num_bytes)

    @property
    def vectors(self) -> Tensor:
        """`[bags, D]`: what comes from owners, feature by feature."""
        return self._vectors.buffer.tensor(self._dtype, self.num_bags, self._dim)

    @property
    def gradients(self) -> Tensor:
        """`[bags, D]`: the gradients of the vectors."""
        return self._gradients.buffer.tensor(self._dtype, self.num_bags, self._dim)

    def pool(self, layout: GroupLayout, weights: Tensor | None, output: Tensor) -> None:
        """Writes the group's columns of the output, those of sums too."""
        super().pool(layout, weights, output)
        if not self.num_bags:
            return
        assert self._own is not None
        begins, (first, end) = self._columns[:, 1], self._own_bags
        is_own = (begins >= first) & (begins < end)
        self._own.pool_into(output, self._columns[is_own, 0])
        others = self._columns[~is_own]
        self._kernels.scatter(
            self._vectors.buffer.address, others.ctypes.data, len(others), *output.shape, output.data_ptr()
        )

    def take_own(self, bags: OwnedBags, rank: int) -> None:
        """Takes what looks up the bags that this rank owns itself, and its own number."""
        self._own, self._own_bags = bags, self.bag_bounds[rank : rank + 2]

    def backward(self, layout: GroupLayout, grad: Tensor) -> None:
        """Writes the summed gradient of every row into the send buffer, and those of sums as they are."""
        super().backward(layout, grad)
        self._kernels.pack(
            self._gradients.buffer.address, self._columns.ctypes.data, len(self._columns), *grad.shape, grad.data_ptr()
        )

    def keep_rows(self) -> Tensor:
        """As for any look-up; rows of bags are at their owners.

        Raises:
            RowmeshError: it has bags.
        """
        if self.num_bags:
            raise RowmeshError(
                "weights of ids get gradients only where their batch was looked up with gradients enabled: tables "
                "that send sums have no rows here; route it with gradients enabled, too"
            )
        return super().keep_rows()

    def by_row(self) -> list[HostLookUp]:
        """Look-ups that have the gradients of all its rows summed; of bags they are summed now."""
        if not self.num_bags:
            return [self]
        assert self._find_rows is not None
        return [self, self._find_rows(self)]

    def is_finite(self) -> Tensor:
        """Whether all summed gradients are finite: one boolean."""
        mine = super().is_finite()
        return mine & self.by_row()[1].is_finite() if self.num_bags else mine

    def messages(self, owned: Sequence[Owned]) -> list[tuple[NDArray[np.uint32], Owned]]:
        """Its bags, as they travel to each owner."""
        return split_words(self.words, self.sizes, owned)


def split_words(words: Scratch, sizes: Sequence[int], owned: Sequence[Owned]) -> list[tuple[NDArray[np.uint32], Owned]]:
    """Messages that stand one after the other."""
    bounds = bounds_of(np.array(sizes)).tolist()
    whole = words.buffer.array(np.uint32, bounds[-1])
    return [(whole[begin:end], each) for begin, end, each in zip(bounds, bounds[1:], owned, strict=False)]


class OwnedBags:
    """The bags of all ranks that one owner looks up, of one fetch; lent to it.

    Args:
        owned: of this rank.
        rank: its number.
        per_node: G; gradients are summed node by node.
        look_ups: of the features that it owns, of each rank, by table.
        by_rank: the same of one rank.
        give_back: takes this, when its route is gone.

    Attributes:
        words: the messages.
        sizes: words of each rank.
    """

    def __init__(
        self,
        owned: Owned,
        rank: int,
        per_node: int,
        look_ups: HostLookUps,
        by_rank: HostLookUps,
        give_back: Callable[[OwnedBags], None],
    ) -> None:
        self._owned, self._rank, self._per_node, self._give_back = owned, rank, per_node, give_back
        self._look_ups, self._look_ups_by_rank = look_ups, by_rank
        self.words, self.sizes = Scratch(), list[int]()
        self._vectors, self._inverse, self._inverse_by_rank = Scratch(), Scratch(), Scratch()
        self._read = BagReader(look_ups.dim)
        self._bags: Bags | None = None
        self._layout: GroupLayout | None = None
        self._look_up: HostLookUp | None = None
        self._by_rank: list[tuple[HostLookUp, GroupLayout]] = []

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return held_bytes(self) + self._read.num_bytes

    def expect(self, sizes: Sequence[int]) -> None:
        """Takes the words that each rank will send."""
        self.sizes = list(sizes)

    def reserve_words(self) -> None:
        """Makes room for the messages."""
        self.words.reserve(WORD_BYTES * sum(self.sizes))

    @property
    def bags(self) -> Bags:
        """What has come; read once."""
        if self._bags is None:
            owned = [self._owned] * len(self.sizes)
            self._bags = self._read(split_words(self.words, self.sizes, owned))
            self._vectors.reserve(self._bags.bounds[-1] * self._look_ups.gradient_bytes)
        return self._bags

    @property
    def num_bags(self) -> list[int]:
        """Bags of each rank."""
        return sizes_of(self.bags.bounds)

    @property
    def vectors(self) -> Tensor:
        """`[bags, D]`: what is sent back, then the gradients that come."""
        return self._vectors.buffer.tensor(self._look_ups.dtype, self.bags.bounds[-1], self._look_ups.dim)

    def pool(self) -> None:
        """Makes the vectors of other ranks' bags."""
        look_up, _ = self._found()
        others = self.bags.layout(self.bags.messages != self._rank)
        look_up.pool(others, self.bags.weights, self.vectors)

    def pool_into(self, output: Tensor, begins: NDArray[np.int64]) -> None:
        """Writes the vectors of this rank's bags.

        Args:
            output: `[B, width]`.
            begins: in which column those of each feature begin.
        """
        look_up, _ = self._found()
        descriptors = self.bags.descriptors[self.bags.messages == self._rank]
        if not descriptors[:, 4].any():
            return
        descriptors[:, 5], descriptors[:, 6] = begins, output.shape[1]
        num_ids = int((descriptors[:, 1] - descriptors[:, 0]).sum())
        look_up.pool(GroupLayout(descriptors, num_ids, self.bags.is_weighted), self.bags.weights, output)

    def _found(self) -> tuple[HostLookUp, GroupLayout]:
        if self._look_up is None or self._layout is None:
            self._layout = self.bags.layout()
            self._look_up = self._look_ups.look_up(self.bags.ids, self._layout, self._inverse)
        return self._look_up, self._layout

    def compress(self) -> None:
        """Files the cells of every row, for the update; may run while vectors travel."""
        look_up, layout = self._found()
        look_up.compress(layout)

    def unsummed(self) -> tuple[HostLookUp, UnsummedBySource]:
        """Rows whose gradients have come, to be summed rank by rank as they are updated."""
        look_up, layout = self._found()
        ends = np.array(self.bags.bounds[1:], np.int64) * self._look_ups.dim
        return look_up, look_up.unsummed_by_source(layout, self.vectors, ends, self._per_node)

    def find_by_rank(self) -> None:
        """Looks the bags of each rank up by themselves, whose sums others are added to."""
        self._drop_by_rank()
        look_ups, bags = self._look_ups_by_rank, self.bags
        for rank in range(len(self.sizes)):
            layout = bags.layout(bags.messages == rank)
            look_up = look_ups.look_up(bags.ids, layout, self._inverse_by_rank)
            self._by_rank.append((look_up, layout))
            look_up.send.reserve_gradients(look_up.num_unique * look_ups.gradient_bytes)

    def add_to(self, sources: Sources, rank: int) -> None:
        """Adds what `find_by_rank` found of a rank; their sums are made by `sum_by_rank`."""
        if not self._by_rank:
            return
        send, me = self._by_rank[rank][0].send, self._rank
        sources.add(send.slots_address, send.segment_offsets[me], send.gradients.address, send.accesses[me])

    def sum_by_rank(self) -> None:
        """Sums the gradients of each rank, which have come."""
        for look_up, layout in self._by_rank:
            if layout.is_weighted:
                look_up.weigh(layout, self.bags.weights)
            look_up.backward(layout, self.vectors)

    def _drop_by_rank(self) -> None:
        for look_up, _ in self._by_rank:
            self._look_ups_by_rank.give_back(look_up)
        self._by_rank = []

    def release(self) -> None:
        """Gives all memory back."""
        self._drop_by_rank()
        if self._look_up is not None:
            self._look_ups.give_back(self._look_up)
        self._look_up = self._layout = self._bags = None
        self._give_back(self)
