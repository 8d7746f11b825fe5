"""Pre-images: rows as they were before an update, kept block by block, and put back over copies that were made later.

None of it waits for the interpreter, which the thread that trains and the one that writes share.
"""

from rowmesh.ops.pre_images.cpu import CLAIMED, Block, PreImages, claim, copy_all, settle
from rowmesh.ops.pre_images.device import DevicePreImages

__all__ = ["CLAIMED", "Block", "DevicePreImages", "PreImages", "claim", "copy_all", "settle"]
