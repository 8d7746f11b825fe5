"""Requests: all that an output depends on, as its manifest keeps it. Equal requests give equal output."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rowmesh.data.planted import PlantedConfig
from rowmesh.data.prepared import BLOCK_SAMPLES, FORMAT_VERSION
from rowmesh.data.schema import Schema
from rowmesh.data.splits import Splitter
from rowmesh.errors import DataError

GENERATOR_VERSION = 2


def preparation_request(
    files: Mapping[str, Sequence[Path]],
    schema: Schema,
    *,
    splitter: Splitter | None = None,
    min_count: int = 2,
    max_bad_rows: int = 100,
    optimum: Mapping[str, Mapping[str, float]] | None = None,
    block_samples: int = BLOCK_SAMPLES,
) -> dict[str, Any]:
    """The inputs that the output of `prepare` depends on; the arguments are those of `prepare`."""
    return {
        "format_version": FORMAT_VERSION,
        "files": {split: [stamp(path) for path in paths] for split, paths in files.items()},
        "schema": schema.model_dump(mode="json", exclude_defaults=True) | {"dense_transform": schema.dense_transform},
        "split": "by files" if splitter is None else asdict(splitter),
        "min_count": min_count,
        "max_bad_rows": max_bad_rows,
        "optimum": optimum or {},
        "block_samples": block_samples,
    }


def drawing_request(samples: Mapping[str, int], config: PlantedConfig, file_format: str) -> dict[str, Any]:
    """The inputs that the output of `synthesize` depends on; the arguments are those of `synthesize`."""
    return {
        "generator_version": GENERATOR_VERSION,
        "samples": dict(samples),
        "model": asdict(config),
        "file_format": file_format,
    }


def stamp(path: Path) -> str:
    """Which file, how large, and of when."""
    status = path.stat()
    modified = datetime.datetime.fromtimestamp(status.st_mtime, datetime.UTC).isoformat(sep=" ")
    return f"{path.resolve()}, {status.st_size:,} bytes of {modified}"


@contextlib.contextmanager
def unchanged(files: Iterable[Path]) -> Iterator[None]:
    """Around reading: the files are at the end what they were at the start.

    Raises:
        DataError: one was written to meanwhile, and what came late may be missing; names it.
    """
    before = {path: stamp(path) for path in files}
    yield
    for path, first in before.items():
        if path.exists() and (now := stamp(path)) != first:
            raise DataError(
                f"{path} was written to while it was read, and rows may be missing: {first} at first, and {now} then. "
                "Wait until it is whole, and prepare the data again"
            )
