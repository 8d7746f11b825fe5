"""An exchange without deduplication: every id travels to the owner of its row, and every id's row travels back.

What remains of rowmesh is the placement, the arena and the owner's merge and update, so that the exchange makes the
difference. A bag of several ids is summed where it is needed, after its rows have arrived, as deduplicated rows are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh import Mesh, TableSpec
from rowmesh.ops.merge_update import Merger
from rowmesh.placement import AddressMap, Plan, TableShape
from rowmesh.tables import DenseArena, fuse


class DirectExchange:
    """Forward, backward and update of tables of one spec, a plain all-to-all of ids, rows and gradients each.

    Args:
        tables: they fuse into one group.
        batches: ids `[F, b, L]`.
        gradient: of the output, `[b, F · D]`.
        mesh: the ranks.
    """

    def __init__(self, tables: Sequence[TableSpec], batches: Sequence[Tensor], gradient: Tensor, mesh: Mesh) -> None:
        (group,) = fuse(tables)
        self._mesh, self._batches, self._dim = mesh, batches, group.dim
        self._gradient = gradient.view(-1, len(tables), group.dim)
        plan = Plan.cyclic([TableShape.of(table) for table in tables], mesh.world_size)
        address_map = AddressMap(plan, [table.name for table in tables], mesh.rank)
        self._shifts = torch.tensor([table.ranges[0].shift for table in plan.tables])
        self._bases = torch.tensor([address_map.locate(number, 0)[1] for number in range(len(tables))])
        self._arena = DenseArena(group, address_map.num_slots[mesh.rank])
        self._arena.initialize(0, [list(address_map.held(number)) for number in range(len(tables))])
        self._merger = Merger(len(tables))
        self._lr = group.optimizer.lr
        self._steps = self._rounds = self._bytes_sent = 0

    def step(self, number: int) -> None:
        """Forward, backward, update."""
        ids = self._batches[number % len(self._batches)]
        order, slots, counts = self._sort_by_owner(ids)
        incoming = torch.empty_like(counts)
        self._all_to_all(incoming, counts, None, None)
        give, take = counts.sum(1).tolist(), incoming.sum(1).tolist()
        asked = slots.new_empty(sum(take))
        self._all_to_all(asked, slots, take, give)
        rows = torch.empty(len(order), self._dim)
        self._all_to_all(rows, self._arena.rows.index_select(0, asked), give, take)
        self._pool(rows, order, ids)
        gradients = torch.empty(len(asked), self._dim)
        self._all_to_all(gradients, self._expand(order, ids), take, give)
        self._update(asked, incoming, gradients)

    def totals(self) -> tuple[int, int]:
        """All-to-all rounds and bytes sent since the start."""
        return self._rounds, self._bytes_sent

    def _sort_by_owner(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The ids' order by (owner, table); their slots in that order; counts `[W, F]`."""
        world_size, num_tables = self._mesh.world_size, ids.shape[0]
        owners = (ids + self._shifts.view(-1, 1, 1)) % world_size
        slots = (ids // world_size + self._bases.view(-1, 1, 1)).flatten().int()
        order = torch.cat([(owners.flatten() == rank).nonzero().flatten() for rank in range(world_size)])
        counts = torch.stack([(owners == rank).view(num_tables, -1).sum(1) for rank in range(world_size)])
        return order, slots.index_select(0, order), counts

    def _pool(self, rows: Tensor, order: Tensor, ids: Tensor) -> Tensor:
        """`[b, F, D]` from rows in the order they arrived in."""
        in_place = torch.empty_like(rows).index_copy_(0, order, rows)
        return in_place.view(*ids.shape, self._dim).sum(2).transpose(0, 1).contiguous()

    def _expand(self, order: Tensor, ids: Tensor) -> Tensor:
        """The gradient of every id's row, in the order of the owners."""
        by_bag = self._gradient.transpose(0, 1).reshape(-1, self._dim)
        return by_bag.index_select(0, order // ids.shape[2])

    def _update(self, slots: Tensor, counts: Tensor, gradients: Tensor) -> None:
        """Merges what all ranks sent and updates the rows."""
        offsets = np.zeros((len(counts), counts.shape[1] + 1), np.int64)
        np.cumsum(counts.numpy(), axis=1, out=offsets[:, 1:])
        begins = np.concatenate([[0], np.cumsum(offsets[:, -1])])
        row_bytes = 4 * self._dim
        sources = [
            (slots.data_ptr() + 4 * begin, part.ctypes.data, gradients.data_ptr() + row_bytes * begin)
            for begin, part in zip(begins.tolist(), offsets, strict=False)
        ]
        self._merger(sources, row_bytes, len(slots))
        self._steps += 1
        self._arena.apply(self._merger, self._lr, 1.0 / self._mesh.world_size, self._steps)

    def _all_to_all(self, out: Tensor, sent: Tensor, take: list[int] | None, give: list[int] | None) -> None:
        dist.all_to_all_single(out, sent, take, give, group=self._mesh.group)
        self._rounds += 1
        sizes = give or [len(sent) // self._mesh.world_size] * self._mesh.world_size
        others = sum(size for rank, size in enumerate(sizes) if rank != self._mesh.rank)
        self._bytes_sent += others * sent[:1].nbytes
