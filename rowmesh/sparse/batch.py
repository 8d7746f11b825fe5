"""SparseBatch: the ids of a batch, feature by feature, bag by bag."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rowmesh.errors import DataError
from rowmesh.ops.copy_offsets import check_offsets, copy_offsets
from rowmesh.sparse.whole import whole_numbers

_TENSORS = ("ids", "jagged_offsets", "weights", "scores")


@dataclass(frozen=True, eq=False, repr=False)
class SparseBatch:
    """The ids of B samples for F features, one bag of ids for each (feature, sample).

    Bags are feature-major, the layout of a KeyedJaggedTensor::

        features   "user"              "item"
        sample     0     1     2       0     1     2
        bag        [7]   []    [7, 9]  [3]   [3]   [5]
        ids        7           7  9    3     3     5
        offsets    0     1     1       3     4     5     6

    Attributes:
        features: F feature names, each once.
        ids: int64 `[N]`. Read once, while the batch is routed; from pinned memory a GPU reads them a little later, as
            any copy that does not block.
        batch_size: B, the number of samples.
        bag_size: the number of ids in every bag where all bags are equal (1 for one-hot), else None.
        jagged_offsets: int64 `[F·B + 1]`; may be None where `bag_size` is given. Not copied here, but when the batch
            is routed, and checked then: from there on the buffer may be used for another batch.
        weights: per-id weights `[N]`, float32 or float64, or None. They multiply rows; a mean is the sum of the
            products over the number of ids, not over the sum of the weights. They are read when vectors are pooled.
            Where they require a gradient they get one (see `PositionWeights`); a pipeline takes such with
            each micro-batch.
        time: of the latest event among the samples, in seconds, for dynamic tables whose ids live for some; or None.
        scores: int64 `[N]`, by which dynamic tables with `eviction="score"` choose who leaves: in a step an id gets the
            largest that it has in the global batch. Other tables, and evaluation, do not read them; or None.

    Example:
        >>> import torch
        >>> batch = SparseBatch.from_bags({"user": [[7], [], [7, 9]], "item": [[3], [3], [5]]})
        >>> batch.ids.tolist(), batch.offsets.tolist()
        ([7, 7, 9, 3, 3, 5], [0, 1, 1, 3, 4, 5, 6])
        >>> batch
        SparseBatch(3 samples, 6 ids, features: user, item)
    """

    features: tuple[str, ...]
    ids: Tensor
    batch_size: int
    bag_size: int | None = None
    jagged_offsets: Tensor | None = None
    weights: Tensor | None = None
    time: int | None = None
    scores: Tensor | None = None

    def __post_init__(self) -> None:
        if len(set(self.features)) != len(self.features):
            twice = sorted({name for name in self.features if self.features.count(name) > 1})
            raise DataError(f"features {twice} stand more than once in the batch; name each feature once")
        if self.ids.dtype != torch.int64 or self.ids.dim() != 1:
            raise DataError(
                f"ids must be int64 with one dimension, got {self.ids.dtype} {tuple(self.ids.shape)}; "
                "use ids.long().flatten()"
            )
        num_bags = len(self.features) * self.batch_size
        if self.bag_size is not None:
            expected = num_bags * self.bag_size
            if self.ids.numel() != expected:
                raise DataError(
                    f"{len(self.features)} features × {self.batch_size} samples × {self.bag_size} ids a bag "
                    f"make {expected} ids, got {self.ids.numel()}"
                )
        elif self.jagged_offsets is None:
            raise DataError("bags of unequal size need offsets")
        if self.jagged_offsets is not None:
            _check_offsets(self.jagged_offsets, num_bags, self.ids.numel())
            if self.bag_size is not None:
                _check_bag_size(self.jagged_offsets, self.bag_size)
        if self.weights is not None and self.weights.shape != self.ids.shape:
            raise DataError(f"{self.ids.numel()} ids need as many weights, got {tuple(self.weights.shape)}")
        if self.scores is not None and (self.scores.shape != self.ids.shape or self.scores.dtype != torch.int64):
            raise DataError(
                f"scores of {self.ids.numel()} ids must be as many int64, got {self.scores.dtype} "
                f"{tuple(self.scores.shape)}"
            )
        for name in _TENSORS:
            tensor = getattr(self, name)
            if tensor is not None and tensor.device.type != "cpu":
                raise DataError(f"{name} of a SparseBatch are on {tensor.device}; look-ups run on the CPU: use .cpu()")
        for name in _TENSORS:  # kernels read addresses: no strided view may reach them
            tensor = getattr(self, name)
            if tensor is not None and not tensor.is_contiguous():
                object.__setattr__(self, name, tensor.contiguous())

    def __repr__(self) -> str:
        per_bag = "" if self.bag_size is None else f" ({self.bag_size} a bag)"
        weighted = ", weighted" if self.weights is not None else ""
        ids = f"{self.ids.numel():,} ids{per_bag}{weighted}"
        return f"SparseBatch({self.batch_size:,} samples, {ids}, features: {', '.join(self.features)})"

    @property
    def num_features(self) -> int:
        """F, the number of features."""
        return len(self.features)

    @property
    def offsets(self) -> Tensor:
        """int64 `[F·B + 1]`: bag i holds `ids[offsets[i]:offsets[i + 1]]`."""
        if self.jagged_offsets is not None:
            return self.jagged_offsets
        assert self.bag_size is not None
        offsets = torch.arange(len(self.features) * self.batch_size + 1, device="cpu") * self.bag_size
        object.__setattr__(self, "jagged_offsets", offsets)  # derived once
        return offsets

    def feature_range(self, feature: int) -> tuple[int, int]:
        """Where the ids of one feature begin and end in `ids`."""
        if self.bag_size is not None:
            size = self.batch_size * self.bag_size
            return feature * size, (feature + 1) * size
        offsets = self.offsets
        return (
            int(offsets[feature * self.batch_size]),
            int(offsets[(feature + 1) * self.batch_size]),
        )

    def routed(self, take: Callable[[int], Tensor]) -> SparseBatch:
        """The same batch with offsets of its own, for kernels: the caller may overwrite its buffers meanwhile.

        Args:
            take: gives memory for so many offsets, int64.

        Raises:
            DataError: buffers were changed since the batch was made, and do not fit together any more.
        """
        offsets, num_ids = self.jagged_offsets, self.ids.numel()
        num_bags = len(self.features) * self.batch_size
        if self.weights is not None and self.weights.numel() != num_ids:
            raise DataError(f"{num_ids} ids need as many weights, got {self.weights.numel()} since the batch was made")
        if self.scores is not None and self.scores.numel() != num_ids:
            raise DataError(f"{num_ids} ids need as many scores, got {self.scores.numel()} since the batch was made")
        if self.bag_size is not None:
            if num_ids != num_bags * self.bag_size:
                raise DataError(
                    f"a batch of {num_bags * self.bag_size} ids has {num_ids} now: ids were resized since it was made"
                )
            return self if offsets is None else self._with_offsets(None)  # derived ones are always right
        assert offsets is not None
        own = take(num_bags + 1)
        if offsets.numel() != own.numel() or not copy_offsets(offsets, num_ids, own):
            raise DataError(
                f"the offsets of a SparseBatch were changed since it was made: {_fault(offsets, own, num_ids)}; make "
                "them anew for every batch, or use the buffer again when forward has returned"
            )
        return self._with_offsets(own)

    def with_ids(self, ids: Tensor) -> SparseBatch:
        """The same bags of other ids: int64 `[N]`, contiguous, on a CPU."""
        other = object.__new__(SparseBatch)  # without the checks, which were made
        other.__dict__.update(self.__dict__, ids=ids)
        return other

    def _with_offsets(self, offsets: Tensor | None) -> SparseBatch:
        other = object.__new__(SparseBatch)
        other.__dict__.update(self.__dict__, jagged_offsets=offsets)
        return other

    def select(self, features: Sequence[str]) -> SparseBatch:
        """A batch of some of the features, in the order given; its ids are copied.

        Raises:
            DataError: a feature is not in the batch.

        Example:
            >>> batch = SparseBatch.from_bags({"user": [[7], [7, 9]], "item": [[3], [5]]})
            >>> batch.select(["item"]).ids.tolist()
            [3, 5]
        """
        if missing := sorted(set(features) - set(self.features)):
            raise DataError(f"the batch lacks features {missing}; it has {list(self.features)}")
        return self._picked(features, features)

    def _picked(self, features: Sequence[str], names: Sequence[str]) -> SparseBatch:
        """A copy of some features, which may stand more than once, under names that do not."""
        places = [self.features.index(name) for name in features]
        ranges = [self.feature_range(place) for place in places]
        offsets = None
        if self.bag_size is None:
            lengths = self.offsets.diff().view(self.num_features, self.batch_size)[places].flatten()
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

        def picked(values: Tensor) -> Tensor:
            return torch.cat([values[:0], *(values[begin:end] for begin, end in ranges)])

        return SparseBatch(
            features=tuple(names),
            ids=picked(self.ids),
            batch_size=self.batch_size,
            bag_size=self.bag_size,
            jagged_offsets=offsets,
            weights=None if self.weights is None else picked(self.weights),
            time=self.time,
            scores=None if self.scores is None else picked(self.scores),
        )

    def with_aliases(self, aliases: Mapping[str, str]) -> SparseBatch:
        """The batch with some features a second time under other names, for a look-up in a second table.

        Args:
            aliases: another name → feature of the batch. All ids are copied.

        Raises:
            DataError: a feature is not in the batch, or a name is in it already.

        Example:
            >>> batch = SparseBatch.from_bags({"item": [[3], [5, 6]]})
            >>> both = batch.with_aliases({"item@wide": "item"})  # tables with features ("item",) and ("item@wide",)
            >>> both.features, both.ids.tolist()
            (('item', 'item@wide'), [3, 5, 6, 3, 5, 6])
        """
        if taken := [name for name in aliases if name in self.features]:
            raise DataError(f"aliases {taken} are features of the batch; give each look-up a name of its own")
        if missing := sorted(set(aliases.values()) - set(self.features)):
            raise DataError(f"the batch lacks features {missing}; it has {list(self.features)}")
        return self._picked([*self.features, *aliases.values()], [*self.features, *aliases])

    @classmethod
    def from_dense(cls, features: Sequence[str], ids: Tensor, weights: Tensor | None = None) -> SparseBatch:
        """Bags of equal size, from int64 `[F, B]` (one-hot) or `[F, B, L]`; no copy where contiguous."""
        if ids.dim() not in (2, 3) or ids.shape[0] != len(features):
            raise DataError(f"dense ids must be [F, B] or [F, B, L] with F = {len(features)}, got {tuple(ids.shape)}")
        return cls(
            features=tuple(features),
            ids=ids.contiguous().view(-1),
            batch_size=ids.shape[1],
            bag_size=ids.shape[2] if ids.dim() == 3 else 1,
            weights=None if weights is None else weights.contiguous().view(-1),
        )

    @classmethod
    def from_bags(cls, bags: Mapping[str, Sequence[Sequence[int]]]) -> SparseBatch:
        """From Python lists: feature → one list of ids a sample. For tests and small examples.

        Raises:
            DataError: an id is no whole number of 64 bits, or features have other numbers of samples.
        """
        sizes = {name: len(lists) for name, lists in bags.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"features disagree on the number of samples: {sizes}")
        flat = [bag for lists in bags.values() for bag in lists]
        lengths = torch.tensor([len(bag) for bag in flat], dtype=torch.int64, device="cpu")
        ids = [
            whole_numbers(bag, f"feature {name!r}, sample {sample}: ids")
            for name, lists in bags.items()
            for sample, bag in enumerate(lists)
        ]
        return cls(
            features=tuple(bags),
            ids=torch.cat([lengths[:0], *ids]),
            batch_size=next(iter(sizes.values()), 0),
            jagged_offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        )

    @classmethod
    def from_keyed_jagged_tensor(cls, kjt: Any) -> SparseBatch:
        """From a TorchRec KeyedJaggedTensor, without importing TorchRec; ids and offsets are not copied.

        Raises:
            DataError: the batch has a variable stride per key, which has no rectangular form, or its ids or offsets are
                no integers.
        """
        if getattr(kjt, "variable_stride_per_key", lambda: False)():
            raise DataError("a KeyedJaggedTensor with a variable stride per key has no common batch size")
        features, values, offsets = tuple(kjt.keys()), kjt.values(), kjt.offsets()
        stride = getattr(kjt, "stride", lambda: (offsets.numel() - 1) // max(len(features), 1))
        return cls(
            features=features,
            ids=whole_numbers(values, "the ids of a KeyedJaggedTensor"),
            batch_size=stride(),
            jagged_offsets=whole_numbers(offsets, "the offsets of a KeyedJaggedTensor"),
            weights=kjt.weights_or_none(),
        )

    def to_keyed_jagged_tensor(self, kjt_class: Any) -> Any:
        """To a KeyedJaggedTensor: pass TorchRec's class, `batch.to_keyed_jagged_tensor(KeyedJaggedTensor)`."""
        return kjt_class(
            keys=list(self.features),
            values=self.ids,
            weights=self.weights,
            offsets=self.offsets,
            stride=self.batch_size,
        )


def _fault(offsets: Tensor, own: Tensor, num_ids: int) -> str:
    """Says what is wrong with changed offsets; `own` were read before."""
    if offsets.numel() != own.numel():
        return f"there are {offsets.numel()} where there were {own.numel()}"
    if (first := int(own[0])) or int(own[-1]) != num_ids:
        return f"they run from {first} to {int(own[-1])}, and ids are [0, {num_ids}]"
    bag = int((own[1:] < own[:-1]).nonzero()[0])
    return f"they decrease at bag {bag}, within [0, {num_ids}]"


def _check_offsets(offsets: Tensor, num_bags: int, num_ids: int) -> None:
    if offsets.dtype != torch.int64 or offsets.shape != (num_bags + 1,):
        raise DataError(
            f"offsets must be int64 [F·B + 1] = [{num_bags + 1}], got {offsets.dtype} {tuple(offsets.shape)}"
        )
    if offsets.device.type == "cpu" and offsets.is_contiguous() and check_offsets(offsets, num_ids):
        return
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != num_ids:
        raise DataError(f"offsets must run from 0 to {num_ids} (the number of ids), got {first} to {last}")
    if num_bags and bool((offsets[1:] < offsets[:-1]).any()):
        bag = int((offsets[1:] < offsets[:-1]).nonzero()[0])
        raise DataError(f"offsets must not decrease; they do at bag {bag}")


def _check_bag_size(offsets: Tensor, bag_size: int) -> None:
    if bool((differs := offsets.diff() != bag_size).any()):
        bag = int(differs.nonzero()[0])
        found = int(offsets[bag + 1] - offsets[bag])
        raise DataError(f"bag_size is {bag_size}, but by the offsets bag {bag} has {found} ids; give one or the other")
