"""EmbeddingOptimizer: the update of an EmbeddingCollection, as a torch optimizer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from rowmesh.collection.saved_groups import sources, taken
from rowmesh.collection.scaling import Placeholder, RowGradients
from rowmesh.collection.state_form import state_form
from rowmesh.errors import CheckpointError, RowmeshError
from rowmesh.tables.update_rules import Rate

logger = logging.getLogger("rowmesh")

NO_COPY = (
    "an optimizer of rows cannot be copied or pickled: it updates the rows of one EmbeddingCollection. Make another "
    "one of the collection that it is to update, and give it load_state_dict(optimizer.state_dict()), or rowmesh.save "
    "and rowmesh.load both"
)
_NORM_TOLERANCE = 1e-4  # of an all-reduce all ranks get the same bits; their kernels may add in another order
_BACKWARD_AFTER = (
    "backward ran after the gradients of rows were unscaled or clipped, and added some that are not; unscale and clip "
    "when all are there, or zero_grad()"
)


class _Group(Protocol):
    name: str
    optimizer: Any


class _Engine(Protocol):
    step_count: int

    def count_from(self, steps: int) -> None: ...

    def push_pending(self, rates: Sequence[Rate]) -> None: ...

    def check_pending(self) -> bool: ...

    @property
    def num_backwards(self) -> int: ...

    def gradient_norm(self) -> float: ...

    def agree(self, value: float) -> list[float]: ...

    def discard_pending(self) -> None: ...

    def wait(self) -> None: ...


class _Collection(Protocol):
    groups: Any

    @property
    def engine(self) -> _Engine: ...

    def save_state(self, kind: Literal["optimizer"]) -> dict[str, Tensor]: ...

    def load_state(self, kind: Literal["optimizer"], tensors: Mapping[str, Tensor]) -> None: ...


class _Unscaled(NamedTuple):
    """The factor that a GradScaler or clipping gave the gradients.

    Attributes:
        factor: what gradients were multiplied by.
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
    scaled, `it.step()` alone takes the scaled gradients: nothing here can see that. The method `clip_grad_norm_` clips
    the gradients of rows and of the dense network together; that of torch, given these parameter groups, raises
    RowmeshError.

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
            {
                "params": [Placeholder.make(gradients, self.zero_grad)],
                "lr": group.optimizer.lr,
                "name": group.name,
                "tables": [table.name for table in group.tables],
            }
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
        self._engine.push_pending(self._rates())
        self._unscaled = None  # a step that raised may come again, and takes the gradients as they were to be taken
        return loss

    def _rates(self) -> list[Rate]:
        """The rates of the next step of each group; it cannot be taken where this raises RowmeshError."""
        factor = 1.0 if self._unscaled is None else self._factor(self._unscaled)
        rates: list[Rate] = []
        for group in self.param_groups:
            rates.append(Rate(float(group["lr"]), factor))
        return rates

    def check_step(self) -> None:
        """Raises RowmeshError where `step` could not use the gradients that are there. Local."""
        self._rates()

    def clip_grad_norm_(
        self, max_norm: float, dense_parameters: Iterable[Tensor] = (), *, error_if_nonfinite: bool = True
    ) -> Tensor:
        """Clips the gradients of rows and of dense parameters by the norm of all of them together.

        As `torch.nn.utils.clip_grad_norm_` over all of a dense model: the gradient of a row is the mean over ranks of
        its sums over all ids that name it; of tensor-train tables the gradients are those of their cores. Call it after
        the last backward of a step, and after `scaler.unscale_`. Collective and blocking; it moves the gradients of
        rows once more, but in a pipeline whose rows travel by micro-batch, and returns the same norm on all ranks.

        Args:
            max_norm: what the norm may be.
            dense_parameters: those of the dense network, whose gradients are averaged over the ranks already.
            error_if_nonfinite: raise where the norm is no finite number; after `scaler.unscale_` a GradScaler sees to
                that, and none is raised.

        Returns:
            The norm before clipping.

        Raises:
            RowmeshError: the norm is not finite; or dense gradients differ between ranks.
            ConfigurationError: replicas are averaged, whose gradients have no norm in common.

        Example:
            >>> from rowmesh import EmbeddingCollection, SparseBatch, TableSpec
            >>> embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=5, dim=4)])
            >>> optimizer = EmbeddingOptimizer(embeddings)
            >>> embeddings(SparseBatch.from_bags({"item": [[1], [1, 2]]})).values.sum().backward()
            >>> optimizer.clip_grad_norm_(1.0)  # 2 of each element of row 1, 1 of row 2: √(4 · 4 + 4 · 1)
            tensor(4.4721)
        """
        dense = [parameter for parameter in dense_parameters if not isinstance(parameter, Placeholder)]
        gradients = [parameter.grad for parameter in dense if parameter.grad is not None]
        of_rows = self._engine.gradient_norm()
        norms = self._engine.agree(float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0)
        if any(abs(norm - norms[0]) > _NORM_TOLERANCE * norms[0] for norm in norms):
            raise RowmeshError(
                f"dense gradients differ between ranks, whose norms are {norms}: average them before they are clipped "
                "(DistributedDataParallel does so in backward)"
            )
        before, now = self._unscaled, self._engine.num_backwards
        if before is not None and before.num_backwards != now:
            raise RowmeshError(_BACKWARD_AFTER)
        factor, is_finite = (1.0, True) if before is None else before[:2]
        norm = math.hypot(norms[0], factor * of_rows)
        total = torch.tensor(norm, dtype=self._norm_dtype(gradients))
        if not is_finite:
            return total  # the scaler leaves this step out
        if error_if_nonfinite and not total.isfinite():
            raise RowmeshError(
                f"the norm of all gradients is {float(total)} and cannot be clipped; zero_grad() drops them, a "
                "torch.amp.GradScaler leaves such steps out"
            )
        torch.nn.utils.clip_grads_with_norm_(dense, max_norm, total)
        self._unscaled = _Unscaled(factor * min(1.0, max_norm / (norm + 1e-6)), True, now)
        return total

    def _norm_dtype(self, gradients: Sequence[Tensor]) -> torch.dtype:
        """As torch has it for one model: the widest of what is clipped."""
        is_double = any(group.dtype == torch.float64 for group in self.collection.groups)
        is_double = is_double or any(gradient.dtype == torch.float64 for gradient in gradients)
        return torch.float64 if is_double else torch.float32

    def _unscale(self, factor: float) -> bool:
        """Notes what gradients are to be multiplied by; returns whether they are finite on all ranks. Collective."""
        is_finite = self._engine.check_pending()
        self._unscaled = _Unscaled(factor, is_finite, self._engine.num_backwards)
        return is_finite

    def _factor(self, unscaled: _Unscaled) -> float:
        """The factor of the gradients in this step."""
        has_more = unscaled.num_backwards != self._engine.num_backwards
        if unscaled.is_finite and has_more:
            raise RowmeshError(_BACKWARD_AFTER)
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
        """Learning rates, the step count, and under "rows" copies of the optimizer states of all rows, by name.

        Raises:
            CheckpointError: rows are spread over several ranks, or in tiers; `rowmesh.save` writes their states.
        """
        self._engine.wait()
        found = super().state_dict() | {"step_count": self._engine.step_count}
        if state_form() != "elsewhere":
            found["rows"] = self.collection.save_state("optimizer")
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; learning rates go to the tables that had them, in whatever order.

        The state of a schedule of torch is by position: where tables come in another order, `rowmesh.load` puts it in
        order, and a line of the log says so where this method is called by itself.

        Raises:
            CheckpointError: optimizer states of rows are missing, of other tables, or of another optimizer. Nothing has
                changed then.
        """
        state = self._checked(state_dict)
        order = self.order_of(state_dict)
        if state_form() != "elsewhere":
            self.collection.load_state("optimizer", state["rows"])
        if state_form() == "whole" and order != sorted(order):
            logger.warning(
                "tables come in another order than in the state of their optimizer: learning rates follow them, and "
                "the state of a schedule does not; load both by rowmesh.load, or make the schedule anew"
            )
        state.pop("rows", None)
        self._engine.count_from(state.pop("step_count"))
        super().load_state_dict(state)

    def order_of(self, state_dict: Mapping[str, Any]) -> list[int]:
        """For each parameter group the position of the one in a state dictionary that it goes on from.

        Raises:
            CheckpointError: that is of other tables, or of another optimizer.
        """
        if lacking := [key for key in ("param_groups", "step_count") if key not in state_dict]:
            raise CheckpointError(f"this is no state of an EmbeddingOptimizer: it has no {lacking}")
        return sources(state_dict["param_groups"], self.param_groups)

    def _checked(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The state with the groups of this optimizer; raises CheckpointError where it does not fit."""
        order = self.order_of(state_dict)
        if state_form() != "elsewhere" and state_dict.get("rows") is None:
            raise CheckpointError(
                "this state dictionary of an EmbeddingOptimizer has no optimizer states of rows; it is part of a "
                "checkpoint that has them beside it: rowmesh.load reads both"
            )
        groups = taken(state_dict["param_groups"], self.param_groups, order)
        return {"state": {}, **state_dict, "param_groups": groups}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Refused."""
        raise RowmeshError(NO_COPY)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refused."""
        raise RowmeshError(NO_COPY)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups follow the collection's; only the constructor adds them."""
        tensors: list[Tensor] = list(param_group["params"])
        if any(tensor.numel() for tensor in tensors):
            raise TypeError("an EmbeddingOptimizer updates its collection's rows only")
        super().add_param_group(param_group)
