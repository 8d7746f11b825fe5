"""Scaling: how torch.amp.GradScaler sees the gradients of rows.

A GradScaler divides every gradient of an optimizer by its scale, looks for numbers that are not finite, and leaves the
step out where it finds one. Gradients of rows are in no parameter: they wait, summed by row, where push sends them
from. So a group's placeholder has in `grad` a stand-in: to divide it is to note a factor, by which the update
multiplies, and to look at it is to look at the gradients of all ranks, since either all of them step or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from rowmesh.errors import RowmeshError

_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class RowGradients(Tensor):
    """The stand-in for the gradients of an optimizer's rows, which only a GradScaler can use.

    Attributes:
        unscale: takes what gradients are to be multiplied by; returns whether they are finite, on all ranks.
            Collective. Weak, so that an optimizer and its rows are freed with their last other reference.
    """

    unscale: WeakMethod[Callable[[float], bool]]

    @staticmethod
    def make(unscale: Callable[[float], bool]) -> RowGradients:
        """That of one optimizer."""
        made = torch.full((1,), torch.nan, device="cpu").as_subclass(RowGradients)
        made.unscale = WeakMethod(unscale)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Lets properties be read and gradients be unscaled; refuses all else, which would compute with the stand-in.

        Raises:
            RowmeshError: what is asked for is something else.
        """
        name = getattr(func, "__name__", "")
        if name == _UNSCALE:
            return _unscale(func, *args)
        if name != "__get__":
            raise RowmeshError(
                f"{name.strip('_')} cannot be computed of the gradients of rows, which are in no parameter: they wait "
                "with each rank until the step sends them to the owners of the rows. To clip by the norm, call "
                "EmbeddingOptimizer.clip_grad_norm_(max_norm, dense_parameters); a torch.amp.GradScaler works"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def _unscale(func: Any, gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """As torch's function: multiplies gradients by the inverse scale; 1 in `found_inf` where one is not finite."""
    if plain := [gradient for gradient in gradients if not isinstance(gradient, RowGradients)]:
        func(plain, found_inf, inverse_scale)
    rows = {id(gradient): gradient for gradient in gradients if isinstance(gradient, RowGradients)}
    found = [_called(gradient.unscale, float(inverse_scale)) for gradient in rows.values()]  # collective: of all
    if not all(found):
        found_inf.fill_(1.0)


def _called(method: WeakMethod[Any], *arguments: Any) -> Any:
    found = method()
    assert found is not None, "an optimizer that is gone"
    return found(*arguments)


class Placeholder(nn.Parameter):
    """Stands for the rows of a group in the parameter groups of an optimizer.

    Attributes:
        gradients: the stand-in for theirs.
        discard: forgets those.
    """

    gradients: RowGradients
    discard: WeakMethod[Callable[[], None]]

    @staticmethod
    def make(gradients: RowGradients, discard: Callable[[], None]) -> Placeholder:
        """Makes a placeholder without elements."""
        made = Placeholder(torch.empty(0, device="cpu"))
        made.gradients, made.discard = gradients, WeakMethod(discard)
        return made

    @property
    def grad(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        """The stand-in; None of a copy, which belongs to no optimizer."""
        return self.__dict__.get("gradients")

    @grad.setter
    def grad(self, value: None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value is not None:
            raise RowmeshError("gradients of rows cannot be set; None, or zero_grad(), forgets them")
        if "discard" in self.__dict__:
            _called(self.discard)
