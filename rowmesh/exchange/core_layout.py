"""The fused vector of core gradients: where each tensor-train table's are, and which slices a rank read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowmesh.ops.memory import round_up
from rowmesh.tensor_train.arena import Cores

_ALIGNMENT = 16  # elements: a cache line of float32


@dataclass(frozen=True)
class CoreView:
    """One table in the fused vector.

    Attributes:
        gradients: of its cores, of their shapes.
        touched: for each core an element a slice, not 0 where a rank read it.
    """

    gradients: list[Tensor]
    touched: list[Tensor]


class CoreLayout:
    """Where the gradients of each table are in the fused vector.

    Args:
        tables: in the order of the vector.

    Attributes:
        size: elements of the vector.
    """

    def __init__(self, tables: Sequence[Cores]) -> None:
        self.size = 0
        self._places = {cores.table: [self._place(tuple(core.shape)) for core in cores.cores] for cores in tables}
        self._touched = {cores.table: [self._place((len(core),)) for core in cores.cores] for cores in tables}
        self._digest = self.size
        self.size += _ALIGNMENT
        self._views: dict[int, dict[str, CoreView]] = {}

    def _place(self, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        begin = self.size
        self.size += round_up(math.prod(shape), _ALIGNMENT)
        return begin, shape

    def views(self, vector: Tensor) -> dict[str, CoreView]:
        """The parts of a vector, by table; vectors come again and again."""
        if vector.data_ptr() not in self._views:
            self._views[vector.data_ptr()] = {
                table: CoreView(_cut(vector, places), _cut(vector, self._touched[table]))
                for table, places in self._places.items()
            }
        return self._views[vector.data_ptr()]

    def write_digest(self, vector: Tensor, digest: int) -> None:
        """Lays out 32 bits so that from sums over ranks it can be told whether all had the same: four bits each, x
        and x², whose sums over W ranks are (Σx)² = W · Σx² only where all x are equal. Small numbers are added exactly.
        """
        parts = [digest >> shift & 15 for shift in range(0, 32, 4)]
        values = torch.tensor([*parts, *(part * part for part in parts)], dtype=vector.dtype, device="cpu")
        vector[self._digest : self._digest + _ALIGNMENT] = values

    def has_one_digest(self, total: Tensor, world_size: int) -> bool:
        """Whether all ranks wrote the same.

        >>> layout = CoreLayout([])
        >>> vectors = torch.zeros(3, layout.size)
        >>> for vector, digest in zip(vectors, (7, 7, 6)):
        ...     layout.write_digest(vector, digest)
        >>> layout.has_one_digest(vectors[:2].sum(0), 2), layout.has_one_digest(vectors.sum(0), 3)
        (True, False)
        """
        sums = total[self._digest : self._digest + _ALIGNMENT].tolist()
        return all(x * x == world_size * squares for x, squares in zip(sums[:8], sums[8:], strict=True))


def _cut(vector: Tensor, places: Sequence[tuple[int, tuple[int, ...]]]) -> list[Tensor]:
    return [vector[begin : begin + math.prod(shape)].view(shape) for begin, shape in places]
