"""Publishing: versions of tables and network that a server takes as one, and reading them."""

from rowmesh.publish.generation import PublishedTable
from rowmesh.publish.opening import open_target
from rowmesh.publish.publisher import Changes, Publisher
from rowmesh.publish.reader import PinnedGeneration, PublishedReader

__all__ = ["Changes", "PinnedGeneration", "PublishedReader", "PublishedTable", "Publisher", "open_target"]
