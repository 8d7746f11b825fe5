"""A planted data set, drawn and prepared."""

from __future__ import annotations

from pathlib import Path

from rowmesh.data import PlantedConfig, Prepared, prepare
from rowmesh.data.inputs import DataSource
from rowmesh.data.synthetic import synthesize


def prepare_clicks(folder: Path, samples: dict[str, int], planted: PlantedConfig) -> Prepared:
    """`folder / "prepared"`, made from `folder / "raw"`; `samples` says how many each split has."""
    synthesize(folder / "raw", samples, planted)
    source = DataSource.find([folder / "raw"], None, validation=(), test=())
    return prepare(source.files, folder / "prepared", source.schema, optimum=source.optimum)
