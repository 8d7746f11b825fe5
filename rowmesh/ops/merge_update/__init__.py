"""Merge of duplicate keys, and the optimizer's update in place.

An owner receives, from every rank, a list of slots and their gradients. `merge` finds the distinct slots and chains the
requests for each in the order of the ranks; `update` sums the gradients of a chain and changes the row and its state in
the same pass, so that no merged gradient is ever written. Where requests come from several nodes, each node's are
summed first, then the nodes' sums: the order that an exchange in two hops has too.

The merge is FusedRec's owner-side unique (§3 "Lossless Lookup"): the collective transport also answers look-ups
through it.
"""

from rowmesh.ops.merge_update.cpu import Merger, Singles, sum_kernels, update_kernels

__all__ = ["Merger", "Singles", "sum_kernels", "update_kernels"]
