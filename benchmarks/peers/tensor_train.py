"""Tensor-train tables as others have them: per id, the slices are gathered and multiplied.

    plain_torch         index_select on each core and two batched products: what a user would write
    plain_torch_unique  the same on the distinct ids, then their rows for every id
    t3nsor_gather       gather_rows of KhrulkovV/tt-pytorch, from a checkout
    ttrec_torch         TTRecTorch of chenxing1999/recsys-benchmark, from a checkout
    tensorly_torch      FactorizedEmbedding(factorization="blocktt") of TensorLy-Torch, where it is installed
    embedding_bag       nn.EmbeddingBag(sparse=True), the table as it is, for scale

FBTT-Embedding (TT-Rec) and EL-Rec's own code have CUDA kernels only. Every peer is a function of ids and its
parameters, which get dense gradients, but for `embedding_bag`.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Peer = tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]


class PlainTorch(nn.Module):
    """Cores as matrices, one line a slice.

    Args:
        row_factors, dim_factors, rank: the shape.
        unique: make the rows of distinct ids only.
    """

    def __init__(self, row_factors: list[int], dim_factors: list[int], rank: int, unique: bool) -> None:
        super().__init__()
        self._row_factors, self._dim_factors, self._rank, self._unique = row_factors, dim_factors, rank, unique
        std = (1 / (3 * math.prod(row_factors)) ** 0.5 / rank) ** (1 / 3)
        widths = [dim_factors[0] * rank, rank * dim_factors[1] * rank, rank * dim_factors[2]]
        self.cores = nn.ParameterList(
            nn.Parameter(torch.randn(p, width) * std) for p, width in zip(row_factors, widths, strict=True)
        )

    def forward(self, ids: Tensor) -> Tensor:
        """`[N, D]`."""
        if self._unique:
            distinct, inverse = torch.unique(ids, return_inverse=True)
            return self._rows(distinct).index_select(0, inverse)
        return self._rows(ids)

    def _rows(self, ids: Tensor) -> Tensor:
        (_, p2, p3), (q1, q2, q3), rank = self._row_factors, self._dim_factors, self._rank
        first = self.cores[0].index_select(0, ids // (p2 * p3)).view(-1, q1, rank)
        second = self.cores[1].index_select(0, ids // p3 % p2).view(-1, rank, q2 * rank)
        third = self.cores[2].index_select(0, ids % p3).view(-1, rank, q3)
        prefix = torch.bmm(first, second).view(-1, q1 * q2, rank)
        return torch.bmm(prefix, third).view(-1, q1 * q2 * q3)


def make(name: str, row_factors: list[int], dim_factors: list[int], rank: int, num_rows: int, checkout: str) -> Peer:
    """A peer with its parameters.

    Args:
        num_rows: of the table.
        checkout: of the peer's repository, for those that are not plain torch.
    """
    if name.startswith("plain_torch"):
        module: Any = PlainTorch(row_factors, dim_factors, rank, unique=name.endswith("unique"))
    elif name == "embedding_bag":
        table = nn.EmbeddingBag(num_rows, math.prod(dim_factors), mode="sum", sparse=True)
        return (lambda ids: table(ids.view(-1, 1))), list(table.parameters())
    elif name == "tensorly_torch":
        module = _tensorly(row_factors, dim_factors, rank)
    elif name == "t3nsor_gather":
        return _t3nsor(checkout, row_factors, dim_factors, rank)
    else:
        dim = math.prod(dim_factors)
        module = _ttrec_torch(checkout)(num_rows, dim, [rank, rank], tt_p_shapes=row_factors, tt_q_shapes=dim_factors)
    return module, list(module.parameters())


def has_tensorly() -> bool:
    """Whether TensorLy-Torch is installed: `pip install tensorly-torch tensorly`."""
    return importlib.util.find_spec("tltorch") is not None


def _tensorly(row_factors: list[int], dim_factors: list[int], rank: int) -> nn.Module:
    tltorch: Any = importlib.import_module("tltorch")
    return tltorch.FactorizedEmbedding(
        math.prod(row_factors),
        math.prod(dim_factors),
        auto_tensorize=False,
        factorization="blocktt",
        tensorized_num_embeddings=tuple(row_factors),
        tensorized_embedding_dim=tuple(dim_factors),
        rank=(1, rank, rank, 1),
    )


def _t3nsor(checkout: str, row_factors: list[int], dim_factors: list[int], rank: int) -> Peer:
    if checkout not in sys.path:
        sys.path.insert(0, checkout)
    t3: Any = importlib.import_module("t3nsor")
    layer = t3.TTEmbedding(shape=[row_factors, dim_factors], tt_rank=rank)
    # gather_rows reads .cores, which its TensorTrain no longer has.
    table = types.SimpleNamespace(cores=list(layer.tt_matrix.tt_cores), raw_shape=layer.shape)
    (_, p2, p3), dim = row_factors, math.prod(dim_factors)

    def rows(ids: Tensor) -> Tensor:
        split = torch.stack([ids // (p2 * p3), ids // p3 % p2, ids % p3], dim=1)
        return t3.gather_rows(table, split).reshape(-1, dim)

    return rows, list(layer.tt_matrix.parameter)


def _ttrec_torch(checkout: str) -> Any:
    """The one module, without the package's __init__ files, which import everything."""
    name, folder = "recsys_benchmark_embeddings", Path(checkout) / "src" / "models" / "embeddings"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
        for part in ("base", "tt_embedding_ops", "tensortrain_embeddings"):
            spec = importlib.util.spec_from_file_location(f"{name}.{part}", folder / f"{part}.py")
            assert spec is not None
            assert spec.loader is not None
            sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    return sys.modules[f"{name}.tensortrain_embeddings"].TTRecTorch
