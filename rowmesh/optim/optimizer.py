"""EmbeddingOptimizer: the update of an EmbeddingCollection, as a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class _Group(Protocol):
    name: str
    optimizer: Any


class _Collection(Protocol):
    groups: Any
    step_count: int

    def push_pending(self, lrs: list[float]) -> None: ...

    def discard_pending(self) -> None: ...

    def settle(self) -> None: ...


class EmbeddingOptimizer(torch.optim.Optimizer):
    """Updates the rows that the last backward touched; one parameter group for each fused group of tables.

    The update rule and its first learning rate are the tables' own (`TableSpec.optimizer`). Learning-rate schedules of
    `torch.optim.lr_scheduler` work on it: they change `param_groups[i]["lr"]`. Several backward passes before one
    step add up.

    Args:
        collection: the EmbeddingCollection.

    Example:
        >>> from rowmesh import EmbeddingCollection, TableSpec
        >>> optimizer = EmbeddingOptimizer(EmbeddingCollection([TableSpec(name="item", num_rows=5, dim=4)]))
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
        >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
        [('dim4_row_wise_adagrad', 0.01)]
    """

    def __init__(self, collection: _Collection) -> None:
        self.collection = collection
        # torch wants a tensor in each group; the rows themselves are not parameters.
        groups = [
            {"params": [torch.nn.Parameter(torch.empty(0, device="cpu"))], "lr": group.optimizer.lr, "name": group.name}
            for group in collection.groups
        ]
        super().__init__(groups, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes gradients to the owners of rows, which update them; every rank must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.collection.push_pending([float(group["lr"]) for group in self.param_groups])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients that no step has used."""
        self.collection.discard_pending()

    def state_dict(self) -> dict[str, Any]:
        """Learning rates and the step count; the rows' state belongs to the collection's checkpoint."""
        self.collection.settle()
        return super().state_dict() | {"step_count": self.collection.step_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        state = dict(state_dict)
        self.collection.step_count = state.pop("step_count")
        super().load_state_dict(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups follow the collection's; only the constructor adds them."""
        tensors: list[Tensor] = list(param_group["params"])
        if any(tensor.numel() for tensor in tensors):
            raise TypeError("an EmbeddingOptimizer updates its collection's rows only")
        super().add_param_group(param_group)
