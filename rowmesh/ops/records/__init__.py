"""Records: a row and all its state back to back, as a backing store keeps them.

In memory rows are in one array and each state in another, so that kernels stream through them. A store reads and writes
one record a row. `pack` gathers records from arrays, `unpack` scatters them; both copy bits.
"""

from rowmesh.ops.records.cpu import Records

__all__ = ["Records"]
