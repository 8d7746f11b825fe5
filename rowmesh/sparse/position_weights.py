"""PositionWeights: weights of ids that are trained, one for every position in a bag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from rowmesh._support.suggest import hint
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.sparse.batch import SparseBatch
from rowmesh.sparse.convert import KeyedJagged, as_batch


class PositionWeights(nn.Module):
    """Gives every id the weight of its position in its bag, which is trained: TorchRec's PositionWeightedModule.

    The weights are an ordinary dense parameter: a dense optimizer trains them, and DistributedDataParallel averages
    their gradients, where this module is part of what it wraps. They start at 1. Weights that a batch has already are
    multiplied. The parameter may be on any device: the weights of a batch are copied to the host, where batches are.

    Args:
        max_lengths: feature → how many ids its bags may have. Ids of other features keep their weight, 1 by default.
        dtype: of the weights, float32 or float64.

    Attributes:
        weight: the parameter, all features side by side; `of` has those of one feature.

    Raises:
        ConfigurationError: a length is below 1, there is no feature, or no such dtype.

    Example:
        >>> positions = PositionWeights({"seen": 3})
        >>> with torch.no_grad():
        ...     _ = positions.of("seen").copy_(torch.tensor([1.0, 0.5, 0.25]))
        >>> batch = positions(SparseBatch.from_bags({"seen": [[7], [3, 9, 7]], "user": [[5], [6]]}))
        >>> batch.weights.tolist()
        [1.0, 1.0, 0.5, 0.25, 1.0, 1.0]
    """

    def __init__(self, max_lengths: Mapping[str, int], *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if not max_lengths:
            raise ConfigurationError("no features: name those whose positions have weights, as {'seen': 50}")
        for name, length in max_lengths.items():
            if length < 1:
                raise ConfigurationError(f"feature {name!r}: bags have 1 position or more, got {length}")
        if dtype not in (torch.float32, torch.float64):
            raise ConfigurationError(f"weights of ids are float32 or float64, got {dtype}")
        self.max_lengths = dict(max_lengths)
        firsts = list(accumulate(self.max_lengths.values(), initial=0))
        self._first = dict(zip(self.max_lengths, firsts, strict=False))
        self.weight = nn.Parameter(torch.ones(firsts[-1], dtype=dtype))

    def of(self, feature: str) -> Tensor:
        """`[max length]`: the weights of a feature by position, as a view."""
        first = self._first[feature]
        return self.weight[first : first + self.max_lengths[feature]]

    def forward(self, batch: SparseBatch | KeyedJagged) -> SparseBatch:
        """The batch with weights.

        Raises:
            DataError: it lacks a feature, or a bag has more ids than there are positions.
        """
        batch = as_batch(batch)
        if missing := [name for name in self.max_lengths if name not in batch.features]:
            raise DataError(
                f"the batch lacks features {missing}, whose positions have weights{hint(missing[0], batch.features)}; "
                f"it has {list(batch.features)}"
            )
        places = self._places(batch).to(self.weight.device)
        weights = torch.cat([self.weight, self.weight.new_ones(1)]).index_select(0, places).cpu()
        return replace(batch, weights=weights if batch.weights is None else weights * batch.weights)

    def _places(self, batch: SparseBatch) -> Tensor:
        """int64 `[N]`: where in the parameter the weight of each id is; past its end where it is 1."""
        lengths = batch.offsets.diff()
        self._check(batch, lengths)
        sizes = lengths.view(batch.num_features, batch.batch_size).sum(1)
        position = torch.arange(batch.ids.numel(), device="cpu")
        position -= batch.offsets[:-1].repeat_interleave(lengths)
        has_weights = torch.tensor([name in self._first for name in batch.features], device="cpu")
        firsts = [self._first.get(name, self.weight.numel()) for name in batch.features]
        first = torch.tensor(firsts, device="cpu").repeat_interleave(sizes)
        return first + position * has_weights.repeat_interleave(sizes)

    def _check(self, batch: SparseBatch, lengths: Tensor) -> None:
        if not batch.batch_size:
            return
        longest, samples = lengths.view(batch.num_features, batch.batch_size).max(1)
        for name, length, sample in zip(batch.features, longest.tolist(), samples.tolist(), strict=True):
            if length > self.max_lengths.get(name, length):
                raise DataError(
                    f"feature {name!r}: sample {sample} has {length} ids, and weights are of {self.max_lengths[name]} "
                    "positions; give a larger max length, or cut such bags off"
                )

    def extra_repr(self) -> str:
        """Features and their lengths."""
        return ", ".join(f"{name}: {length}" for name, length in self.max_lengths.items())
