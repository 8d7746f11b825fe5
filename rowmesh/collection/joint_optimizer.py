"""JointOptimizer: several optimizers that step together or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from rowmesh.collection.optimizer import NO_COPY, EmbeddingOptimizer
from rowmesh.errors import CheckpointError, RowmeshError


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, for a `torch.amp.GradScaler`, which decides for each optimizer that it is given.

    Where the gradients of rows overflow and those of the dense network do not, `scaler.step` of each would step one
    and leave out the other. Given both at once it decides once: no rank steps anything where any rank found a number in
    the gradients of rows, or of the dense network that all ranks have alike, which is not finite. Rows step first: the
    dense network does not step where they raise.

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
        """The groups of the optimizers as they are now: loading a state gives an optimizer new ones."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """No-op: the groups stay the optimizers' own."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Nothing to add: the optimizers have their groups."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step of each optimizer, those of rows first, since these can refuse it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self._of_rows:
            optimizer.check_step()
        others = [optimizer for optimizer in self.optimizers if not isinstance(optimizer, EmbeddingOptimizer)]
        for optimizer in (*self._of_rows, *others):
            optimizer.step()
        return loss

    @property
    def _of_rows(self) -> list[EmbeddingOptimizer]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, EmbeddingOptimizer)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of each optimizer."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The states of the optimizers, in their order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned: of all optimizers, or of none.

        Raises:
            CheckpointError: it is of another number of optimizers, or what EmbeddingOptimizer raises.
            ValueError: what the other optimizers raise.
        """
        states = self._states_in(state_dict)
        for optimizer, state in states:
            if isinstance(optimizer, EmbeddingOptimizer):
                optimizer.order_of(state)
        before: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = []
        try:  # those of rows last: copies of their states would take as much memory
            for optimizer, state in sorted(states, key=lambda each: isinstance(each[0], EmbeddingOptimizer)):
                if not isinstance(optimizer, EmbeddingOptimizer):
                    before.append((optimizer, optimizer.state_dict()))
                optimizer.load_state_dict(state)
        except BaseException:
            for optimizer, state in before:
                optimizer.load_state_dict(state)
            raise

    def _states_in(self, state_dict: Mapping[str, Any]) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """The optimizers and their states."""
        states = state_dict.get("optimizers")
        if not isinstance(states, list | tuple) or len(states) != len(self.optimizers):
            what = f"of {len(states)} optimizers" if isinstance(states, list | tuple) else 'no "optimizers"'
            raise CheckpointError(
                f"the state dictionary is {what}, this JointOptimizer has {len(self.optimizers)}: "
                f"{[type(optimizer).__name__ for optimizer in self.optimizers]}; give it those that it was saved with"
            )
        return [*zip(self.optimizers, states, strict=True)]

    def order_of(self, state_dict: Mapping[str, Any]) -> list[int]:
        """For each parameter group the position of the one in a state dictionary that it goes on from.

        Raises:
            CheckpointError: that is of other optimizers.
        """
        found, begin = [], 0
        for optimizer, state in self._states_in(state_dict):
            of_rows = isinstance(optimizer, EmbeddingOptimizer)
            order = optimizer.order_of(state) if of_rows else range(len(optimizer.param_groups))
            found += [begin + place for place in order]
            begin += len(state["param_groups"])
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Refused."""
        raise RowmeshError(NO_COPY)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refused."""
        raise RowmeshError(NO_COPY)
