"""Relay: from the requests of a node's ranks to a node leader, to the requests of the leader to owners on other nodes.

A node leader merges the requests of its node. A key of theirs is a slot at the owner plus a stride times the owner's
node. `sort_relay` sorts those keys by (node, segment) and finds the address of each requested row; the second hop of
the exchange is then like the first.

Source: rowmesh's own; it generalises FusedRec §3 (rank-wise sort, lossless look-up) to two levels.
"""

from rowmesh.ops.relay.cpu import sort_relay

__all__ = ["sort_relay"]
