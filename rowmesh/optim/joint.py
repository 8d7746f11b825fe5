"""JointOptimizer: several optimizers that step together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, for a `torch.amp.GradScaler`, which decides for each optimizer that it is given.

    Where the gradients of rows overflow and those of the dense network do not, `scaler.step` of each would step one
    and leave out the other. Given both at once it decides once: no rank steps anything where any rank found a number in
    the gradients of rows, or of the dense network that all ranks have alike, which is not finite.

    Parameter groups are those of the optimizers, the same objects: schedules may hold either.

    Args:
        optimizers: those of the dense network and of the rows.

    Example:
        >>> from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
        >>> embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=5, dim=4)])
        >>> dense = torch.nn.Linear(4, 1)
        >>> optimizer = JointOptimizer(torch.optim.SGD(dense.parameters(), lr=0.1), EmbeddingOptimizer(embeddings))
        >>> scaler = torch.amp.GradScaler("cpu")
        >>> optimizer.zero_grad()
        >>> loss = dense(embeddings(SparseBatch.from_bags({"item": [[1], [2]]})).values).mean()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> embeddings.step_count
        1
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of the optimizers as they are now: loading a state gives an optimizer new ones."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """They stay the optimizers' own."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Nothing to add: the optimizers have their groups."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of each."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Those of the optimizers, in their order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
