"""Look-up: what one group of tables keeps of one batch, from the unique ids to the gradients of their rows.

    find      unique ids, where each is asked for, sorted by (destination, segment)
    pool      rows, once they are within reach, become vectors
    backward  gradients of vectors become gradients of rows, where they are sent from

`HostLookUp` keeps addresses in memory that is reused from batch to batch, `DeviceLookUp` tensors of torch's allocator.
A caller sees only how many unique ids there are, and what to send. On a device that has all rows `InPlaceLookUp` sends
nothing: it finds the slot of every id, and sorts ids by that.

Source: FusedRec §3 (segment unique, rank-wise sort, recovery) and Algorithm 1, lines 1–4.
"""

from rowmesh.ops.look_up.host import HostLookUp, HostLookUps, SendBuffer, UniqueIds, slots_offset

__all__ = ["HostLookUp", "HostLookUps", "SendBuffer", "UniqueIds", "slots_offset"]
