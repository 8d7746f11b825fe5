"""TensorTrainOptimizer: gradients of the touched slices and their update in one pass, as a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.optim.rules import RULES, AdaGrad, UpdateRule
from rowmesh.tensor_train.lookup import LookedUp
from rowmesh.tensor_train.module import TensorTrainEmbeddingBag


class _Pending:
    """The gradients of rows that backward left for the next step of one bag."""

    def __init__(self) -> None:
        self.taken: list[tuple[Any, Tensor]] = []

    def take(self, lookup: Any, row_gradients: Tensor) -> None:
        self.taken.append((lookup, row_gradients))


class TensorTrainOptimizer(torch.optim.Optimizer):
    """Trains TensorTrainEmbeddingBags; one parameter group for each.

    Backward then leaves the cores' `grad` alone: it only sums the gradients of equal ids. `step` makes the gradients of
    the slices that were read and updates them in the same pass, so that a gradient of the middle core is never stored.
    Slices that no id of the step reads do not change, nor does their state: SGD and AdaGrad are torch's, to rounding;
    Adam is torch's on touched slices, lazily like `torch.optim.SparseAdam`, t counting the steps of the optimizer.

    Several backward passes before one step add up. Learning-rate schedules of `torch.optim.lr_scheduler` work on it.

    Args:
        bags: one bag, or several; each has at most one such optimizer at a time.
        rule: SGD, AdaGrad (default) or Adam.

    Raises:
        ConfigurationError: the rule has one value of state a row (cores have no rows), or cores are frozen.

    Source: EL-Rec (SC'22) §III-B "In-advance Gradient Aggregation" and "Fused TT core Update". Differs: the update is
    at `step`, not inside of backward, so that gradients add up and schedules and closures work as with any optimizer.

    Example:
        >>> from rowmesh.optim import SGD
        >>> bag = TensorTrainEmbeddingBag(100, 8, mode="sum", rank=4, seed=0)
        >>> optimizer = TensorTrainOptimizer(bag, SGD(lr=0.1))
        >>> bag(torch.tensor([[3, 7]])).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self, bags: TensorTrainEmbeddingBag | Iterable[TensorTrainEmbeddingBag], rule: UpdateRule | None = None
    ) -> None:  # fmt: skip
        self.bags = [bags] if isinstance(bags, TensorTrainEmbeddingBag) else list(bags)
        self.rule = rule or AdaGrad()
        if _keeps_state_by_row(self.rule):
            known = ", ".join(name for name, rule in RULES.items() if not _keeps_state_by_row(rule))
            raise ConfigurationError(
                f"tensor-train cores have no rows, and {self.rule.name} keeps state by row; they are trained by {known}"
            )
        for bag in self.bags:
            if not all(core.requires_grad for core in bag.cores):
                raise ConfigurationError(
                    f"tensor-train table {bag.name!r} has frozen cores, and they are trained together or not at all; "
                    "bag.requires_grad_(), or from_pretrained(..., freeze=False), lets them learn"
                )
        groups = [{"params": list(bag.cores), "lr": self.rule.lr, "name": bag.name, "steps": 0} for bag in self.bags]
        super().__init__(groups, {})
        self._pending = [_Pending() for _ in self.bags]
        for bag, pending in zip(self.bags, self._pending, strict=True):
            bag.send_gradients_to(pending)
            for core in bag.cores:
                initial = self.rule.initial_state
                self.state[core] = {name: torch.full_like(core.detach(), value) for name, value in initial.items()}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the slices that backward has found gradients for."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for pending, group in zip(self._pending, self.param_groups, strict=True):
            group["steps"] += 1
            taken, pending.taken = pending.taken, []
            if taken:
                lookup, gradients = taken[0] if len(taken) == 1 else type(taken[0][0]).merged(taken)
                self._update(lookup, gradients, group)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients that no step has used."""
        super().zero_grad(set_to_none)
        for pending in self._pending:
            pending.taken = []

    def _update(self, lookup: LookedUp, row_gradients: Tensor, group: dict[str, Any]) -> None:
        cores: list[Tensor] = group["params"]
        self._check_devices(group)
        states = [tuple(self.state[core][name] for name in self.rule.state) for core in cores]
        numbers = self.rule.numbers(float(group["lr"]), 1.0, group["steps"])
        lookup.update(cores, row_gradients, self.rule.name, states, numbers)
        lookup.release_products()  # the graph may live on with a loss that somebody keeps
        for core in cores:
            torch.autograd.graph.increment_version(core)

    def _check_devices(self, group: dict[str, Any]) -> None:
        """Raises where a bag was moved and its state was not."""
        for core in group["params"]:
            for kept in self.state[core].values():
                if kept.device != core.device:
                    raise ConfigurationError(
                        f"the cores of {group['name']!r} are on {core.device}, and the optimizer's state on "
                        f"{kept.device}; move a module before its optimizer is made, or load the state again"
                    )


def _keeps_state_by_row(rule: UpdateRule | type[UpdateRule]) -> bool:
    return "row" in rule.state.values()
