"""Frames: which slots have a place in a bounded fast memory, and which place is given up next.

A frame has room for one row. `find` pins the frames of slots that have one, `take` gives frames to the others: free
ones, then clean ones that nobody has pinned, those first that were used longest ago. `release` unpins. A frame that
was changed is dirty, and is given up only after `oldest_dirty` handed it to a writer and `written` said that it is
done; all the while it can be found. The hash is bounded by the number of frames, not by that of slots.

Nothing here locks: who calls from several threads does.
"""

from rowmesh.ops.frames.cpu import MISSING, FrameTable

__all__ = ["MISSING", "FrameTable"]
