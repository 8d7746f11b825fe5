"""A planted data set, drawn and prepared, and a configuration that trains on it."""

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


def write_config(path: Path, run: Path, data: Path, *more: str, batch_size: int = 256) -> Path:
    """Writes a configuration that trains a small network on prepared data into the folder `run`; returns its path.

    Lines of `more` follow those of the section `[tables]`.
    """
    lines = [
        "[run]",
        f'folder = "{run}"',
        "[data]",
        f'folder = "{data}"',
        f"batch_size = {batch_size}",
        "[model]",
        "bottom = [8]",
        "top = [16]",
        "[tables]",
        "dim = 4",
        *more,
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
