"""The inputs of `benchmarks.gpu_ops`: look-ups of Criteo's tables under a power law, rows of given dims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from benchmarks.gpu_timing import COPY, Case
from benchmarks.workload import NUM_TABLES, Workload, make_batches
from rowmesh.ops.gather import cuda as gather_ops
from rowmesh.ops.merge import cuda as merge_ops
from rowmesh.ops.merge_update import cuda as update_ops
from rowmesh.ops.pool import cuda as pool_ops
from rowmesh.ops.pool.handles import Bags
from rowmesh.ops.segment_unique import cuda as unique_ops
from rowmesh.tables.update_rules import RowWiseAdaGrad

COPY_SHARE = 0.8
_ELEMENT_BYTES, _ID_BYTES, _INVERSE_BYTES = 4, 8, 4


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large everything is.

    Attributes:
        ids: of each of the 26 tables, a batch.
        max_rows: cap on the rows that ids are drawn from; 0 for none.
        table_rows: of the table that rows are gathered from and updated in.
        entries: gathered, or merged.
        distinct: how many of the merged ones differ at most.
        dims: of rows.
        poolings: ids a bag.
        zipf: exponent of the distribution of ids.
    """

    ids: int = 65_536
    max_rows: int = 0
    table_rows: int = 10_000_000
    entries: int = 2**20
    distinct: int = 2**18
    dims: tuple[int, ...] = (64, 128)
    poolings: tuple[int, ...] = (1, 8)
    zipf: float = 1.1


QUICK = Sizes(ids=4096, max_rows=100_000, table_rows=200_000, entries=2**16, distinct=2**14, dims=(64,))


def draw_ids(sizes: Sizes, pooling: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The ids of a batch, `[26 · ids]` table by table, and the offsets of tables."""
    workload = Workload(max_rows=sizes.max_rows, pooling=pooling, zipf=sizes.zipf, global_batch=sizes.ids // pooling)
    ids = make_batches(workload, 0, 1, 1)[0].ids.flatten().to(device)
    return ids, torch.arange(NUM_TABLES + 1, device=device) * (ids.numel() // NUM_TABLES)


def segment_unique_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Beside `torch.unique` of each segment, and one over ids to which their segment's base is added."""
    ids, offsets = draw_ids(sizes, 1, device)
    num_ids, count = ids.numel(), ids.numel() // NUM_TABLES
    bases = torch.arange(NUM_TABLES, device=device).repeat_interleave(count) * int(ids.max() + 1)
    scratch, out = unique_ops.Scratch(num_ids, device), unique_ops.Unique.empty(num_ids, NUM_TABLES, device)

    def ours() -> unique_ops.Unique:
        return unique_ops.segment_unique(ids, offsets, scratch=scratch, out=out)

    def per_segment() -> list[tuple[Tensor, ...]]:
        return [torch.unique(part, return_inverse=True) for part in ids.split(count)]

    def combined() -> tuple[Tensor, ...]:
        return torch.unique(ids + bases, return_inverse=True)

    def check() -> None:
        expected, found = len(combined()[0]), int(ours().num_unique)
        assert found == expected, f"segment_unique finds {found} ids, torch.unique {expected}"
        assert torch.equal(out.unique[out.inverse.long()], ids), "segment_unique: unique[inverse] is not ids"

    found = len(combined()[0])
    yield Case(
        f"segment_unique {NUM_TABLES}x{count}",
        ours,
        {"torch.unique per segment": per_segment, "one torch.unique": combined},
        num_ids * (_ID_BYTES + _INVERSE_BYTES) + found * (_ID_BYTES + _INVERSE_BYTES),
        check,
        {"torch.unique per segment": 5.0, "one torch.unique": 2.0},
    )


def gather_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Rows spread evenly over the table, each once at most: nothing comes from a cache."""
    for dim in sizes.dims:
        table = torch.randn(sizes.table_rows, dim, device=device)
        slots = torch.randperm(sizes.table_rows, device=device)[: sizes.entries]
        out = torch.empty(len(slots), dim, device=device)

        def ours(table: Tensor = table, slots: Tensor = slots, out: Tensor = out) -> Tensor:
            return gather_ops.gather(table, slots, out)

        def peer(table: Tensor = table, slots: Tensor = slots, out: Tensor = out) -> Tensor:
            return torch.index_select(table, 0, slots, out=out)

        moved = len(slots) * (2 * dim * _ELEMENT_BYTES + _ID_BYTES)
        yield Case(
            f"gather dim {dim}", ours, {"index_select": peer}, moved, _same("gather", ours, peer), {COPY: COPY_SHARE}
        )


def pool_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Forward and backward; what each id's row and cell are is known, but for filing the cells, which is timed too."""
    for pooling in sizes.poolings:
        ids, offsets = draw_ids(sizes, pooling, device)
        unique = unique_ops.segment_unique(ids, offsets)
        for dim in sizes.dims:
            yield from _pool_cases(unique.inverse, int(unique.num_unique), pooling, dim)


def _pool_cases(inverse: Tensor, num_rows: int, pooling: int, dim: int) -> Iterator[Case]:
    device, num_ids = inverse.device, inverse.numel()
    count = num_ids // NUM_TABLES // pooling
    bags = Bags.describe(
        [
            (f * count * pooling, (f + 1) * count * pooling, -1, pooling, count, f * dim, NUM_TABLES * dim, 0)
            for f in range(NUM_TABLES)
        ],
        device,
    )
    rows, out = torch.randn(num_rows, dim, device=device), torch.empty(count, NUM_TABLES * dim, device=device)
    row_of_bag = inverse.view(-1, pooling)

    def ours() -> Tensor:
        return pool_ops.pool(rows, inverse, bags, out)

    def peer() -> Tensor:
        return embedding_bag(row_of_bag, rows, mode="sum")

    def in_our_order() -> Tensor:
        return peer().view(NUM_TABLES, count, dim).transpose(0, 1).reshape(count, NUM_TABLES * dim)

    name, row_bytes = f"dim {dim}, {pooling} id(s) a bag", dim * _ELEMENT_BYTES
    moved = (num_rows + out.numel() // dim) * row_bytes + num_ids * _INVERSE_BYTES
    targets = {COPY: COPY_SHARE}
    yield Case(f"pool {name}", ours, {"embedding_bag": peer}, moved, _same("pool", ours, in_our_order, 1e-5), targets)
    # Small whole numbers: a hot row has 50,000 of them, whose sum would otherwise depend on the order.
    grad, sums = torch.randint(-8, 9, out.shape, device=device).to(out.dtype), torch.empty_like(rows)
    by_id = grad.view(count, NUM_TABLES, dim).transpose(0, 1).reshape(-1, dim).repeat_interleave(pooling, 0)
    filed = pool_ops.file_cells(inverse, bags, num_rows)

    def ours_backward() -> Tensor:
        return pool_ops.backward(grad, filed, sums)

    def with_filing() -> Tensor:
        return pool_ops.backward(grad, pool_ops.file_cells(inverse, bags, num_rows), sums)

    def torch_backward() -> Tensor:
        return torch.ops.aten.embedding_dense_backward(by_id, inverse, num_rows, -1, False)

    check = _same("pool backward", ours_backward, torch_backward)
    moved += num_ids * (_ID_BYTES - _INVERSE_BYTES)
    peers = {"with filing the cells": with_filing, "embedding_dense_backward": torch_backward}
    yield Case(f"pool backward {name}", ours_backward, peers, moved, check, targets)


def merge_update_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Row-wise AdaGrad of rows that several ranks ask for; the peer coalesces, then updates by index."""
    rule = RowWiseAdaGrad(lr=0.01)
    numbers = rule.numbers(0.01, 1.0, 1)
    for dim in sizes.dims:
        known = torch.randperm(sizes.table_rows, device=device)[: sizes.distinct]
        slots = known[torch.randint(len(known), (sizes.entries,), device=device)]
        gradients = torch.randn(len(slots), dim, device=device)
        tables = [(torch.zeros(sizes.table_rows, dim, device=device), _state(sizes, device)) for _ in range(2)]
        merged, num_distinct = merge_ops.merge(slots), len(torch.unique(slots))
        yield _merge_update_case(dim, slots, gradients, tables, merged, num_distinct, rule.name, numbers)


def _state(sizes: Sizes, device: torch.device) -> Tensor:
    return torch.zeros(sizes.table_rows, device=device)


def _merge_update_case(
    dim: int,
    slots: Tensor,
    gradients: Tensor,
    tables: list[tuple[Tensor, Tensor]],
    merged: merge_ops.Merged,
    num_distinct: int,
    rule: str,
    numbers: tuple[float, ...],
) -> Case:
    (rows, state), (peer_rows, peer_state) = tables
    lr, _, eps, *_ = numbers

    def ours() -> None:
        update_ops.update(rows, (state,), merge_ops.merge(slots), gradients, rule, numbers)

    def without_merge() -> None:
        update_ops.update(rows, (state,), merged, gradients, rule, numbers)

    def peer() -> None:
        summed = torch.sparse_coo_tensor(slots[None], gradients, peer_rows.shape, check_invariants=False).coalesce()
        index, values = summed.indices()[0], summed.values()
        peer_state[index] += values.square().mean(1)
        peer_rows[index] -= lr / (peer_state[index].sqrt() + eps)[:, None] * values

    def check() -> None:
        for tensor in (rows, state, peer_rows, peer_state):
            tensor.zero_()
        ours()
        peer()
        torch.testing.assert_close(rows, peer_rows, rtol=1e-4, atol=1e-6, msg="merge_update: rows differ from torch's")

    moved = len(slots) * (dim * _ELEMENT_BYTES + _ID_BYTES) + 2 * num_distinct * (dim + 1) * _ELEMENT_BYTES
    return Case(
        f"merge + update dim {dim}",
        ours,
        {"update alone": without_merge, "coalesce, index": peer},
        moved,
        check,
        {COPY: COPY_SHARE},
    )


def _same(
    name: str, ours: Callable[[], Tensor], theirs: Callable[[], Tensor], tolerance: float = 0.0
) -> Callable[[], None]:
    def check() -> None:
        torch.testing.assert_close(
            ours(), theirs(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{name} differs from torch's: {text}"
        )

    return check


CASES = {
    "segment_unique": segment_unique_cases,
    "gather": gather_cases,
    "pool": pool_cases,
    "merge_update": merge_update_cases,
}
