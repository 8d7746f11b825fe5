"""Average of rows over replica groups, where a group has told only the rows it touched.

`mark` collects the slots that are touched for the first time since marks were cleared; `average` takes, for every slot
that some group told, the mean over all groups: of those that did not tell it the value from before it was touched.
"""

from rowmesh.ops.average.cpu import kernels, mark

__all__ = ["kernels", "mark"]
