"""First values of cores, such that the rows of the table are distributed as a dense table's would be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.ops.initialize import initialize
from rowmesh.tables.initializer import Initializer, table_key
from rowmesh.tables.tensor_train import TensorTrainShape


def standard_deviation(initializer: Initializer, num_rows: int) -> float:
    """That of the elements of a dense table.

    Raises:
        ConfigurationError: its mean is not zero, which sums of products of independent values cannot have; or it is
            constant, and cores of zeros would never learn.
    """
    a, b = initializer.parameters(num_rows)
    mean, std = ((a + b) / 2, (b - a) / math.sqrt(12)) if initializer.name == "uniform" else (a, b)
    if mean != 0.0 or std <= 0.0:
        raise ConfigurationError(
            f"a tensor-train table starts from rows of mean 0 and a standard deviation above 0; {initializer} has mean "
            f"{mean:g} and standard deviation {std:g}; take Uniform(bound=...), Normal(std=...) or from_pretrained"
        )
    return std


def draw_cores(
    shape: TensorTrainShape, initializer: Initializer, seed: int, name: str, dtype: torch.dtype
) -> list[Tensor]:
    """Cores of independent normal values, a function of (seed, name) alone: equal on every rank.

    An element of a row is a sum of R₁ · R₂ products of three of them, so that its variance is R₁ · R₂ · σ⁶. σ is chosen
    so that it is that of the initializer; means are zero and rows are uncorrelated.

    Example:
        >>> from rowmesh.tables import Normal
        >>> shape = TensorTrainShape.choose(10, 4, rank=2)
        >>> [tuple(core.shape) for core in draw_cores(shape, Normal(std=1.0), 0, "item", torch.float32)]
        [(2, 1, 2), (2, 2, 2, 2), (3, 2, 2)]
    """
    std = standard_deviation(initializer, shape.num_rows)
    sigma = (std / math.sqrt(shape.ranks[0] * shape.ranks[1])) ** (1 / 3)
    cores = []
    for number, core_shape in enumerate(shape.core_shapes):
        core = torch.empty(core_shape, dtype=dtype, device="cpu")
        key = table_key(seed, f"{name}/core{number}")
        initialize(core.view(core_shape[0], -1), key, first=0, stride=1, distribution="normal", a=0.0, b=sigma)
        cores.append(core)
    return cores
