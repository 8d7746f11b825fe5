"""Pre-images: rows as they were before an update, kept block by block, and put back over copies that were made later.

Neither waits for the interpreter, which the thread that trains and the one that writes share.
"""

from rowmesh.ops.pre_images.cpu import Block, PreImages, claim

__all__ = ["Block", "PreImages", "claim"]
