"""One look-up: its distinct ids, in the order that kernels want, with what its backward needs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import IdRangeError
from rowmesh.ops.memory import Buffer, Scratch
from rowmesh.ops.segment_unique.cpu import SegmentHash
from rowmesh.ops.simd import STORAGE
from rowmesh.ops.tensor_train import ARRANGED, Constants, arrange, backward_kernel, forward_kernel
from rowmesh.tables.tensor_train import TensorTrainShape

_MAX_IDLE = 8
_LONGS, _WORDS = 4, 13  # arrays as long as the ids: int64 and uint32


class LookedUp(Protocol):
    """A look-up, wherever its kernels run; `Lookup` says what each is.

    Attributes:
        shape: of the table.
        dtype: of its cores.
        num_unique: the most distinct ids that it can have: U on a CPU, N on a device, where U stays.
    """

    shape: TensorTrainShape
    dtype: torch.dtype

    @property
    def num_unique(self) -> int: ...

    def check(self) -> None: ...

    def inverse_ids(self) -> Tensor: ...

    def id_counts(self) -> Tensor: ...

    def new_rows(self, cores: Sequence[Tensor], keep: bool) -> Tensor: ...

    def release_products(self) -> None: ...

    def gradients(self, cores: Sequence[Tensor], row_gradients: Tensor, sparse: bool) -> tuple[Tensor, ...]: ...

    def update(
        self, cores: Sequence[Tensor], row_gradients: Tensor, rule: str, states: Sequence[Sequence[Tensor]],
        numbers: tuple[float, ...],
    ) -> None: ...  # fmt: skip


class _Loan:
    """A buffer that goes back when nobody refers to the loan any more."""

    __slots__ = ("_idle", "buffer")

    def __init__(self, idle: deque[Buffer], num_bytes: int) -> None:
        self._idle = idle
        try:
            buffer = idle.pop()
        except IndexError:
            buffer = Buffer(64)
        if not num_bytes <= buffer.num_bytes <= 8 * num_bytes + (1 << 20):
            buffer = Buffer(num_bytes + num_bytes // 8)
        self.buffer = buffer

    def __del__(self) -> None:
        self._idle.append(self.buffer)


class Workspace(threading.local):
    """Memory that look-ups of a module use again and again; each thread has its own.

    Copies and pickles of it are empty.
    """

    def __init__(self) -> None:
        self.hash = SegmentHash([0])
        self.scratch = {
            name: Scratch() for name in ("buckets", "products", "group", "slices", "gradients", "slice", "rows")
        }
        self.index: deque[Buffer] = deque(maxlen=_MAX_IDLE)
        self.floats: deque[Buffer] = deque(maxlen=_MAX_IDLE)
        self.segments = np.zeros(1, np.int64)
        self._identity = np.arange(0, dtype=np.uint32)

    def identity(self, count: int) -> int:
        """Address of uint32 0, 1, 2, …"""
        if count > len(self._identity):
            self._identity = np.arange(2 * count, dtype=np.uint32)
        return self._identity.ctypes.data

    @property
    def num_bytes(self) -> int:
        """Memory that no look-up uses now."""
        idle = [*self.scratch.values(), *self.index, *self.floats]
        return self._identity.nbytes + sum(memory.num_bytes for memory in idle)

    def __reduce__(self) -> Any:
        return (Workspace, ())


class Lookup:
    """The distinct ids of a batch, sorted by prefix and by slice of the second core.

    Args:
        shape: of the table.
        dtype: of its cores.
        ids: int64 `[N]`, contiguous.
        workspace: where memory comes from.
        distinct: whether the ids are known to differ; `inverse` and `counts` are then not made.

    Attributes:
        num_ids, num_unique, num_prefixes, num_groups: N, U, distinct (i₁, i₂), distinct i₂.
        unique: address of int64 `[U]`: the distinct ids, in order of first appearance.
        inverse: address of uint32 `[N]`: which of them each id is.
        counts: address of uint32 `[U]`: how often each occurs.

    Raises:
        IdRangeError: an id is below 0 or past the table.
    """

    def __init__(
        self, shape: TensorTrainShape, dtype: torch.dtype, ids: Tensor, workspace: Workspace, *, distinct: bool = False
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self._workspace = shape, dtype, workspace
        self._constants = Constants(shape.dim_factors, shape.ranks, STORAGE[dtype])
        self.num_ids = ids.numel()
        self._reserve(self.num_ids)
        self.num_unique = self._copy(ids) if distinct else self._find_unique(ids)
        self._arrange()
        self._products: _Loan | None = None

    @classmethod
    def merged(cls, taken: Sequence[tuple[Lookup, Tensor]]) -> tuple[Lookup, Tensor]:
        """Several look-ups in one table, with the gradients of their rows, as one: those of equal ids are summed.

        The sums are in the order of the look-ups.
        """
        first = taken[0][0]
        ids = torch.cat([lookup.unique_ids for lookup, _ in taken])
        lookup = cls(first.shape, first.dtype, ids, first._workspace)
        gradients = torch.zeros(lookup.num_unique, first.shape.dim, dtype=first.dtype, device="cpu")
        gradients.index_add_(0, lookup.inverse_ids(), torch.cat([gradient for _, gradient in taken]))
        return lookup, gradients

    def _reserve(self, num_ids: int) -> None:
        count = num_ids + 1
        self._index = _Loan(self._workspace.index, count * (8 * _LONGS + 4 * _WORDS))
        first_word = self._index.buffer.address + 8 * _LONGS * count
        self.unique, *self._touched = range(self._index.buffer.address, first_word, 8 * count)
        (
            self.inverse, self.counts, self._order, self._arranged, self._lasts, self._last_slots, self._starts,
            self._firsts, self._first_slots, self._group_starts, self._keys, _, _,
        ) = range(first_word, first_word + 4 * _WORDS * count, 4 * count)  # fmt: skip

    def _copy(self, ids: Tensor) -> int:
        self._long_view(self.unique, self.num_ids)[:] = ids.numpy()
        return self.num_ids

    def _find_unique(self, ids: Tensor) -> int:
        bounds, found = np.array([0, self.num_ids], np.int64), np.zeros(2, np.int64)
        self._workspace.hash(
            ids.data_ptr(), bounds.ctypes.data, 8, self._workspace.segments.ctypes.data, 1,
            self.unique, self.counts, self.inverse, found.ctypes.data,
        )  # fmt: skip
        return int(found[1])

    def _arrange(self) -> None:
        shape, counts = self.shape, np.zeros(ARRANGED, np.int64)
        refused = arrange(
            self.unique, self.num_unique, shape.num_rows, *shape.row_factors, self._keys, self._order,
            self._workspace.scratch["buckets"].reserve(8 * max(shape.row_factors)),
            self._arranged, self._lasts, self._last_slots, self._starts, self._firsts, self._first_slots,
            self._group_starts, *self._touched, counts.ctypes.data,
        )  # fmt: skip
        if refused >= 0:
            self._refuse()
        prefixes, groups, touched1, touched3, largest = counts.tolist()
        self.num_prefixes, self.num_groups, self._largest_group = prefixes, groups, largest
        self._num_touched = (touched1, groups, touched3)

    def _refuse(self) -> None:
        ids = self._long_view(self.unique, self.num_unique)
        raise refusal(ids[(ids < 0) | (ids >= self.shape.num_rows)].tolist(), self.shape.num_rows)

    def _long_view(self, address: int, count: int) -> np.ndarray:
        offset = address - self._index.buffer.address
        return self._index.buffer.array(np.int64, count, offset=offset)

    def _word_view(self, address: int, count: int) -> np.ndarray:
        return self._index.buffer.array(np.uint32, count, offset=address - self._index.buffer.address)

    def check(self) -> None:
        """Nothing is left to be checked: ids that are no rows were refused when they were sorted."""

    @property
    def unique_ids(self) -> Tensor:
        """The distinct ids, a copy."""
        return torch.from_numpy(self._long_view(self.unique, self.num_unique).copy())

    def inverse_ids(self) -> Tensor:
        """int64 `[N]`: which distinct id each id is, a copy."""
        return torch.from_numpy(self._word_view(self.inverse, self.num_ids).astype(np.int64))

    def id_counts(self) -> Tensor:
        """int64 `[U]`: how often each distinct id occurs, a copy."""
        return torch.from_numpy(self._word_view(self.counts, self.num_unique).astype(np.int64))

    @property
    def identity(self) -> int:
        """Address of uint32 `[U]`: 0, 1, 2, …"""
        return self._workspace.identity(self.num_unique)

    def touched(self, core: int) -> Tensor:
        """int64: the slices of a core that any id reads, ascending, a copy."""
        return torch.from_numpy(self._long_view(self._touched[core], self._num_touched[core]).copy())

    def row_buffer(self) -> int:
        """Memory for `[U, D]`, until the next look-up of this thread."""
        return self._workspace.scratch["rows"].reserve(self.num_unique * self.shape.dim * self.dtype.itemsize)

    def rows(self, cores: Sequence[Tensor], address: int, keep: bool) -> None:
        """Writes the row of each distinct id to `address`; keeps the products for the backward, where asked to."""
        product_bytes = self._constants.product_elements * self.dtype.itemsize
        if keep:
            self._products = _Loan(self._workspace.floats, self.num_prefixes * product_bytes)
            products = self._products.buffer.address
        else:
            products = self._workspace.scratch["products"].reserve(self._largest_group * product_bytes)
        forward_kernel(self._constants)(
            *(core.data_ptr() for core in cores), self._arranged, self._lasts, self._starts, self._firsts,
            self._group_starts, self._touched[1], self.num_groups, keep, products, address,
        )  # fmt: skip

    def release_products(self) -> None:
        """Gives the products of prefixes back; a second backward makes them again."""
        self._products = None

    def new_rows(self, cores: Sequence[Tensor], keep: bool) -> Tensor:
        """As `rows`, `[U, D]` in memory of its own."""
        out = torch.empty(self.num_unique, self.shape.dim, dtype=self.dtype, device="cpu")
        self.rows(cores, out.data_ptr(), keep)
        return out

    def gradients(self, cores: Sequence[Tensor], row_gradients: Tensor, sparse: bool) -> tuple[Tensor, ...]:
        """The gradients of the cores, dense or as sparse tensors of the touched slices.

        Args:
            row_gradients: `[U, D]`, of the rows of the distinct ids, contiguous.
            sparse: like `nn.EmbeddingBag`'s.
        """
        if not sparse:
            found = [torch.zeros_like(core) for core in cores]
            self.fill_gradients(cores, row_gradients, found)
            return tuple(found)
        pairs = zip(self._num_touched, cores, strict=True)
        found = [torch.zeros(size, *core.shape[1:], dtype=self.dtype, device="cpu") for size, core in pairs]
        stride2 = found[1][0].numel() * self.dtype.itemsize if self.num_groups else 0
        addresses = [gradient.data_ptr() for gradient in found]
        self._backward(cores, row_gradients.data_ptr(), addresses, True, stride2, None, [0] * 6, (0.0,) * 6)
        return tuple(
            torch.sparse_coo_tensor(
                self.touched(k).unsqueeze(0), found[k], core.shape, is_coalesced=True, check_invariants=False
            )
            for k, core in enumerate(cores)
        )

    def fill_gradients(self, cores: Sequence[Tensor], row_gradients: Tensor, out: Sequence[Tensor]) -> None:
        """Writes the gradients of the cores into contiguous tensors of their shapes, which are zero."""
        stride2 = out[1][0].numel() * self.dtype.itemsize
        addresses = [gradient.data_ptr() for gradient in out]
        self._backward(cores, row_gradients.data_ptr(), addresses, False, stride2, None, [0] * 6, (0.0,) * 6)

    def fill_touched(self, out: Sequence[Tensor]) -> None:
        """Sets the elements of slices that any id reads to 1; of each core a tensor with an element a slice."""
        for number, touched in enumerate(out):
            touched.numpy()[self.touched(number).numpy()] = 1

    def update(
        self, cores: Sequence[Tensor], row_gradients: Tensor, rule: str, states: Sequence[Sequence[Tensor]],
        numbers: tuple[float, ...],
    ) -> None:  # fmt: skip
        """Updates the touched slices of the cores in place.

        Args:
            row_gradients: as for `gradients`.
            rule: the name of an update rule.
            states: of each core, of its shape.
            numbers: learning rate, factor of gradients, eps, β₁, β₂, correction, as in `rowmesh.ops.merge_update`.
        """
        element, (n1, n2, n3) = self.dtype.itemsize, self._constants.slice_elements
        size1, size3 = self._num_touched[0] * n1 * element, self._num_touched[2] * n3 * element
        gradients = self._workspace.scratch["gradients"]
        gradient1 = gradients.reserve(size1 + size3)
        gradients.buffer.bytes[: size1 + size3] = 0
        addresses = [gradient1, self._workspace.scratch["slice"].reserve(n2 * element), gradient1 + size1]
        self._backward(cores, row_gradients.data_ptr(), addresses, True, 0, rule, addresses_of(states), numbers)

    def _backward(
        self, cores: Sequence[Tensor], row_gradients: int, gradients: Sequence[int], compact: bool, stride2: int,
        rule: str | None, states: Sequence[int], numbers: tuple[float, ...],
    ) -> None:  # fmt: skip
        if self._products is None:
            self._make_products(cores)
        assert self._products is not None
        element, scratch = self.dtype.itemsize, self._workspace.scratch
        product, slice1 = self._constants.product_elements, self._constants.slice_elements[0]
        backward_kernel(self._constants, rule)(
            *(core.data_ptr() for core in cores), self._arranged, self._lasts, self._last_slots, self._starts,
            self._firsts, self._first_slots, self._group_starts, self._touched[1], self.num_groups,
            self._products.buffer.address, row_gradients,
            scratch["group"].reserve(self._largest_group * product * element),
            scratch["slices"].reserve(self._largest_group * slice1 * element),
            *gradients, compact, stride2, self._touched[0], self._num_touched[0], self._touched[2],
            self._num_touched[2], *states, *numbers,
        )  # fmt: skip

    def _make_products(self, cores: Sequence[Tensor]) -> None:
        self.new_rows(cores, keep=True)


def refusal(wrong: list[int], num_rows: int) -> IdRangeError:
    """The error for distinct ids that are no rows.

    >>> refusal([9, -1], 5)
    IdRangeError('2 distinct ids are outside the table, whose ids are 0 to 4: [9, -1]')
    """
    return IdRangeError(
        f"{len(wrong)} distinct ids are outside the table, whose ids are 0 to {num_rows - 1}: {wrong[:5]}"
        f"{' …' if len(wrong) > 5 else ''}"
    )


def addresses_of(states: Sequence[Sequence[Tensor]]) -> list[int]:
    """Of two states a core, 0 where there are none.

    >>> addresses_of([(), (), ()])
    [0, 0, 0, 0, 0, 0]
    """
    return [kept[k].data_ptr() if k < len(kept) else 0 for kept in states for k in range(2)]
