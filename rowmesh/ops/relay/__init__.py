"""Relay: from what a node's ranks ask of an agent to what the agent asks of owners on other nodes.

An agent has merged the requests of its node: a key there is a slot at the owner plus a stride times the owner's node.
`sort_relay` brings those keys in the order (node, segment) and says where each requested row will be read; the second
hop of the exchange is then like the first.

Source: rowmesh's own; it generalises FusedRec §3 (rank-wise sort, lossless look-up) to two levels.
"""

from rowmesh.ops.relay.cpu import sort_relay

__all__ = ["sort_relay"]
