"""The ranks: which ones there are, which of them share a host, and how they wait for each other."""

from rowmesh.mesh.mesh import Mesh
from rowmesh.mesh.shared_memory import SharedBuffer

__all__ = ["Mesh", "SharedBuffer"]
