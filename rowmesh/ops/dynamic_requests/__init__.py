"""Requests for the rows of dynamic tables, of all tables at once: from distinct ids to owners, decisions, and rows.

    count     which owner has each distinct id, and how many go to each
    fill      ids and their counts, by owner, then by table
    open_known    at an owner: finds the ids, and opens the step of those tables that know all of them
    take_rows     each id gives way to the row that its owner answered

A *request* is a run of ids in the memory of whoever sent it; arrays of int64 addresses say where each rank's begins.
"""

from __future__ import annotations

from rowmesh.ops.dynamic_requests.cpu import count, fill, open_known, take_rows

__all__ = ["count", "fill", "open_known", "take_rows"]
