"""Update slices: those of a tensor-train core that any rank read, given the gradient of the whole core.

Where one rank trains alone, the update follows the gradients in the same pass (`rowmesh.ops.tensor_train.update`), to
the bit with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rowmesh.ops.update_slices import cpu


def update_slices(
    core: Tensor,
    states: Sequence[Tensor],
    gradient: Tensor,
    touched: Tensor,
    rule: str,
    numbers: tuple[float, ...],
    *,
    is_on_device: bool,
) -> None:
    """Changes the touched slices of a core and their states, in place.

    Args:
        core: `[p, …]`, float32 or float64, contiguous.
        states: of the rule, in the order of its `state`, of the core's shape and dtype.
        gradient: of the core, of its shape and dtype.
        touched: `[p]` of that dtype: 0 where the slice stays as it is.
        rule: the name of an update rule that keeps state by element.
        numbers: what its `numbers` returned.
        is_on_device: whether a GPU's kernels run, which a CPU may interpret.
    """
    if not is_on_device:
        cpu.update_slices(core, states, gradient, touched, rule, numbers)
        return
    from rowmesh.ops.update_slices import cuda

    cuda.update_slices(core, states, gradient, touched, rule, numbers)
