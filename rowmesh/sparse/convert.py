"""Conversion of arguments of a look-up to a SparseBatch: a KeyedJaggedTensor, and batches of some features only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rowmesh._support.suggest import hint
from rowmesh.errors import DataError
from rowmesh.sparse.batch import SparseBatch


@runtime_checkable
class KeyedJagged(Protocol):
    """The part of TorchRec's KeyedJaggedTensor that is read: any class with these methods will do."""

    def keys(self) -> Sequence[str]:
        """F feature names."""
        ...

    def values(self) -> Tensor:
        """Ids `[N]`."""
        ...

    def offsets(self) -> Tensor:
        """`[F·B + 1]`."""
        ...

    def weights_or_none(self) -> Tensor | None:
        """`[N]`."""
        ...


def as_batch(batch: SparseBatch | KeyedJagged) -> SparseBatch:
    """The batch itself, or a KeyedJaggedTensor as one, whose ids and offsets are not copied.

    Raises:
        DataError: it is neither; or torch.fx traces.
    """
    if isinstance(batch, SparseBatch):
        return batch
    if isinstance(batch, torch.fx.Proxy):  # which has every method
        raise DataError(
            "torch.fx cannot trace a look-up, whose rows are in no graph: trace with a torch.fx.Tracer whose "
            "is_leaf_module is true of EmbeddingCollections, or trace the dense part of the model, given the vectors"
        )
    if isinstance(batch, KeyedJagged):
        return SparseBatch.from_keyed_jagged_tensor(batch)
    raise DataError(
        f"a look-up takes a SparseBatch or a TorchRec KeyedJaggedTensor, got {type(batch).__name__}; make one by "
        "SparseBatch.from_dense, SparseBatch.from_bags or SparseBatch(…)"
    )


def check_features(features: Sequence[str], known: Sequence[str]) -> None:
    """Raises DataError where one of the features belongs to no table, or is named twice."""
    if isinstance(features, str):
        raise DataError(f"features must be a list of names, got {features!r}; write features=[{features!r}]")
    if strangers := [name for name in features if name not in known]:
        raise DataError(f"features {strangers} belong to no table{hint(strangers[0], known)}; there are {list(known)}")
    if len(set(features)) < len(features):
        raise DataError(f"features {list(features)} name one more than once; name each once")


def with_empty_bags(batch: SparseBatch, features: Sequence[str], known: Sequence[str]) -> SparseBatch:
    """Some features of a batch, and empty bags for all others that there are.

    Args:
        batch: has at least `features`; ids of others are left out.
        features: what to keep.
        known: all features of the tables.

    Raises:
        DataError: a feature belongs to no table, is named twice, or is not in the batch.

    Example:
        >>> batch = SparseBatch.from_bags({"user": [[7], [7, 9]], "shop": [[1], [1]]})
        >>> part = with_empty_bags(batch, ["user"], ["user", "item"])
        >>> part.features, part.ids.tolist(), part.offsets.tolist()
        (('user', 'item'), [7, 7, 9], [0, 1, 3, 3, 3])
    """
    check_features(features, known)
    kept = batch.select(features)
    others = tuple(name for name in known if name not in features)
    if not others:
        return kept
    num_empty = len(others) * batch.batch_size
    return SparseBatch(
        features=(*kept.features, *others),
        ids=kept.ids,
        batch_size=batch.batch_size,
        jagged_offsets=torch.cat([kept.offsets, kept.offsets[-1:].expand(num_empty)]),
        weights=kept.weights,
        time=kept.time,
        scores=kept.scores,
    )
