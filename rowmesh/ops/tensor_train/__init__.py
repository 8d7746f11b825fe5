"""Tensor-train rows: looked up and trained without a table.

A table of p₁·p₂·p₃ rows and q₁·q₂·q₃ columns is the product of three cores, G₁ `[p₁, q₁, R₁]`, G₂ `[p₂, R₁, q₂, R₂]`
and G₃ `[p₃, q₃, R₂]`, a *slice* of each for an id:

    row(id)[j₁, j₂, j₃] = Σ over r₁, r₂ of G₁[i₁, j₁, r₁] · G₂[i₂, r₁, j₂, r₂] · G₃[i₃, j₃, r₂]
    id = (i₁ · p₂ + i₂) · p₃ + i₃

Forward multiplies G₁ and G₂ once for every distinct prefix (i₁, i₂), then by G₃ once for every distinct id. Backward
takes the gradients of distinct ids, already summed, sums them by prefix, and multiplies by G₁ and G₂ once for every
prefix. So memory and work follow distinct ids and prefixes, never the batch.

Source: EL-Rec (SC'22) §III, equations (1)–(6), Algorithm 1. Differs: prefixes are sorted, not found by atomic flags in
a buffer as long as p₁·p₂, so that results do not depend on the order of threads and a slice of G₂ is read into the
cache once; equation (6) is evaluated from the last core inwards, with partial products shared by all three gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.ops.prefixes import HostPrefixes, Loan, Prefixes
from rowmesh.ops.tensor_train import cpu

__all__ = ["SPARSE_OBSTACLE", "Products", "backward", "forward", "gradients", "multiply_again", "update"]

Products = Loan | Tensor  # of all prefixes, on a CPU in memory that is lent

SPARSE_OBSTACLE = (
    "sparse gradients are as long as slices were read, which the host would have to wait for on a device; take dense "
    "ones (sparse=False), which are no longer than the cores, or TensorTrainOptimizer"
)


def forward(cores: Sequence[Tensor], prefixes: Prefixes, out: Tensor | int, *, keep: bool) -> Products | None:
    """Writes the row of each distinct id.

    Args:
        cores: G₁ `[p₁, q₁, R₁]`, G₂ `[p₂, R₁, q₂, R₂]`, G₃ `[p₃, q₃, R₂]`, float32 or float64, contiguous.
        prefixes: of the ids; what made them says which kernels run.
        out: `[U, D]`, or its address on a CPU; on a device `[M, D]`, of which the rows of this table's ids are written.
        keep: whether the products of prefixes, which `backward` and `update` read, are returned.
    """
    if isinstance(prefixes, HostPrefixes):
        return cpu.forward(cores, prefixes, out, keep=keep)
    from rowmesh.ops.tensor_train import cuda

    assert isinstance(out, Tensor)
    _, products = cuda.forward(cores, prefixes.arrangement, out)
    return products if keep else None


def multiply_again(cores: Sequence[Tensor], prefixes: Prefixes) -> Products:
    """The products of prefixes, where `forward` did not keep them."""
    if isinstance(prefixes, HostPrefixes):
        return cpu.multiply_again(cores, prefixes)
    from rowmesh.ops.tensor_train import cuda

    return cuda.multiply(cores, prefixes.arrangement)


def backward(
    cores: Sequence[Tensor], prefixes: Prefixes, products: Products, row_gradients: Tensor, out: Sequence[Tensor]
) -> None:
    """Writes the gradients of the cores.

    Args:
        cores, prefixes: as for `forward`.
        products: what it returned.
        row_gradients: of the rows of the distinct ids, where `forward` wrote them; contiguous.
        out: contiguous tensors of the shapes of the cores, which are zero.
    """
    if isinstance(prefixes, HostPrefixes):
        assert isinstance(products, Loan)
        cpu.backward(cores, prefixes, products, row_gradients, out)
        return
    from rowmesh.ops.tensor_train import cuda

    assert isinstance(products, Tensor)
    cuda.backward(cores, prefixes.arrangement, products, row_gradients, out)


def gradients(
    cores: Sequence[Tensor], prefixes: Prefixes, products: Products, row_gradients: Tensor, *, sparse: bool
) -> tuple[Tensor, ...]:
    """The gradients of the cores in new memory, dense, or as sparse tensors of the touched slices.

    Raises:
        ConfigurationError: they are to be sparse on a device.
    """
    if isinstance(prefixes, HostPrefixes):
        assert isinstance(products, Loan)
        if sparse:
            return cpu.sparse_gradients(cores, prefixes, products, row_gradients)
        found = tuple(torch.zeros_like(core) for core in cores)
        cpu.backward(cores, prefixes, products, row_gradients, found)
        return found
    if sparse:
        raise ConfigurationError(SPARSE_OBSTACLE)
    from rowmesh.ops.tensor_train import cuda

    assert isinstance(products, Tensor)
    return cuda.backward(cores, prefixes.arrangement, products, row_gradients)


def update(
    cores: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    prefixes: Prefixes,
    products: Products,
    row_gradients: Tensor,
    rule: str,
    numbers: tuple[float, ...],
) -> None:
    """Updates the slices of the cores that the ids touch, in place.

    Args:
        cores, prefixes, products, row_gradients: as for `backward`.
        states: of each core, of its shape, in the order of the rule's `state`.
        rule: the name of an update rule that keeps state by element.
        numbers: what its `numbers` returned.

    Source: EL-Rec (SC'22) §III-B "Fused TT core Update".
    """
    if isinstance(prefixes, HostPrefixes):
        assert isinstance(products, Loan)
        cpu.update(cores, states, prefixes, products, row_gradients, rule, numbers)
        return
    from rowmesh.ops.tensor_train import cuda

    assert isinstance(products, Tensor)
    arrangement, of_cores = prefixes.arrangement, [tuple(kept) for kept in states]
    cuda.update(cores, of_cores, arrangement, products, row_gradients, rule, numbers)
