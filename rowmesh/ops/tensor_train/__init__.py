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

from rowmesh.ops.tensor_train.cpu import ARRANGED, Constants, arrange, backward_kernel, forward_kernel, update_kernel

__all__ = ["ARRANGED", "Constants", "arrange", "backward_kernel", "forward_kernel", "update_kernel"]
