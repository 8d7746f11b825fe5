"""The ranks: which ones there are, which of them share a host, and how they wait for each other."""

from rowmesh.mesh.mesh import Mesh
from rowmesh.mesh.rows_of_all_ranks import RowsOfAllRanks
from rowmesh.mesh.shared_memory import SharedBuffer

__all__ = ["Mesh", "RowsOfAllRanks", "SharedBuffer"]
