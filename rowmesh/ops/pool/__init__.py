"""Pool: the rows of each bag become one vector; its backward sums the gradients of equal ids before anything is sent.

Both work on unique rows and the inverse, so neither a row nor a gradient is ever expanded to one copy an id.

Source: FusedRec §3 "Embedding Recovery", Fig. 4 (one gather through composed indices). Differs: recovery and pooling
are one pass, and backward sums through the same indices.
"""

from rowmesh.ops.pool.cpu import DESCRIPTOR, file_cells, file_weights, id_weights, kernels

__all__ = ["DESCRIPTOR", "file_cells", "file_weights", "id_weights", "kernels"]
