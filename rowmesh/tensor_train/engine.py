"""Engine: where a TensorTrainEmbeddingBag looks up, the CPU or a device, as far as the module has to know."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from rowmesh.tables.tensor_train import TensorTrainShape
from rowmesh.tensor_train.bags import Bags, Pooling
from rowmesh.tensor_train.functions import Pools
from rowmesh.tensor_train.lookup import LookedUp, Lookup, Workspace


class Engine(Protocol):
    """Looks up by the cores of one table."""

    def check(self, mode: str, sparse: bool) -> None:
        """Raises ConfigurationError for what it cannot do."""
        ...

    def look_up(self, shape: TensorTrainShape, dtype: torch.dtype, ids: Tensor) -> LookedUp:
        """The distinct ids of int64 `[N]`.

        Raises:
            IdRangeError: an id is outside the table, or one of an earlier look-up was.
        """
        ...

    def look_up_bags(
        self, shape: TensorTrainShape, dtype: torch.dtype, input: Tensor, offsets: Tensor | None,
        weights: Tensor | None, include_last_offset: bool, padding: int | None,
    ) -> tuple[Bags, LookedUp]:  # fmt: skip
        """Arguments of `nn.EmbeddingBag.forward` as bags, without the ids that only pad, and the distinct ids.

        Raises:
            IdRangeError: as for `look_up`.
            ValueError, TypeError: the arguments do not fit together.
        """
        ...

    def pooling(self, bags: Bags, lookup: Any, mean: bool) -> Pools:
        """From the rows of a look-up to its bags."""
        ...


class HostEngine:
    """The CPU: Numba's kernels.

    Attributes:
        workspace: memory that look-ups use again and again.
    """

    def __init__(self) -> None:
        self.workspace = Workspace()

    def check(self, mode: str, sparse: bool) -> None:
        """Everything is possible."""

    def look_up(self, shape: TensorTrainShape, dtype: torch.dtype, ids: Tensor) -> Lookup:
        """The distinct ids."""
        return Lookup(shape, dtype, ids, self.workspace)

    def look_up_bags(
        self, shape: TensorTrainShape, dtype: torch.dtype, input: Tensor, offsets: Tensor | None,
        weights: Tensor | None, include_last_offset: bool, padding: int | None,
    ) -> tuple[Bags, Lookup]:  # fmt: skip
        """Bags, and their distinct ids."""
        bags = Bags.of(input, offsets, weights, include_last_offset).without(padding)
        return bags, self.look_up(shape, dtype, bags.ids)

    def pooling(self, bags: Bags, lookup: Lookup, mean: bool) -> Pooling:
        """From rows to bags."""
        return Pooling(bags, lookup, mean)


def is_on_device(core: Tensor) -> bool:
    """Whether a core is looked up by kernels of a device."""
    return core.device.type == "cuda"
