"""Handshake: what ranks compare before they act, so that all raise, and name the rank that differs.

Before every fetch and push ranks compare which one it is, and before an update a digest of its learning rates:
with unequal ones rows would learn at the rate of the rank that owns them, and copies would drift apart. The digest
travels beside the number of the operation, in a message that is sent anyway; only where digests differ do ranks send
each other the rates.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from struct import pack
from typing import NamedTuple

import numpy as np
import torch

from rowmesh._support.counters import CommonCounters
from rowmesh.errors import ConfigurationError, PeerError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.mesh.waiting import gather_objects
from rowmesh.placement import Plan
from rowmesh.tables import TableSpec
from rowmesh.tables.update_rules import Rate

_BITS = 32  # of a digest; what stands before it is one that says whether a rank refuses, then an operation


class Step(NamedTuple):
    """An update of all groups of a collection; immutable.

    Attributes:
        number: from 1; −1 where it is only compared.
        rates: of each group.
        names: of the groups, for messages.
        before: digest of the steps before, where ranks compare several at once.

    Example:
        >>> Step(1, (Rate(0.1),)).digest == Step(7, (Rate(0.1),)).digest != Step(1, (Rate(0.2),)).digest
        True
    """

    number: int
    rates: Sequence[Rate]
    names: Sequence[str] = ()
    before: int = 0

    @property
    def digest(self) -> int:
        """Digest of the rates, 32 bits; computed only where there are others to compare it with."""
        return zlib.crc32(pack(f"{2 * len(self.rates)}d", *chain.from_iterable(self.rates)), self.before)

    def after(self, digest: int) -> Step:
        """The same step, whose digest is also that of the steps before: of what `after` gave for the last one, or 0."""
        return self._replace(before=digest)


def out_of_step(text: str) -> PeerError:
    """The error for ranks that do not do the same, which all of them raise."""
    return PeerError(text, is_common=True)


class StepRefusedError(PeerError):
    """Another rank cannot take a step. It has said so before any rank changed a row, and all ranks know it."""


def joined(operation: int, step: Step | None, refuses: bool = False) -> int:
    """An operation, whether this rank refuses it, and the digest of its step, as one number that fits into 64 bits.

    >>> numbers = [joined(-3, None), joined(5, Step(5, (Rate(0.1),)), True)]
    >>> parted(numbers)[0], refusing(numbers)
    ([-3, 5], [1])
    """
    return (operation << 1 | refuses) << _BITS | (0 if step is None else step.digest)


def parted(numbers: Sequence[int]) -> tuple[list[int], list[int]]:
    """The operations, and the digests, that `joined` put together."""
    return [number >> _BITS + 1 for number in numbers], [number & (1 << _BITS) - 1 for number in numbers]


def refusing(numbers: Sequence[int]) -> list[int]:
    """Which ranks refuse, given what each of them has `joined`."""
    return [rank for rank, number in enumerate(numbers) if number >> _BITS & 1]


def after_hearing(mesh: Mesh, numbers: Sequence[int], refusal: Exception | None) -> Exception | None:
    """Why a step is not taken, once ranks have exchanged what each has `joined`; None where none of them refuses.

    Args:
        mesh: the ranks.
        numbers: of each.
        refusal: why this rank refuses, where it does.
    """
    if refusal is None and (others := refusing(numbers)):
        names = ", ".join(f"rank {mesh.name(rank)}" for rank in others)
        return StepRefusedError(f"rank {mesh.name(mesh.rank)}: {names} cannot take this step; no rank has taken it")
    return refusal


def check_operations(
    mesh: Mesh,
    received: Sequence[int],
    operation: int,
    step: Step | None,
    describe: Callable[[int], str],
    rule: str,
) -> None:
    """Raises on all ranks of a mesh where one does something else than this one, or steps at other learning rates.

    Args:
        mesh: the ranks.
        received: what each of them has `joined`.
        operation: what this rank does.
        step: of this rank; None where there is none yet.
        describe: says what a rank does, given its operation.
        rule: what ranks must do; the end of the message.

    Raises:
        PeerError: a rank does something else; names what each does.
        ConfigurationError: see `check_rates`.
    """
    operations, digests = parted(received)
    if operations.count(operation) != len(operations):
        done = ", ".join(f"rank {mesh.name(rank)} {describe(each)}" for rank, each in enumerate(operations))
        raise out_of_step(f"rank {mesh.name(mesh.rank)}: ranks are out of step: {done}; {rule}")
    check_rates(mesh, digests, step)


def check_rates(mesh: Mesh, digests: Sequence[int], step: Step | None) -> None:
    """Raises on all ranks of a mesh, before anything is updated, where they would update by different numbers.

    Args:
        mesh: the ranks that have exchanged digests.
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
            found = ", ".join(f"rank {mesh.name(rank)} has {_text(rate)}" for rank, rate in enumerate(rates))
            number = "" if step is None or step.number < 0 else f" in step {step.number}"
            raise ConfigurationError(
                f"ranks disagree about how fast group {name} learns{number}: {found}; set lr of the "
                "EmbeddingOptimizer's param_groups alike on all ranks, and let schedules see the same numbers; no "
                "row has changed: step again then, or drop the gradients by zero_grad()"
            )
    raise ConfigurationError(
        "ranks had different learning rates in a step since they compared them last; set lr of the "
        "EmbeddingOptimizer's param_groups alike on all ranks, and load a checkpoint: their rows differ"
    )


def _text(rate: Rate | None) -> str:
    if rate is None:
        return "no step"
    return f"lr {rate.lr:g}" + (f" and gradients times {rate.factor:g}" if rate.factor != 1.0 else "")


class Handshake:
    """A row of numbers to every rank: which fetch (above 0) or push (below 0) this is, at which learning rates, then
    numbers of the caller.

    Args:
        mesh: the ranks.
        channel: between them.
        width: numbers in a row.
        common: counts the messages.
    """

    def __init__(self, mesh: Mesh, channel: Channel, width: int, common: CommonCounters) -> None:
        self._mesh, self._channel, self._common = mesh, channel, common
        self._out = torch.zeros(mesh.world_size, width, dtype=torch.int64, device="cpu")
        self._numbers = self._out.numpy()

    @property
    def num_bytes(self) -> int:
        """Memory of the message."""
        return self._out.nbytes

    def __call__(
        self, operation: int, step: Step | None = None, numbers: Iterable[np.ndarray] = (), *, refuses: bool = False
    ) -> np.ndarray:
        """Exchanges the rows: one from every rank. Collective and blocking.

        Args:
            operation: what this rank does.
            step: of a push.
            numbers: of the caller, int64 `[W, …]`, or `[1, …]` for all ranks alike, side by side; columns behind them
                stay as they were sent last.
            refuses: whether this rank cannot do it; which ranks cannot, `refusing` finds in the first column.

        Raises:
            ConfigurationError: ranks have different learning rates.
            PeerError: a rank does something else; all ranks raise here, so none is left waiting.
        """
        self._numbers[:, 0], begin = joined(operation, step, refuses), 1
        for columns in numbers:
            end = begin + columns.shape[1]
            self._numbers[:, begin:end] = columns
            begin = end
        rows = self._channel.exchange_equal(self._out, self._common, "exchanging counts").numpy()
        rule = "every rank must call forward and step equally often and in the same order"
        check_operations(self._mesh, rows[:, 0].tolist(), operation, step, describe, rule)
        return rows


def describe(operation: int) -> str:
    """Describes the operation of a rank that fetches or pushes.

    >>> describe(3), describe(-2)
    ('is in forward 3', 'is in step 2')
    """
    return f"is in forward {operation}" if operation > 0 else f"is in step {-operation}"


def agree_on_tables(
    mesh: Mesh,
    tables: Sequence[TableSpec],
    seed: int,
    transport: str,
    synchronization: Synchronization,
    plan: Plan,
    wire_dtype: torch.dtype | None,
) -> None:
    """Raises ConfigurationError where ranks describe different tables: they would misread each other's memory."""
    mine = [repr(table) for table in tables]
    mine += [f"seed {seed}", f"transport {transport!r}", repr(synchronization), f"wire_dtype {wire_dtype}"]
    mine += [f"replicas {plan.replicas}", *plan.to_json().splitlines()]
    everyone = gather_objects(mesh, mine, "comparing the tables of all ranks")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs = zip_longest(everyone[0], theirs, fillvalue="nothing")
            first, other = next((a, b) for a, b in pairs if a != b)
            raise ConfigurationError(
                f"ranks disagree about an EmbeddingCollection: rank {mesh.name(0)} has {first}, "
                f"rank {mesh.name(rank)} has {other}"
            )


def agree_to_migrate(mesh: Mesh, plan: Plan, num_under_way: int) -> None:
    """Raises on all ranks alike where one cannot migrate, or has another plan.

    Args:
        mesh: the ranks.
        plan: to go over to.
        num_under_way: batches of this rank that were routed, and not pushed.

    Raises:
        RowmeshError: a rank has such; names it.
        ConfigurationError: a rank has another plan than rank 0; names it.
    """
    everyone = gather_objects(mesh, (plan.to_json(), num_under_way), "agreeing on a migration")
    for rank, (theirs, waiting) in enumerate(everyone):
        if waiting:
            raise RowmeshError(
                f"rank {mesh.name(rank)} cannot migrate while {waiting} batch(es) are under way: rows were routed or "
                "looked up, and not pushed; step first, or drop what forward returned"
            )
        if theirs != everyone[0][0]:
            raise ConfigurationError(
                f"rank {mesh.name(rank)} would migrate to another plan than rank {mesh.name(0)}; broadcast one plan to "
                "all ranks"
            )
