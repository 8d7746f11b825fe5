"""Runs that are killed and resumed, on ranks of a pool, and what they leave."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rowmesh import checkpoint
from rowmesh._support.faults import arm
from rowmesh.checkpoint.manifest import DENSE
from rowmesh.checkpoint.rows import SavedRows
from rowmesh.mesh import Mesh
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve

KILLED = "injected fault"
_TIMES = ("time", "samples_per_s", "memory_bytes", "memory_bytes_by_rank", "waited_for_data_share", "exposed_share")


def train_once(mesh: Mesh, config: Path, options: list[str], resume: str, faults: str) -> str:
    """Trains on a rank of a mesh; returns what failed, "" where nothing did."""
    environment = {"RANK": str(mesh.rank), "WORLD_SIZE": str(mesh.world_size)}
    with (
        mock.patch.object(Mesh, "connect", return_value=mesh),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(io.StringIO()),
        arm(faults),
    ):
        try:
            run_training(resolve(config, options), resume=resume)  # pyright: ignore[reportArgumentType]
        except (RuntimeError, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def train_killed(pool: Any, config: Path, options: list[str], ranks: int, kills: list[str]) -> None:
    """Trains to the end, killed at each of some points before."""
    for number, faults in enumerate([*kills, ""]):
        resume = "auto" if number else "no"
        failures = pool.run(train_once, config, options, resume, faults, world_size=ranks)
        assert all((KILLED in each) if faults else not each for each in failures), failures


def train_untouched(pool: Any, config: Path, options: list[str], ranks: int) -> None:
    """Trains to the end, at once."""
    failures = pool.run(train_once, config, options, "no", "", world_size=ranks)
    assert not any(failures), failures


def model_of(run: Path) -> dict[str, Any]:
    """All numbers of a model: checksums of the files of its tables, and the rest by name."""
    manifest = checkpoint.read_manifest(run / "model")
    dense = torch.load(run / "model" / manifest.folder / DENSE, weights_only=True)
    files = {name: each.blocks for name, each in manifest.checksums.items() if name != DENSE}
    return files | dict(_flat(dense, DENSE))


def rows_of(run: Path) -> dict[str, torch.Tensor]:
    """The rows of a model, by table."""
    folder = run / "model"
    manifest = checkpoint.read_manifest(folder)
    return {name: SavedRows(folder, manifest, name).read(range(t.num_rows)) for name, t in manifest.tables.items()}


def largest_difference(run: Path, untouched: Path) -> float:
    """Of any number of any row, relative to it, or to 1e-3 where it is smaller."""
    found, expected = rows_of(run), rows_of(untouched)
    gaps = [((found[name] - each).abs() / each.abs().clamp(min=1e-3)).max() for name, each in expected.items()]
    return float(torch.stack(gaps).max())


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for number, each in enumerate(value):
            yield from _flat(each, f"{name}.{number}")
    else:
        yield name, value.tolist() if isinstance(value, torch.Tensor) else value


def lines_of(run: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a log, without what depends on the time."""
    lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in _TIMES and not key.startswith("step_ms/")}
        for line in lines
    ]
