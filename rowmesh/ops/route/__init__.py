"""Route: finds the destination of each unique id, and sorts the ids by (destination, segment).

The sort counts ids by (destination, segment) too. From these counts a receiver knows the table of each key in its list,
so category and instance of every id need no further communication.

Source: FusedRec §3 "Embedding Route" (rank-wise sort) and "Lossless Lookup"; OPER §5.1 (one pass resolves local,
remote and replicated rows alike).
Differs: the destination follows from a few ranges a table, and ids are sent as 32-bit keys, which the receiver turns
into slots.
"""

from rowmesh.ops.route.buckets import first_rows
from rowmesh.ops.route.cpu import COPY, DESCRIPTOR, FLAG_BITS, HEADER, INDEX_ENTRY, RELAY, locate, route

__all__ = ["COPY", "DESCRIPTOR", "FLAG_BITS", "HEADER", "INDEX_ENTRY", "RELAY", "first_rows", "locate", "route"]
