"""Layout: where the ids of a group's features are in a batch, and where their vectors go in the output."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class GroupLayout:
    """The features of one group in a batch.

    Attributes:
        features: int64 `[F, 8]`, the descriptors that the pool kernels read (`rowmesh.ops.pool.cpu`).
        num_ids: ids of the group's features.
        is_weighted: whether sums need a factor for each id (weights given, or means over bags of several ids).
        address: of `features`.
        num_features: F of this group.
    """

    features: np.ndarray
    num_ids: int
    is_weighted: bool
    address: int = field(init=False)
    num_features: int = field(init=False)

    def __post_init__(self) -> None:
        # Here once: asking NumPy costs more than some kernels take.
        object.__setattr__(self, "address", self.features.ctypes.data)
        object.__setattr__(self, "num_features", len(self.features))
