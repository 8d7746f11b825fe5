"""DataSet: what a run is given."""

from __future__ import annotations

from rowmesh.data.prepared import Prepared
from rowmesh.data.raw import RawData

DataSet = Prepared | RawData
"""Prepared data, whose samples are counted and whose ids are rows; or raw rows, of which only the columns are known."""
