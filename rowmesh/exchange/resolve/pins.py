"""Pins: which batches of this rank are under way, and so may read or update the frames that they were given.

Batches are numbered alike on all ranks. Each rank says, with the next batch, which is its first one that has not ended.
A frame that a batch has freed is used again only when every batch up to that one has ended on every rank.
"""

from __future__ import annotations


class BatchPin:
    """Keeps the frames that a batch was given. `end` may be called again.

    Attributes:
        number: of the batch.
        is_ahead: whether a pipeline has opened it, and its step is not done.
        step: that it opened; 0: none, it changed nothing of what is known.
        is_watched: whether hooks, on some rank, have still to be told of it.
        is_taken_back: whether what it decided was taken back: its frames are no more those of its ids.
    """

    __slots__ = ("_pins", "is_ahead", "is_kept", "is_taken_back", "is_watched", "number", "step")

    def __init__(self, pins: BatchPins, number: int, *, is_ahead: bool) -> None:
        self._pins, self.number, self.is_ahead, self.is_kept = pins, number, is_ahead, False
        self.step, self.is_watched, self.is_taken_back = 0, False, False

    def open(self, step: int, *, is_watched: bool) -> None:
        """The batch opens a step; hooks have to be told of it where it is watched."""
        self.step, self.is_watched = step, is_watched

    def take_back(self) -> None:
        """Notes that the decisions of the batch were taken back: no hook hears of it any more."""
        self.is_taken_back, self.is_watched = True, False

    def take_watched(self) -> bool:
        """Whether hooks have still to be told of the batch; from here on they have not."""
        is_watched, self.is_watched = self.is_watched, False
        return is_watched

    def begin_step(self) -> None:
        """The step of the batch is being done: its frames are kept until `end`."""
        self.is_ahead, self.is_kept = False, True

    def end(self) -> None:
        """Nothing of the batch is read or updated any more."""
        self.is_ahead = False
        self._pins.discard(self.number)

    def drop(self) -> None:
        """The batch is gone: it has ended, unless its step is being done (`is_kept`)."""
        if not self.is_kept:
            self.end()


class BatchPins:
    """The pins of all batches of this rank.

    Example:
        >>> pins = BatchPins()
        >>> first, second = pins.begin(), pins.begin()
        >>> second.end()
        >>> pins.first
        0
        >>> first.end()
        >>> pins.first
        2
    """

    def __init__(self) -> None:
        # No lock: a pin may end wherever the garbage collector runs. Each line here is one step of the interpreter.
        self._under_way: dict[int, BatchPin] = {}
        self._next = 0

    def begin(self, *, is_ahead: bool = False) -> BatchPin:
        """Pins the next batch, whether or not a pipeline opens it before its turn; one thread at a time."""
        pin = self._under_way[self._next] = BatchPin(self, self._next, is_ahead=is_ahead)
        self._next += 1
        return pin

    def discard(self, number: int) -> None:
        """A batch has ended."""
        self._under_way.pop(number, None)

    def take_back(self, step: int) -> None:
        """Batches that opened a later step are taken back."""
        for pin in list(self._under_way.values()):
            if pin.step > step:
                pin.take_back()

    @property
    def next(self) -> int:
        """The number of the batch that comes next."""
        return self._next

    @property
    def first(self) -> int:
        """The first batch that has not ended, or the next one."""
        return min(list(self._under_way), default=self._next)

    @property
    def ahead(self) -> list[int]:
        """Batches whose steps have not come yet though a pipeline has opened them, ascending."""
        return sorted(pin.number for pin in list(self._under_way.values()) if pin.is_ahead)
