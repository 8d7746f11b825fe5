"""Window: which rows of a batch travel with which of its micro-batches, and moving them.

The part of a window that belongs to one group is a `HostWindow` or a `DeviceWindow`, with methods of the same names.
"""

from rowmesh.ops.window.cpu import FINAL, FORMS, MAX_PARTS, place_own
from rowmesh.ops.window.device import DeviceWindow
from rowmesh.ops.window.host import HostWindow
from rowmesh.ops.window.order import Order

__all__ = ["FINAL", "FORMS", "MAX_PARTS", "DeviceWindow", "HostWindow", "Order", "place_own"]
