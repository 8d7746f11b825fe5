"""Route: from unique ids to owners and slots, sorted by (owner, segment).

The counts per (owner, segment) come with the sort: they tell an owner which table each slot it receives belongs to, so
that category and instance of every id are known there without further communication.

Source: FusedRec §3 "Embedding Route" (rank-wise sort) and "Lossless Lookup".
Differs: the owner is dealt by arithmetic instead of hashed, and ids travel as 32-bit slots, from which the owner can
tell the row (row = slot's place in the table · W + what the owner's rank gives).
"""

from rowmesh.ops.route.cpu import route

__all__ = ["route"]
