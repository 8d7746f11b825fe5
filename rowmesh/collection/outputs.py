"""Outputs of a look-up: the vectors of features, and how they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from rowmesh.collection.pooling import PoolFunction, Pooling
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.exchange.layout import Layouts
from rowmesh.exchange.route import AnyRouteGroup
from rowmesh.ops.transfer import upload
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableGroup, TableSpec
from rowmesh.tables.dense import compute_dtype


@dataclass(frozen=True, repr=False)
class JaggedRows:
    """The output of a feature with pooling "none": one vector an id.

    Attributes:
        values: `[N_f, D]`.
        offsets: int64 `[B + 1]`; sample s has `values[offsets[s]:offsets[s + 1]]`.
    """

    values: Tensor
    offsets: Tensor

    @property
    def lengths(self) -> Tensor:
        """int64 `[B]`: how many rows each sample has."""
        return self.offsets.diff()

    def padded(
        self, max_length: int | None = None, value: float = 0.0, *, keep: Literal["first", "last"] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The rows of each sample, filled up to one length L; differentiable.

        Args:
            max_length: L; default: that of the longest sample.
            value: what stands where a sample has no row.
            keep: which L rows of a longer sample to take; by default longer samples are an error. On a GPU the host
                waits for the lengths, unless L and this are given.

        Returns:
            `[B, L, D]`, and a mask: bool `[B, L]`, where rows are.

        Raises:
            DataError: a sample has more than L rows, and `keep` is not given.

        Example:
            >>> rows = JaggedRows(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 1, 3]))
            >>> padded, mask = rows.padded()
            >>> padded.squeeze(2).tolist(), mask.tolist()
            ([[1.0, 0.0], [0.0, 0.0], [2.0, 3.0]], [[True, False], [False, False], [True, True]])
        """
        lengths = self.lengths
        length = self._length(lengths, max_length, has_choice=keep is not None)
        kept = lengths.clamp(max=length)
        places = torch.arange(length, device=lengths.device)
        mask = places < kept.unsqueeze(1)
        if not len(self.values):  # a rank without rows takes part in every backward
            return self.values.new_full((*mask.shape, self.values.shape[1]), value) + self.values.sum(), mask
        first = self.offsets[1:] - kept if keep == "last" else self.offsets[:-1]
        index = torch.where(mask, first.unsqueeze(1) + places, 0)
        return torch.where(mask.unsqueeze(2), self.values[index], value), mask

    def _length(self, lengths: Tensor, max_length: int | None, *, has_choice: bool) -> int:
        if max_length is not None and max_length < 0:
            raise DataError(f"max_length must be 0 or more, got {max_length}")
        if max_length is not None and has_choice:
            return max_length
        longest = int(lengths.max()) if len(lengths) else 0
        if max_length is not None and longest > max_length:
            raise DataError(
                f"sample {int(lengths.argmax())} has {longest} rows, more than max_length={max_length}; give a larger "
                'one, or keep="first" or keep="last"'
            )
        return longest if max_length is None else max_length

    def __repr__(self) -> str:
        return f"JaggedRows({len(self.offsets) - 1:,} samples, rows {list(self.values.shape)}, {self.values.dtype})"


def split_apart(values: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    """Parts of a tensor that nothing else will be read from: views to their memory, and to autograd none.

    So each of them may be changed in place, which torch refuses of views that come several at once.
    """
    return torch.unsafe_split_with_sizes(values, [*sizes], dim)


class Embeddings:
    """The vectors of a look-up. They may be changed in place, as those of any layer (`nn.ReLU(inplace=True)`).

    Attributes:
        features: the pooled features, in the order of their columns.
        dims: D of each of them.
    """

    def __init__(
        self, values: Tensor, features: tuple[str, ...], dims: tuple[int, ...], sequences: dict[str, JaggedRows]
    ) -> None:
        self._values = values
        self.features = features
        self.dims = dims
        self._sequences = sequences
        self._parts: dict[str, Tensor] | None = None
        self._is_given, self._is_split = False, False

    @property
    def values(self) -> Tensor:
        """`[B, ΣD]`, the vectors of all pooled features side by side.

        Once vectors of single features were taken, a copy of these: what changes them in place changes nothing else.
        """
        self._is_given = True
        if self._is_split and self._parts is not None:
            self._values, self._is_split = torch.cat([*self._parts.values()], dim=1), False
        return self._values

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all vectors."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """Where vectors are."""
        return self._values.device

    def __getitem__(self, feature: str) -> Any:
        """`[B, D]` of one feature; JaggedRows where its table does not pool."""
        if feature in self._sequences:
            return self._sequences[feature]
        if self._parts is None:
            self._parts = dict(zip(self.features, self._split(), strict=True))
        try:
            return self._parts[feature]
        except KeyError:
            raise KeyError(f"no feature {feature!r}; there are {[*self.features, *self._sequences]}") from None

    def _split(self) -> Sequence[Tensor]:
        """The vectors of each feature: split once, whose backward assembles one gradient instead of one a feature."""
        is_program_s = self._values.is_leaf and self._values.requires_grad
        if self._is_given or is_program_s:  # views: to change these in place would change all, and torch refuses it
            return self._values.split(self.dims, dim=1)
        self._is_split = bool(self.features)
        return split_apart(self._values, self.dims, dim=1)

    def __repr__(self) -> str:
        columns = [f"{name} {dim}" for name, dim in zip(self.features, self.dims, strict=True)]
        columns += [f"{name} {rows!r}" for name, rows in self._sequences.items()]
        return f"Embeddings(values {list(self._values.shape)}: {', '.join(columns)})"

    def __iter__(self) -> Iterator[str]:
        return iter((*self.features, *self._sequences))

    def select(self, features: Sequence[str]) -> Embeddings:
        """Some of the features, in the order given; `values` of pooled ones are copied.

        Raises:
            KeyError: there is no such feature.
        """
        parts = {name: self[name] for name in features}
        pooled = {name: part for name, part in parts.items() if name not in self._sequences}
        sequences = {name: part for name, part in parts.items() if name in self._sequences}
        values = torch.cat(list(pooled.values()), dim=1) if pooled else self._values[:, :0]
        return Embeddings(values, tuple(pooled), tuple(part.shape[1] for part in pooled.values()), sequences)

    def stacked(self) -> Tensor:
        """`[B, F, D]`, a view; all pooled features must have the same dim."""
        if len(set(self.dims)) != 1:
            dims = dict(zip(self.features, self.dims, strict=True))
            raise ConfigurationError(f"features of different dims cannot be stacked: {dims}")
        return self.values.view(self.values.shape[0], len(self.dims), self.dims[0])


class Outputs:
    """Vectors by feature, of rows that were fetched.

    Attributes:
        features: the pooled features, in the order of their columns.
        dims: D of each of them.
        layouts: where each feature's ids and vectors are.
        pooling: rows to vectors.

    Args:
        tables: in the order of the columns.
        groups: their groups.
        device: where they are pooled; None for the host's memory.

    Raises:
        ConfigurationError: some tables are float64 and others are not.
    """

    def __init__(self, tables: Sequence[TableSpec], groups: Sequence[TableGroup], device: torch.device | None) -> None:
        pooled = [(name, table.dim) for table in tables for name in table.features if table.pooling != "none"]
        self.features = tuple(name for name, _ in pooled)
        self.dims = tuple(dim for _, dim in pooled)
        ends = list(accumulate(self.dims, initial=0))
        self._sequences = [(index, group.features) for index, group in enumerate(groups) if group.is_sequence]
        if len({compute_dtype(group.dtype) for group in groups}) > 1:
            double = sorted(table.name for table in tables if table.dtype == torch.float64)
            raise ConfigurationError(
                f"float64 tables do not mix with others: make a collection of {double} and one of the rest"
            )
        self.pooling = Pooling(groups, ends[-1], device)
        self.layouts = Layouts(groups, dict(zip(self.features, ends, strict=False)), ends[-1])
        self._anchor = torch.zeros((), requires_grad=True, device="cpu")  # gives the outputs a place in the graph

    def __call__(
        self,
        groups: Sequence[AnyRouteGroup],
        batch: SparseBatch,
        samples: slice,
        take_gradients: Callable[[Sequence[Tensor]], None],
    ) -> Embeddings:
        """The vectors of some samples of a batch, whose rows were fetched; differentiable where gradients are enabled.

        Args:
            groups: what to look up.
            batch: whose ids they are of.
            samples: which of its samples.
            take_gradients: sums the gradients of the vectors by row.
        """
        pooling, looked_up = self.pooling, (groups, batch, samples.stop - samples.start)
        if torch.is_grad_enabled():
            outputs = PoolFunction.apply(self._anchor, batch.weights, pooling, looked_up, take_gradients)
        else:
            outputs = pooling.forward(*looked_up)
        sequences = self._jagged(outputs[1:], groups, batch, samples) if self._sequences else {}
        return Embeddings(outputs[0], self.features, self.dims, sequences)

    def _jagged(
        self, outputs: Sequence[Tensor], groups: Sequence[AnyRouteGroup], batch: SparseBatch, samples: slice
    ) -> dict[str, JaggedRows]:
        """The vectors of features that are not pooled."""
        found: dict[str, JaggedRows] = {}
        for (index, features), values in zip(self._sequences, outputs, strict=True):
            lengths = [end - begin for begin, end in groups[index].layout.features[:, :2].tolist()]
            for name, rows in zip(features, split_apart(values, lengths, dim=0), strict=True):
                first = batch.features.index(name) * batch.batch_size
                offsets = batch.offsets[first + samples.start : first + samples.stop + 1]
                found[name] = JaggedRows(rows, upload(offsets - offsets[0], rows.device))
        return found
