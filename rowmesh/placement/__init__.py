"""Which rank owns each row, and which ranks hold a copy.

Plans, which training runs on, are imported with rowmesh; what makes them is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rowmesh.placement.address_map import AddressMap, Piece
from rowmesh.placement.plan import Plan, RowRange, TablePlan, TableShape

if TYPE_CHECKING:
    from rowmesh.placement.cost import Cost, cost_of
    from rowmesh.placement.profile import Profile, TableProfile
    from rowmesh.placement.request import Request
    from rowmesh.placement.sketch import AccessSketch
    from rowmesh.placement.strategies import search
    from rowmesh.placement.topology import Topology
    from rowmesh.placement.unseen import smoothed

__all__ = [
    "AccessSketch",
    "AddressMap",
    "Cost",
    "Piece",
    "Plan",
    "Profile",
    "Request",
    "RowRange",
    "TablePlan",
    "TableProfile",
    "TableShape",
    "Topology",
    "cost_of",
    "search",
    "smoothed",
]

_LATE = {
    "AccessSketch": "sketch",
    "Cost": "cost",
    "Profile": "profile",
    "Request": "request",
    "TableProfile": "profile",
    "Topology": "topology",
    "cost_of": "cost",
    "search": "strategies",
    "smoothed": "unseen",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
