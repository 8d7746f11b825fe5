"""Merge of duplicate keys, and the optimizer's update in place.

An owner receives, from every rank, a list of slots and their gradients. `merge` finds the distinct slots and chains the
requests for each in the order of the ranks; `update` sums the gradients of a chain and changes the row and its state in
the same pass, so that no merged gradient is ever written.

The merge is FusedRec's owner-side unique (§3 "Lossless Lookup"): the collective transport also answers look-ups
through it.
"""

from rowmesh.ops.merge_update.cpu import Merger, update_kernels

__all__ = ["Merger", "update_kernels"]
