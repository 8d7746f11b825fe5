"""Merge: which entries ask for the same slot, in the order of the slots.

On a GPU alone: on a CPU `rowmesh.ops.merge_update.Merger` chains entries as it meets them.
"""
