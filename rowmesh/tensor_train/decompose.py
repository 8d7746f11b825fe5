"""TT-SVD: the cores of a table that is there already, exact or truncated to smaller ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.tables.tensor_train import TensorTrainShape


def tt_svd(table: Tensor, shape: TensorTrainShape) -> list[Tensor]:
    """Cores whose product is the table, or near the nearest of their ranks.

    The table, padded with rows of zeros, is unfolded to `[p₁q₁, p₂q₂p₃q₃]` and split by a singular value decomposition
    of which R₁ vectors are kept; the rest is unfolded to `[R₁p₂q₂, p₃q₃]` and split again. The error is at most √2
    times that of the best table of these ranks (Frobenius norm), and rounding at `shape.full_ranks`. The cores come
    out with equal root mean squares, so that one learning rate suits them all.

    Args:
        table: `[num_rows, D]`, on a CPU. Takes about four times its memory in float64.
        shape: what to make.

    Returns:
        the cores, float64, of `shape.core_shapes`.

    Raises:
        ConfigurationError: the table does not have this shape, or holds values that are not finite.

    Source: Oseledets, "Tensor-train decomposition" (2011), Algorithm 1; the permutation of a matrix is EL-Rec's §II-B.

    Example:
        >>> from rowmesh.ops.tensor_train.reference import dense
        >>> table = torch.arange(30.0).view(5, 6)
        >>> shape = TensorTrainShape.choose(5, 6, rank=(1, 4))
        >>> bool((dense(tt_svd(table, shape))[:5] - table).abs().max() < 1e-12)
        True
    """
    if tuple(table.shape) != (shape.num_rows, shape.dim):
        raise ConfigurationError(f"the table is {tuple(table.shape)}, its shape says {(shape.num_rows, shape.dim)}")
    if not bool(table.isfinite().all()):
        raise ConfigurationError("the table holds values that are not finite, which no cores can represent")
    (p1, p2, p3), (q1, q2, q3), (r1, r2) = shape.row_factors, shape.dim_factors, shape.ranks
    padded = torch.zeros(p1 * p2 * p3, shape.dim, dtype=torch.float64, device="cpu")
    padded[: shape.num_rows] = table.detach()
    unfolded = padded.view(p1, p2, p3, q1, q2, q3).permute(0, 3, 1, 4, 2, 5).reshape(p1 * q1, -1)
    first, rest = _split(unfolded, r1)
    second, third = _split(rest.reshape(r1 * p2 * q2, p3 * q3), r2)
    cores = [
        first.reshape(p1, q1, r1),
        second.reshape(r1, p2, q2, r2).permute(1, 0, 2, 3),
        third.reshape(r2, p3, q3).permute(1, 2, 0),
    ]
    return _balanced([core.contiguous() for core in cores])


def _split(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of the `rank` strongest directions of the columns, and the matrix in that basis."""
    num_rows, num_columns = matrix.shape
    # A wide matrix has the left singular vectors of its triangular factor, which is small.
    small = torch.linalg.qr(matrix.T, mode="r").R.T if num_columns > num_rows else matrix
    basis = torch.linalg.svd(small, full_matrices=False).U[:, :rank]
    return basis, basis.T @ matrix


def _balanced(cores: list[Tensor]) -> list[Tensor]:
    """The same product, of cores with equal root mean squares; all zero where one is."""
    sizes = torch.stack([core.square().mean().sqrt() for core in cores])
    if not bool((sizes > 0).all()):
        return [torch.zeros_like(core) for core in cores]
    common = sizes.log().mean().exp()
    return [core * (common / size) for core, size in zip(cores, sizes, strict=True)]
