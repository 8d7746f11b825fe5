"""Reordering: rows of ids that occur together stand together, so that tensor-train tables share their prefixes.

Source: EL-Rec (SC'22) §IV, Algorithm 2. `docs/el_rec.md` says where this differs, and what it gives.
"""

from rowmesh.data.reorder.options import ReorderOptions
from rowmesh.data.reorder.reorder import choose_tables, reorder, reorder_request

__all__ = ["ReorderOptions", "choose_tables", "reorder", "reorder_request"]
