"""Drift: whether recent traffic is still what a plan was made for, and a new plan where it is not.

    coverage   the share of accesses that a copy on the own rank or node serves
    balance    least over most rows that a rank has to provide, over the ranks

Both are measured from what ranks ask for at every step (`Traffic`) and compared with what the cost model predicts.
A new plan is made from a sketch of recent batches, whose rows do not stand in order of their recent frequency.

Source: OPER §8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from rowmesh._support.worker import Worker
from rowmesh.errors import ConfigurationError
from rowmesh.placement.address_map import COPIES, REPLIES, AddressMap
from rowmesh.placement.plan import Plan, RowRange
from rowmesh.placement.profile import Profile, TableProfile
from rowmesh.placement.request import Request
from rowmesh.placement.sketch import AccessSketch
from rowmesh.placement.strategies import search
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology

if TYPE_CHECKING:
    from torch import Tensor

LEAST_GAIN = 0.02  # of the objective, or of the balance, for which rows are moved
CAPACITY = 2048  # rows of a table that a sketch counts one by one: at most twice as many ranges follow


@dataclass(frozen=True)
class Fit:
    """How well a plan serves some traffic.

    Attributes:
        coverage: share of accesses to rows with copies, 0 … 1.
        balance: least over most rows that a rank provides, 0 … 1.
    """

    coverage: float
    balance: float

    def to_plain(self) -> list[float]:
        """To be sent to other ranks."""
        return [float(self.coverage), float(self.balance)]

    @classmethod
    def from_plain(cls, values: Any) -> Self:
        """From what another rank sent."""
        coverage, balance = values
        return cls(coverage, balance)

    def shortfall(self, predicted: Fit, min_coverage: float, min_balance: float) -> str:
        """A message about values below their share of the prediction; empty where there are none."""
        found = []
        for name, share in (("coverage", min_coverage), ("balance", min_balance)):
            measured, expected = getattr(self, name), getattr(predicted, name)
            if measured < share * expected:
                found.append(f"{name} {measured:.1%} fell below {share:.0%} of the planned {expected:.1%}")
        return " and ".join(found)


class Traffic:
    """Counts the requests of one rank since the last `take`, in a few microseconds a group and step.

    Args:
        world_size: W.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.clear()

    def clear(self) -> None:
        """Resets all counts."""
        self._provided = np.zeros(self._world_size, np.int64)  # rows by the rank that provides them
        self._accesses = self._covered = 0
        self._on_device: dict[AddressMap, Tensor] = {}  # what the host has not looked at

    def add(self, address_map: AddressMap, offsets: NDArray[np.int64], accesses: NDArray[np.int64]) -> None:
        """Counts the requests of one batch for one group: by destination and segment, `[W, S′ + 1]` and `[W, S′]`.

        There may be one destination more than ranks, for rows that all of them have.
        """
        replying = len(address_map.segments(REPLIES))
        self._provided += (offsets[:, replying] - offsets[:, 0])[: self._world_size]
        self._provided[address_map.rank] += int((offsets[:, -1] - offsets[:, replying]).sum())
        self._accesses += int(accesses.sum())
        self._covered += int(accesses[:, address_map.segments(COPIES).start :].sum())

    def add_on_device(self, address_map: AddressMap, sizes: Tensor) -> None:
        """As `add`, of numbers on a device, which are added up there and copied to the host by `take`.

        That is between two steps, when no batch is ahead: what the stream that routes has added by then comes before
        all that the caller's stream still has to do.

        Args:
            address_map: of the group.
            sizes: int64 `[2, W, S′]`: requests by destination and segment, then accesses; one destination more, as
                in `add`.
        """
        if address_map in self._on_device:
            self._on_device[address_map] += sizes
        else:
            self._on_device[address_map] = sizes.clone()

    def _look(self) -> None:
        """Adds what was counted on a device; waits for it."""
        for address_map, sizes in self._on_device.items():
            requests, accesses = sizes.cpu().numpy().reshape(2, -1, address_map.num_segments)
            self.add(address_map, np.pad(requests.cumsum(1), ((0, 0), (1, 0))), accesses)

    def take(self) -> list[int]:
        """Accesses, those of rows with copies, and rows by rank; starts anew."""
        self._look()
        taken = [self._accesses, self._covered, *self._provided.tolist()]
        self.clear()
        return taken

    @staticmethod
    def fit(taken: Iterable[list[int]]) -> Fit | None:
        """Coverage and balance of the traffic of all ranks; None where there was none."""
        accesses, covered, *provided = np.sum(list(taken), axis=0).tolist()
        if not accesses:
            return None
        return Fit(covered / accesses, min(provided) / max(provided))


def predict(plan: Plan, problem: Problem) -> Fit:
    """Coverage and balance of a plan by the cost model.

    Example:
        >>> from rowmesh.placement import TablePlan, TableShape
        >>> shape = TableShape("item", 4, value_bytes=64, gradient_bytes=64)
        >>> profile = Profile.from_counts({"item": [6, 2, 1, 1]}, [shape], num_samples=10)
        >>> plan = Plan((TablePlan(shape, (RowRange(0, 1, "replicated"), RowRange(1, 4))),), 2, 2)
        >>> round(predict(plan, Problem(profile, Topology.uniform(2), Request(batch_size=1))).coverage, 3)
        0.6
    """
    sends_rows = [table for table in plan.tables if table.send == "rows"]  # requests of others are not counted
    plan = replace(plan, tables=tuple(sends_rows))
    problem = problem.of_tables([table.name for table in sends_rows])
    covered = total = 0.0
    for table in problem.profile.tables:
        sums = np.concatenate([[0.0], np.cumsum(table.lengths * table.accesses)])
        total += sums[-1]
        for part in plan.table(table.name).ranges:
            if _has_copies(plan, part):
                start, stop = np.interp([part.start, part.stop], table.starts, sums)
                covered += stop - start
    return Fit(float(covered / total) if total else 0.0, problem.cost(plan).lookup_balance if sends_rows else 1.0)


def has_copies(plan: Plan) -> bool:
    """Whether any row is on several ranks."""
    return any(_has_copies(plan, part) for table in plan.tables for part in table.ranges)


def _has_copies(plan: Plan, part: RowRange) -> bool:
    return (part.rule == "replicated" and plan.world_size > 1) or (part.rule == "node" and plan.num_nodes > 1)


@dataclass(frozen=True)
class Proposal:
    """The result of planning for recent traffic.

    Attributes:
        plan: the new plan; None where the old one is as good as any, or none can be made.
        text: why, for people.
    """

    plan: Plan | None
    text: str

    def to_plain(self) -> list[str | None]:
        """To be sent to other ranks."""
        return [self.plan and self.plan.to_json(), self.text]

    @classmethod
    def from_plain(cls, values: Any) -> Self:
        """From what another rank sent."""
        plan, text = values
        return cls(None if plan is None else Plan.from_json(plan), text)


class Planner:
    """Watches some batches, and makes a new plan of them in a thread of its own. On one rank, for all.

    A plan fits the batches that it was made of better than any others, the more so where rows are hot for a short time.
    So it is judged by those that are watched from `begin` on.

    Args:
        plan: which is in use.
        strategy: that makes new ones.
        topology: of the ranks.
        request: what plans are made for.
        capacity: rows of each table that are counted one by one.
        made_of: what the plan was made of, which says what tables are to send and what bags they have; None: rows.
    """

    def __init__(
        self,
        plan: Plan,
        strategy: str,
        topology: Topology,
        request: Request,
        capacity: int = CAPACITY,
        made_of: Profile | None = None,
    ) -> None:
        self.plan = plan
        self._known = {} if made_of is None else {table.name: table for table in made_of.tables}
        self._strategy, self._topology, self._request = strategy, topology, request
        self._capacity = capacity
        self._thread: Worker | None = None
        self._made: tuple[Plan, Profile] | Proposal | None = None
        self.forget()

    def forget(self) -> None:
        """Starts a new sketch."""
        self._sketch = AccessSketch([table.shape for table in self.plan.tables], capacity=self._capacity)
        self._num_samples = 0

    def watch(self, ids: Mapping[str, NDArray[np.int64]], num_samples: int) -> None:
        """Counts a batch: ids by table. Batches of another size than the first are left out, and ids of no row."""
        self._num_samples = self._num_samples or num_samples
        if num_samples and num_samples == self._num_samples:
            rows = {name: self.plan.table(name).shape.num_rows for name in ids}
            known = {name: values[(values >= 0) & (values < rows[name])] for name, values in ids.items()}
            self._sketch.add(known, num_samples)

    @property
    def is_planning(self) -> bool:
        """Whether a plan is being made, or waits to be taken."""
        return self._thread is not None

    def begin(self) -> None:
        """Starts to make a plan of what was watched; returns at once."""
        assert self._thread is None
        sketch = self._sketch
        self.forget()
        self._thread = Worker(target=self._propose, args=(sketch,), name="rowmesh-planner", daemon=True)
        self._thread.start()

    def take(self) -> Proposal | None:
        """The result, once, as soon as it is there; else None."""
        if self._thread is None or not self._thread.has_ended:
            return None
        made = self._made
        self.close()
        if made is None:
            return Proposal(None, "planning failed")
        return made if isinstance(made, Proposal) else self._judged(*made)

    def wait(self) -> None:
        """Until no plan is being made, so that `take` has it."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Waits until no plan is being made, and forgets it."""
        self.wait()
        self._thread = self._made = None

    def _propose(self, sketch: AccessSketch) -> None:
        try:
            profile = self._profile(sketch)
            self._made = search(self._strategy, profile, self._topology, self._request), profile
        except ConfigurationError as error:
            self._made = Proposal(None, f"no new plan can be made: {error}")

    def _profile(self, sketch: AccessSketch) -> Profile:
        """What a sketch counted, of tables and bags as they are known."""
        profile = sketch.profile()
        return replace(profile, tables=tuple(self._described(table) for table in profile.tables))

    def _described(self, table: TableProfile) -> TableProfile:
        known = self._known.get(table.name)
        if known is None:
            return table
        return replace(
            table,
            shape=known.shape,
            num_features=known.num_features,
            num_jagged=known.num_jagged,
            weight_bytes=known.weight_bytes,
        )

    def _judged(self, plan: Plan, made_of: Profile) -> Proposal:
        """By what came since, if anything did."""
        profile = self._profile(self._sketch) if self._num_samples else made_of
        problem = Problem(profile, self._topology, self._request)
        before, after = problem.cost(self.plan), problem.cost(plan)
        costs = [cost.objective(self._topology, self._request) for cost in (before, after)]
        is_cheaper = costs[1] < (1 - LEAST_GAIN) * costs[0]
        is_better_balanced = after.lookup_balance > (1 + LEAST_GAIN) * before.lookup_balance
        if is_cheaper or (is_better_balanced and costs[1] <= (1 + LEAST_GAIN) * costs[0]):
            return Proposal(plan, f"the new plan costs {costs[1] / costs[0]:.0%} of the old")
        return Proposal(None, "the plan is as good as a new one for recent traffic")
