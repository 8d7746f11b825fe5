"""A batch in flight, and its micro-batches, as the loop over a pipeline gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor

from rowmesh.collection.outputs import Embeddings
from rowmesh.errors import RowmeshError
from rowmesh.exchange.window import Window
from rowmesh.ops.streams import Mark
from rowmesh.pipeline.ends import Answer
from rowmesh.sparse import SparseBatch
from rowmesh.sparse.convert import KeyedJagged
from rowmesh.tables.update_rules import Rate


class Samples(Protocol):
    """An item of a loader: `rowmesh.data.Batch` is one."""

    @property
    def sparse(self) -> SparseBatch | KeyedJagged:
        """The ids: a SparseBatch, or TorchRec's KeyedJaggedTensor."""
        ...

    def take(self, samples: Tensor) -> Self:
        """The given samples, in their order."""
        ...


T = TypeVar("T", bound=Samples)
Weigh = Callable[[SparseBatch], SparseBatch]
"""Gives the ids of a batch weights, as `rowmesh.PositionWeights` does."""


class Part(Generic[T]):
    """A micro-batch.

    Args:
        item, samples, weight: the attributes.
        pool: looks its vectors up, with weights where a function gives them.

    Attributes:
        item: of the window, whose samples these are; they are in the order of the micro-batches.
        samples: which samples of the item; none where it has fewer samples than micro-batches.
        weight: the share of the window's samples that it has, 0 to 1. The gradient of a mean over all samples is that
            of the sum, over micro-batches, of their means times their weights.
    """

    __slots__ = ("_embeddings", "_pool", "item", "samples", "weight")

    def __init__(self, item: T, samples: slice, pool: Callable[[Weigh | None], Embeddings], weight: float) -> None:
        self.item, self.samples, self.weight, self._pool = item, samples, weight, pool
        self._embeddings: Embeddings | None = None

    @property
    def embeddings(self) -> Embeddings:
        """The vectors of its samples."""
        return self.look_up() if self._embeddings is None else self._embeddings

    def look_up(self, weigh: Weigh | None = None) -> Embeddings:
        """The vectors of its samples, of ids with weights, which may be trained.

        Args:
            weigh: gives the ids of the micro-batch weights; called at once, with those that the item has.

        Raises:
            RowmeshError: they were looked up before.
            DataError: there is not a weight for every id.
            ConfigurationError: tables are on a device.

        Example:
            >>> from rowmesh import PositionWeights
            >>> positions = PositionWeights({"clicked": 50})
            >>> look_up = lambda part: part.look_up(positions)  # in a loop over a window
        """
        if self._embeddings is not None:
            raise RowmeshError("a micro-batch is looked up once; give weights before its embeddings are read")
        self._embeddings = self._pool(weigh)
        return self._embeddings


class BatchInFlight(Generic[T]):
    """A batch in flight; iterating gives its micro-batches, in order, each once.

    Args:
        parts: gives the micro-batches of a batch whose window is known, as they are computed.
        number: of the batch.
        items: what the loader gave.

    Attributes:
        number: of the batch, from 0 on.
        items: what the loader gave, one or as many as are accumulated; samples in the order of the micro-batches.
        read: what the loader gave, as it did.
        orders: of each, where its samples were before (int64 `[B]`), or None where they are as they were.
        num_computed: micro-batches that had their backward.
        is_routed: whether its rows are known, and where tables are dynamic all ranks have decided about it.
        answer: what this rank says when ranks ask each other whether they take its step.
        is_measured: whether the squares of its gradients were asked for.
        squares: their sum as each rank has it, once it is known.
    """

    def __init__(self, parts: Callable[[Self], Iterator[Part[T]]], number: int, items: Sequence[T]) -> None:
        self._parts, self.number, self.items, self.read = parts, number, [*items], items
        self.orders: list[Tensor | None] = [None] * len(self.items)
        self.window: Window | None = None
        self.lrs: Sequence[Rate] | None = None
        self.stepped: Mark | None = None  # when its learning rates came; None before, and once what follows is noted
        self.answer, self.is_routed = Answer.TAKES, False
        self.is_measured, self.squares = False, list[float]()
        self._is_begun = False
        self.num_computed = 0

    @property
    def item(self) -> T:
        """What the loader gave.

        Raises:
            RowmeshError: those are several items.
        """
        self._check_single("item")
        return self.items[0]

    @property
    def order(self) -> Tensor | None:
        """That of `orders`, of the one item."""
        self._check_single("order")
        return self.orders[0]

    def _check_single(self, what: str) -> None:
        if len(self.items) > 1:
            raise RowmeshError(f"a window of {len(self.items)} items has no one {what}; take `part.item`")

    def __iter__(self) -> Iterator[Part[T]]:
        if self._is_begun or self.window is None:
            raise RowmeshError(f"the micro-batches of batch {self.number} were given before; each is computed once")
        self._is_begun = True
        yield from self._parts(self)

    def take_copies(self, items: Sequence[T]) -> None:
        """Takes what the program made of the items."""
        self.items[:] = items

    def reorder(self, place: int, order: Tensor) -> None:
        """Puts the samples of an item into the order of the micro-batches."""
        self.orders[place], self.items[place] = order, self.items[place].take(order)

    def take_route(self) -> None:
        """Notes that its rows are known."""
        self.is_routed = True

    def take_window(self, window: Window) -> None:
        """Takes what is looked up by micro-batch."""
        self.window = window

    def take_rates(self, lrs: Sequence[Rate], now: Mark) -> None:
        """Takes the learning rates of its step. The last assignment is the act: Ctrl-C may come between any two."""
        self.stepped = now
        self.lrs = lrs

    def take_stepped(self) -> Mark | None:
        """When its learning rates came; None where that was asked before, or they have not."""
        stepped, self.stepped = self.stepped, None
        return stepped

    def ask_squares(self) -> None:
        """Notes that the squares of its gradients are asked for."""
        self.is_measured = True

    @property
    def is_finite(self) -> bool | None:
        """Whether its gradients are finite, on all ranks; None where that is not known."""
        return isfinite(sum(self.squares)) if self.squares else None

    def take_squares(self, squares: list[float]) -> None:
        """Takes their sum on each rank."""
        self.squares = squares

    def take_answer(self, answer: Answer) -> None:
        """Takes what this rank says of its step."""
        self.answer = answer

    def release(self) -> None:
        """Its memory serves another one, even where the program keeps the batch."""
        self.window = None

    def take_gradients(self, part: int) -> None:
        """Notes that the gradients of a micro-batch are summed."""
        self.num_computed = part + 1

    @property
    def is_computed(self) -> bool:
        """Whether all micro-batches are."""
        return self.window is not None and self.num_computed == self.window.num_parts
