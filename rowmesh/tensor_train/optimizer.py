"""TensorTrainOptimizer: gradients of the touched slices and their update in one pass, as a torch optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.ops.tensor_train import Lookup
from rowmesh.tables.update_rules import RULES, AdaGrad, UpdateRule
from rowmesh.tensor_train.functions import Pending
from rowmesh.tensor_train.module import TensorTrainEmbeddingBag


class TensorTrainOptimizer(torch.optim.Optimizer):
    """Trains TensorTrainEmbeddingBags; one parameter group for each.

    Backward then leaves the cores' `grad` alone: it only sums the gradients of equal ids. `step` makes the gradients of
    the slices that were read and updates them in the same pass, so that a gradient of the middle core is never stored.
    Slices that no id of the step reads do not change, nor does their state: SGD and AdaGrad are torch's, to rounding;
    Adam is torch's on touched slices, lazily like `torch.optim.SparseAdam`, t counting the steps of the optimizer.

    Several backward passes before one step add up. Learning-rate schedules of `torch.optim.lr_scheduler` work on it,
    and it is saved, copied and pickled like any optimizer. Code that reads `grad` finds none: `clip_grad_norm_` passes
    the cores by, `step` refuses gradients that reach them by another way than a look-up (`dense()`, a penalty), and a
    look-up refuses `DistributedDataParallel`. A torch optimizer trains the cores where one of these is wanted.

    Args:
        bags: one bag, or several; the latest optimizer of a bag takes its gradients.
        rule: SGD, AdaGrad (default) or Adam.

    Raises:
        ConfigurationError: the rule has one value of state a row (cores have no rows), or cores are frozen.
        TypeError: these are no bags.

    Source: EL-Rec (SC'22) §III-B "In-advance Gradient Aggregation" and "Fused TT core Update". Differs: the update is
    at `step`, not inside of backward, so that gradients add up and schedules and closures work as with any optimizer.

    Example:
        >>> from rowmesh import SGD
        >>> bag = TensorTrainEmbeddingBag(100, 8, mode="sum", rank=4, seed=0)
        >>> optimizer = TensorTrainOptimizer(bag, SGD(lr=0.1))
        >>> bag(torch.tensor([[3, 7]])).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self, bags: TensorTrainEmbeddingBag | Iterable[TensorTrainEmbeddingBag], rule: UpdateRule | None = None
    ) -> None:
        self.bags = [bags] if isinstance(bags, TensorTrainEmbeddingBag) else list(bags)
        self.rule = rule or AdaGrad()
        if _keeps_state_by_row(self.rule):
            known = ", ".join(name for name, rule in RULES.items() if not _keeps_state_by_row(rule))
            raise ConfigurationError(
                f"tensor-train cores have no rows, and {self.rule.name} keeps state by row; they are trained by {known}"
            )
        if self.rule.weight_decay:
            raise ConfigurationError(
                f"weight_decay of {self.rule.name} is of the rows that a step touches, and tensor-train cores have "
                "none; leave it out, or train the bag by an optimizer of torch that has one"
            )
        for bag in self.bags:
            if not isinstance(bag, TensorTrainEmbeddingBag):
                raise TypeError(f"TensorTrainOptimizer takes TensorTrainEmbeddingBags, not {type(bag).__name__}")
            _check_trainable(bag)
        groups = [{"params": list(bag.cores), "lr": self.rule.lr, "name": bag.name, "steps": 0} for bag in self.bags]
        super().__init__(groups, {})
        self._connect()
        for core in (core for bag in self.bags for core in bag.cores):
            initial = self.rule.initial_state
            self.state[core] = {name: torch.full_like(core.detach(), value) for name, value in initial.items()}

    def _connect(self) -> None:
        self._pending = [Pending() for _ in self.bags]
        for bag, pending in zip(self.bags, self._pending, strict=True):
            bag.send_gradients_to(pending)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what a pickle makes, trains copies of the bags."""
        return super().__getstate__() | {"bags": self.bags, "rule": self.rule}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "bags" in state:  # `load_state_dict` comes here too
            self._connect()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """For the groups of the bags alone.

        Raises:
            ConfigurationError: the optimizer is made already.
        """
        if "_pending" in self.__dict__:
            raise ConfigurationError("TensorTrainOptimizer has a group for each of its bags and takes no others")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the slices that backward has found gradients for.

        Raises:
            ConfigurationError: gradients of a bag came by another way, or its cores are no longer those of the start.
            RowmeshError: several threads train at once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with contextlib.ExitStack() as gates:
            for bag in sorted(self.bags, key=id):  # in one order, whoever else has them
                gates.enter_context(bag.gate.writing)
            self._step()
        return loss

    def _step(self) -> None:
        for bag, pending, group in zip(self.bags, self._pending, self.param_groups, strict=True):
            self._check(bag, pending, group["params"])
        for pending, group in zip(self._pending, self.param_groups, strict=True):
            group["steps"] += 1
            taken = pending.taken
            pending.clear()
            if taken:
                lookup, gradients = taken[0] if len(taken) == 1 else Lookup.merged(taken)
                self._update(lookup, gradients, group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients that no step has used."""
        super().zero_grad(set_to_none)
        for pending in self._pending:
            pending.clear()

    def _check(self, bag: TensorTrainEmbeddingBag, pending: Pending, cores: Sequence[Tensor]) -> None:
        """Raises where gradients would be lost, or kernels would write past a state."""
        table = f"tensor-train table {bag.name!r}"
        if bag.pending is not pending:
            raise ConfigurationError(f"{table} sends its gradients elsewhere since: to a newer optimizer, or to `grad`")
        if pending.taken:
            _check_trainable(bag)
        if len(pending.threads) > 1:
            raise RowmeshError(
                f"{table} had backward passes in {len(pending.threads)} threads since the last step, which would take "
                "the gradients of all; let one thread train (others may look up under torch.no_grad()), and call "
                "zero_grad() to drop these"
            )
        for core, own in zip(cores, bag.cores, strict=True):
            if core.grad is not None and bool(core.grad.any()):
                raise ConfigurationError(
                    f"{table} has gradients in its cores' `grad`, which come from elsewhere than its look-ups "
                    "(dense(), a penalty, another module with these cores) or from before this optimizer: train it by "
                    "a torch optimizer instead, or zero_grad() first"
                )
            if core is not own:
                raise ConfigurationError(f"{table} got other cores since its optimizer was made: make another for them")
            _check_state(table, core, self.state.get(core, {}), self.rule)

    def _update(self, lookup: Lookup, row_gradients: Tensor, group: dict[str, Any]) -> None:
        cores: list[Tensor] = group["params"]
        states = [tuple(self.state[core][name] for name in self.rule.state) for core in cores]
        numbers = self.rule.numbers(float(group["lr"]), 1.0, group["steps"])
        lookup.update(cores, row_gradients, self.rule.name, states, numbers)
        lookup.release_products()  # the graph may live on with a loss that somebody keeps
        for core in cores:
            torch.autograd.graph.increment_version(core)


def _check_trainable(bag: TensorTrainEmbeddingBag) -> None:
    if not all(core.requires_grad for core in bag.cores):
        raise ConfigurationError(
            f"tensor-train table {bag.name!r} has frozen cores, and they are trained together or not at all; "
            "bag.requires_grad_(), or from_pretrained(..., freeze=False), lets them learn"
        )


def _check_state(table: str, core: Tensor, state: dict[str, Tensor], rule: UpdateRule) -> None:
    """Raises where it is no state of this rule that kernels can read and write beside the core."""
    if all(name in state and _kind(state[name]) == _kind(core) for name in rule.state):
        return
    found = {name: _text(state[name]) if name in state else "missing" for name in rule.state}
    raise ConfigurationError(
        f"{table} has a core of {_text(core)}, and of the optimizer's state is {found}; move or convert a module "
        "before its optimizer is made, and load the state of a table of this shape under this rule"
    )


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()


def _text(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}{'' if tensor.is_contiguous() else ', strided'}"


def _keeps_state_by_row(rule: UpdateRule | type[UpdateRule]) -> bool:
    return "row" in rule.state.values()
