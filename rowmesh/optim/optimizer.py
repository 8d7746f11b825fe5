"""EmbeddingOptimizer: the update of an EmbeddingCollection, as a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rowmesh.errors import RowmeshError
from rowmesh.optim.rules import Rate
from rowmesh.optim.scaling import Placeholder, RowGradients


class _Group(Protocol):
    name: str
    optimizer: Any


class _Engine(Protocol):
    step_count: int

    def push_pending(self, rates: Sequence[Rate]) -> None: ...

    def check_pending(self) -> bool: ...

    @property
    def num_backwards(self) -> int: ...

    def discard_pending(self) -> None: ...

    def wait(self) -> None: ...


class _Collection(Protocol):
    groups: Any

    @property
    def engine(self) -> _Engine: ...


class _Unscaled(NamedTuple):
    """What a GradScaler did.

    Attributes:
        factor: what it multiplied gradients by.
        is_finite: whether they were.
        num_backwards: backward passes until then.
    """

    factor: float
    is_finite: bool
    num_backwards: int


class EmbeddingOptimizer(torch.optim.Optimizer):
    """Updates the rows that the last backward touched; one parameter group for each fused group of tables.

    The update rule and its first learning rate are the tables' own (`TableSpec.optimizer`). Learning-rate schedules of
    `torch.optim.lr_scheduler` work on it: they change `param_groups[i]["lr"]`, on all ranks alike. Several backward
    passes before one step add up.

    A `torch.amp.GradScaler` works on it as on any optimizer, and decides for all ranks together: `scaler.step(it)` in
    the place of `it.step()`. `rowmesh.JointOptimizer` makes it decide for the dense network too. Where a loss was
    scaled, `it.step()` alone takes the scaled gradients: nothing here can see that. Gradients of rows cannot be
    clipped: `clip_grad_norm_` over these parameter groups raises RowmeshError.

    Args:
        collection: the EmbeddingCollection.

    Example:
        >>> from rowmesh import EmbeddingCollection, TableSpec
        >>> optimizer = EmbeddingOptimizer(EmbeddingCollection([TableSpec(name="item", num_rows=5, dim=4)]))
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
        >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
        [('dim4_row_wise_adagrad', 0.01)]
        >>> optimizer
        EmbeddingOptimizer(dim4_row_wise_adagrad: lr 0.01; 0 steps)
    """

    def __init__(self, collection: _Collection) -> None:
        self.collection = collection
        self._engine = collection.engine
        # torch wants a tensor in each group; the rows themselves are not parameters.
        gradients = RowGradients.make(self._unscale)
        groups = [
            {"params": [Placeholder.make(gradients, self.zero_grad)], "lr": group.optimizer.lr, "name": group.name}
            for group in collection.groups
        ]
        self._unscaled: _Unscaled | None = None
        super().__init__(groups, {})

    def __repr__(self) -> str:
        groups = ", ".join(f"{group['name']}: lr {float(group['lr']):g}" for group in self.param_groups)
        return f"EmbeddingOptimizer({groups}; {self._engine.step_count} steps)"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes gradients to the owners of rows, which update them; every rank must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor = 1.0
        if self._unscaled is not None:
            factor, self._unscaled = self._factor(self._unscaled), None
        rates = []
        for group in self.param_groups:
            rates.append(Rate(float(group["lr"]), factor))
        self._engine.push_pending(rates)
        return loss

    def _unscale(self, factor: float) -> bool:
        """Notes what gradients are to be multiplied by; returns whether they are finite on all ranks. Collective."""
        is_finite = self._engine.check_pending()
        self._unscaled = _Unscaled(factor, is_finite, self._engine.num_backwards)
        return is_finite

    def _factor(self, unscaled: _Unscaled) -> float:
        """What gradients are to be multiplied by."""
        has_more = unscaled.num_backwards != self._engine.num_backwards
        if unscaled.is_finite and has_more:
            raise RowmeshError(
                "backward ran after the gradients of rows were unscaled, and added some that are not; unscale when all "
                "are there, or zero_grad()"
            )
        if not unscaled.is_finite and not has_more:
            raise RowmeshError(
                "gradients of rows are not finite, on this rank or another; scaler.step(optimizer) leaves such a step "
                "out, zero_grad() drops them"
            )
        return unscaled.factor if unscaled.is_finite else 1.0  # that step was left out

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients that no step has used."""
        self._unscaled = None
        self._engine.discard_pending()

    def state_dict(self) -> dict[str, Any]:
        """Learning rates and the step count; the rows' state belongs to the collection's checkpoint."""
        self._engine.wait()
        return super().state_dict() | {"step_count": self._engine.step_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        state = dict(state_dict)
        self._engine.step_count = state.pop("step_count")
        super().load_state_dict(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups follow the collection's; only the constructor adds them."""
        tensors: list[Tensor] = list(param_group["params"])
        if any(tensor.numel() for tensor in tensors):
            raise TypeError("an EmbeddingOptimizer updates its collection's rows only")
        super().add_param_group(param_group)
