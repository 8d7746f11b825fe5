"""Step: what one step of the optimizer is asked for, which must be the same on all ranks.

Every rank updates its rows, its copies and its cores by its own numbers: with unequal ones rows would learn at the rate
of whichever rank owns them, and copies would drift apart. So ranks compare a digest of them in the message that begins
an update anyway, beside the number of the operation, and only where digests differ do they tell each other the numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from struct import pack

from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import gather_objects
from rowmesh.optim.rules import Rate

_BITS = 32  # of a digest; what stands before it is an operation


class Step:
    """One update of all groups of a collection; it does not change.

    Attributes:
        number: from 1; −1 where it is only compared.
        rates: of each group.
        names: of the groups, for messages.

    Example:
        >>> Step(1, (Rate(0.1),)).digest == Step(7, (Rate(0.1),)).digest != Step(1, (Rate(0.2),)).digest
        True
    """

    __slots__ = ("_before", "names", "number", "rates")

    def __init__(self, number: int, rates: Sequence[Rate], names: Sequence[str] = (), *, before: int = 0) -> None:
        self.number, self.rates, self.names, self._before = number, rates, names, before

    @property
    def digest(self) -> int:
        """Of the rates, 32 bits; made only where there are others to compare it with."""
        numbers = [number for rate in self.rates for number in rate]
        return zlib.crc32(pack(f"{len(numbers)}d", *numbers), self._before)

    def after(self, digest: int) -> Step:
        """The same step, whose digest is also that of the steps before: of what `after` gave for the last one, or 0."""
        return Step(self.number, self.rates, self.names, before=digest)


def joined(operation: int, step: Step | None) -> int:
    """An operation and the digest of its step, as one number that fits into 64 bits.

    >>> parted([joined(-3, None), joined(5, Step(5, (Rate(0.1),)))])[0]
    [-3, 5]
    """
    return operation << _BITS | (0 if step is None else step.digest)


def parted(numbers: Sequence[int]) -> tuple[list[int], list[int]]:
    """The operations, and the digests, that `joined` put together."""
    return [number >> _BITS for number in numbers], [number & (1 << _BITS) - 1 for number in numbers]


def check_rates(mesh: Mesh, digests: Sequence[int], step: Step | None) -> None:
    """Raises on all ranks of a mesh, before anything is updated, where they would update by different numbers.

    Args:
        mesh: those that have told each other their digests.
        digests: of all of them, in their order.
        step: of this rank; None where there is none yet.

    Raises:
        ConfigurationError: they differ; names the ranks and the values.
    """
    if digests.count(digests[0]) == len(digests):
        return
    mine = None if step is None else step.rates
    everyone: list[list[list[float]] | None] = gather_objects(mesh, mine, "comparing learning rates")
    for place, name in enumerate(step.names if step is not None else ()):
        rates = [None if each is None else Rate(*each[place]) for each in everyone]
        if len(set(rates)) > 1:
            told = ", ".join(f"rank {mesh.name(rank)} has {_text(rate)}" for rank, rate in enumerate(rates))
            number = "" if step is None or step.number < 0 else f" in step {step.number}"
            raise ConfigurationError(
                f"ranks disagree about how fast group {name} learns{number}: {told}; set lr of the "
                "EmbeddingOptimizer's param_groups alike on all ranks, and let schedules see the same numbers; the "
                "gradients of this step are dropped"
            )
    raise ConfigurationError(
        "ranks had different learning rates in a step since they compared them last; set lr of the "
        "EmbeddingOptimizer's param_groups alike on all ranks, and load a checkpoint: their rows differ"
    )


def _text(rate: Rate | None) -> str:
    if rate is None:
        return "no step"
    return f"lr {rate.lr:g}" + (f" and gradients times {rate.factor:g}" if rate.factor != 1.0 else "")
