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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.ops.prefixes import DevicePrefixes, HostPrefixes, Prefixes, merge
from rowmesh.ops.tensor_train import cpu

__all__ = ["SPARSE_OBSTACLE", "Lookup"]

SPARSE_OBSTACLE = (
    "sparse gradients are as long as slices were read, which the host would have to wait for on a device; take dense "
    "ones (sparse=False), which are no longer than the cores, or TensorTrainOptimizer"
)


class Lookup:
    """The distinct ids of a batch in one table, on a CPU or a device, with what a backward through its cores needs.

    `cores` are everywhere G₁ `[p₁, q₁, R₁]`, G₂ `[p₂, R₁, q₂, R₂]`, G₃ `[p₃, q₃, R₂]`, float32 or float64, contiguous.
    `row_gradients` are those of the rows of the distinct ids, where `rows` wrote them; contiguous.

    Args:
        prefixes: the ids, sorted; what made them says which kernels run.
        late_check: raises what is wrong with the ids, where that is found on a device and read later.
        version: of the cores.

    Attributes:
        prefixes, version: see above.
    """

    def __init__(self, prefixes: Prefixes, late_check: Callable[[], None] | None = None, version: int = 0) -> None:
        self.prefixes, self.version, self._late_check = prefixes, version, late_check

    @classmethod
    def merged(cls, taken: Sequence[tuple[Lookup, Tensor]]) -> tuple[Lookup, Tensor]:
        """Several look-ups in one table, with the gradients of their rows, as one: those of equal ids are summed.

        The sums are in the order of the look-ups.
        """
        prefixes, summed = merge([(lookup.prefixes, row_gradients) for lookup, row_gradients in taken])
        return cls(prefixes), summed

    @property
    def num_unique(self) -> int:
        """The most distinct ids that there can be: U on a CPU, N on a device, where U stays."""
        return self.prefixes.num_unique

    def check(self) -> None:
        """Raises what is wrong with the ids, where that is known only later."""
        if self._late_check is not None:
            self._late_check()

    def rows(self, cores: Sequence[Tensor], out: Tensor | int, *, keep: bool) -> None:
        """Writes the row of each distinct id.

        Args:
            cores: of the table.
            out: `[U, D]`, or its address on a CPU; on a device `[M, D]`, of which this table's rows are written.
            keep: whether the products of prefixes are kept for a backward.
        """
        if isinstance(self.prefixes, HostPrefixes):
            cpu.forward(cores, self.prefixes, out, keep=keep)
            return
        from rowmesh.ops.tensor_train import cuda

        assert isinstance(out, Tensor)
        _, products = cuda.forward(cores, self.prefixes.arrangement, out)
        self.prefixes.products = products if keep else None

    def new_rows(self, cores: Sequence[Tensor], *, keep: bool) -> Tensor:
        """The same, `[U, D]` in memory of its own; zero where there is no distinct id."""
        make = torch.empty if isinstance(self.prefixes, HostPrefixes) else torch.zeros  # a device may have fewer ids
        out = make(self.num_unique, cpu.dim_of(cores), dtype=cores[0].dtype, device=cores[0].device)
        self.rows(cores, out, keep=keep)
        return out

    def release_products(self) -> None:
        """Gives the products of prefixes back; a second backward makes them again."""
        self.prefixes.products = None

    def gradients(self, cores: Sequence[Tensor], row_gradients: Tensor, *, sparse: bool) -> tuple[Tensor, ...]:
        """The gradients of the cores, dense, or as sparse tensors of the touched slices.

        Raises:
            ConfigurationError: they are to be sparse on a device.
        """
        if not isinstance(self.prefixes, HostPrefixes):
            if sparse:
                raise ConfigurationError(SPARSE_OBSTACLE)
            cuda, how = _on_device(cores, self.prefixes)
            return cuda.backward(*how, row_gradients)
        if sparse:
            return cpu.sparse_gradients(cores, self.prefixes, row_gradients)
        found = tuple(torch.zeros_like(core) for core in cores)
        cpu.backward(cores, self.prefixes, row_gradients, found)
        return found

    def fill_gradients(self, cores: Sequence[Tensor], row_gradients: Tensor, out: Sequence[Tensor]) -> None:
        """Writes the gradients of the cores into contiguous tensors of their shapes, which are zero."""
        if isinstance(self.prefixes, HostPrefixes):
            cpu.backward(cores, self.prefixes, row_gradients, out)
        else:
            cuda, how = _on_device(cores, self.prefixes)
            cuda.backward(*how, row_gradients, out)

    def make_room_to_update(self, cores: Sequence[Tensor]) -> None:
        """On a CPU, takes the memory that `update` needs."""
        if isinstance(self.prefixes, HostPrefixes):
            cpu.make_room_to_update(cores, self.prefixes)

    def update(
        self,
        cores: Sequence[Tensor],
        row_gradients: Tensor,
        rule: str,
        states: Sequence[Sequence[Tensor]],
        numbers: tuple[float, ...],
    ) -> None:
        """Updates the slices of the cores that the ids touch, in place.

        Args:
            cores, row_gradients: of the table.
            rule: the name of an update rule that keeps state by element.
            states: of each core, of its shape, in the order of the rule's `state`.
            numbers: what its `numbers` returned.

        Source: EL-Rec (SC'22) §III-B "Fused TT core Update".
        """
        if isinstance(self.prefixes, HostPrefixes):
            cpu.update(cores, states, self.prefixes, row_gradients, rule, numbers)
        else:
            cuda, (_, *how) = _on_device(cores, self.prefixes)
            cuda.update(cores, [tuple(kept) for kept in states], *how, row_gradients, rule, numbers)


def _on_device(cores: Sequence[Tensor], prefixes: DevicePrefixes) -> tuple[Any, tuple[Any, ...]]:
    """The kernels of a device, and what they read: cores, arrangement, products."""
    from rowmesh.ops.tensor_train import cuda

    if prefixes.products is None:
        prefixes.products = cuda.multiply(cores, prefixes.arrangement)
    return cuda, (cores, prefixes.arrangement, prefixes.products)
