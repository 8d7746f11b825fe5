"""What the parts of a tensor-train step give: the same kernels, with one part after the other left out.

Forward and backward are run on other arrangements of the same ids: without the order, every id is a group of its own;
without reuse of prefixes, every id is a prefix of its own; without distinct ids, every occurrence is an id. All give
the same rows, and all that train the same updates, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.command import Report
from benchmarks.measure import summarize
from rowmesh.ops.pool.one_feature import Bags
from rowmesh.ops.prefixes import HostPrefixes, Workspace
from rowmesh.ops.tensor_train import Lookup
from rowmesh.tables import TensorTrainShape
from rowmesh.tables.update_rules import SGD
from rowmesh.tensor_train import TensorTrainEmbeddingBag, TensorTrainOptimizer
from rowmesh.tensor_train.bags import bags_of

LR = 0.01


class OneByOne(HostPrefixes):
    """Every occurrence of an id by itself, in the order of the batch."""

    distinct, shared, ordered = False, False, False

    def __init__(self, ids: Tensor, shape: TensorTrainShape, workspace: Workspace) -> None:
        super().__init__(ids, shape.num_rows, shape.row_factors, workspace)
        if not self.shared:
            self._separate()
        if not self.ordered:
            self._disorder(shape)

    def _find_unique(self, ids: Tensor) -> int:
        if self.distinct:
            return super()._find_unique(ids)
        self.longs(self.unique, len(ids))[:] = ids.numpy()
        self.words(self.inverse, len(ids))[:] = np.arange(len(ids))
        self.words(self.counts, len(ids))[:] = 1
        return len(ids)

    def _separate(self) -> None:
        count, starts = self.num_unique, self.words(self.starts, self.num_prefixes + 1).copy()
        groups = self.words(self.group_starts, self.num_groups + 1)
        groups[:] = starts[groups]
        for firsts in (self.firsts, self.first_slots):
            values = np.repeat(self.words(firsts, self.num_prefixes), np.diff(starts))
            self.words(firsts, count)[:] = values
        self.words(self.starts, count + 1)[:] = np.arange(count + 1)
        self.num_prefixes, self.largest_group = count, int(np.diff(groups).max())

    def _disorder(self, shape: TensorTrainShape) -> None:
        """For forward only: a slice of the second core in several groups would be updated several times."""
        count, ids = self.num_unique, self.longs(self.unique, self.num_unique)
        first, second, third = np.unravel_index(ids, shape.row_factors)
        for address, values in ((self.arranged, np.arange(count)), (self.firsts, first), (self.lasts, third)):
            self.words(address, count)[:] = values
        self.words(self.group_starts, count + 1)[:] = np.arange(count + 1)
        self.longs(self.touched[1], count)[:] = second
        self.num_groups, self.largest_group = count, 1


class Ordered(OneByOne):
    """Sorted by the slice of the second core."""

    ordered = True


class Distinct(Ordered):
    """And every id once."""

    distinct = True


class Shared(Distinct):
    """And every prefix once: all of it."""

    shared = True


LEVELS: dict[str, type[OneByOne]] = {
    "one by one": OneByOne,
    "ordered": Ordered,
    "ordered, distinct ids": Distinct,
    "ordered, distinct ids and prefixes": Shared,
}


class AblatedBag(TensorTrainEmbeddingBag):
    """Arranges look-ups otherwise."""

    arrangement: type[OneByOne] = Shared

    def _look_up_bags(
        self, on_device: bool, input: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> tuple[Bags, Lookup]:
        bags = bags_of(input, offsets, weights, self.include_last_offset)
        return bags, Lookup(self.arrangement(bags.ids, self.shape, self._workspace))


def make_bag(case: Any, arrangement: type[OneByOne], sparse: bool = False) -> AblatedBag:
    """A bag of a case."""
    factors = {"row_factors": case.row_factors, "rank": case.rank}
    bag = AblatedBag(case.num_rows, case.dim, mode="sum", seed=0, sparse=sparse, **factors)
    bag.arrangement = arrangement
    return bag


def trainers(case: Any, grad: Tensor) -> dict[str, tuple[TensorTrainEmbeddingBag, Callable[[Tensor], None]]]:
    """Bags and their training steps by name."""
    bags = {f"{name}, fused update": make_bag(case, level) for name, level in LEVELS.items() if level.ordered}
    optimizers: dict[str, Any] = {name: TensorTrainOptimizer(bag, SGD(lr=LR)) for name, bag in bags.items()}
    for sparse in (True, False):
        name = f"{list(LEVELS)[-1]}, {'sparse' if sparse else 'dense'} gradients"
        bags[name] = make_bag(case, Shared, sparse)
        optimizers[name] = torch.optim.SGD(bags[name].parameters(), lr=LR)

    def step(name: str) -> Callable[[Tensor], None]:
        def run(ids: Tensor) -> None:
            optimizers[name].zero_grad(set_to_none=True)
            bags[name](ids.view(-1, 1)).backward(grad)
            optimizers[name].step()

        return run

    return {name: (bag, step(name)) for name, bag in bags.items()}


def lookups(case: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """Look-ups without gradients by name."""

    def infer(bag: TensorTrainEmbeddingBag) -> Callable[[Tensor], Tensor]:
        def run(ids: Tensor) -> Tensor:
            with torch.no_grad():
                return bag(ids.view(-1, 1))

        return run

    return {name: infer(make_bag(case, level)) for name, level in LEVELS.items()}


def run_case(
    report: Report, case: Any, batches: list[Tensor], options: Any, measure: Callable[..., dict[str, list[float]]]
) -> None:
    """All arrangements of one case."""
    grad = torch.randn(case.batch, case.dim, generator=torch.Generator().manual_seed(0))
    training = {name: step for name, (_, step) in trainers(case, grad).items()}
    kinds: dict[str, dict[str, Any]] = {"forward": lookups(case), "train": training}
    whole = {"forward": list(LEVELS)[-1], "train": f"{list(LEVELS)[-1]}, fused update"}
    for kind, functions in kinds.items():
        timings = {name: summarize(times) for name, times in measure(functions, batches, options).items()}
        for name, timing in timings.items():
            ratio = round(timing["step_ms"] / timings[whole[kind]]["step_ms"], 2)
            report.line(case=case.name, kind=kind, arrangement=name, **timing, ratio=ratio)
            report.ratio(f"{case.name} {kind}: {name} / all", ratio)
