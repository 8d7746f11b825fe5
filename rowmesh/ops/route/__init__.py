"""Route: from unique ids to where each is asked for, sorted by (destination, segment).

The counts per (destination, segment) come with the sort: they tell whoever receives a list which table each key in it belongs
to, so that category and instance of every id are known there without further communication.

Source: FusedRec §3 "Embedding Route" (rank-wise sort) and "Lossless Lookup"; OPER §5.1 (one pass resolves local,
remote and replicated rows alike).
Differs: the destination follows from a few ranges a table, and ids travel as 32-bit keys, from which the receiver can tell the
slot.
"""

from rowmesh.ops.route.buckets import first_rows
from rowmesh.ops.route.cpu import COPY, DESCRIPTOR, FLAG_BITS, HEADER, INDEX_ENTRY, RELAY, locate, route

__all__ = ["COPY", "DESCRIPTOR", "FLAG_BITS", "HEADER", "INDEX_ENTRY", "RELAY", "first_rows", "locate", "route"]
