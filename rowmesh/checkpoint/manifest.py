"""What a checkpoint holds: which file has which rows of which table.

::

    model/
      manifest.json            names one folder of files; replaced in one step, so it is always whole
      3f9c…/                   the folder
        dense.pt               the dense network and whatever else the caller gave
        C1.0.values.npy        rows of table C1 that rank 0 wrote, in the order the manifest gives
        C1.0.sum.npy           a state of their optimizer
        C1.1.values.npy        …
        C2.0.core1.npy         a core of tensor-train table C2, which rank 0 alone writes
        C2.0.core1.sum.npy     a state of its optimizer
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh.errors import RowmeshError

FORMAT = 1
MANIFEST = "manifest.json"
DENSE = "dense.pt"


class CheckpointError(RowmeshError, RuntimeError):
    """A checkpoint cannot be written, or what is read does not fit: names the table, rank or file."""


@dataclass(frozen=True)
class RowRange:
    """The rows start, start + stride, … , count of them: what a placement deals to a rank."""

    start: int
    stride: int
    count: int

    @classmethod
    def of(cls, rows: range) -> RowRange:
        """The same rows."""
        return cls(rows.start, rows.step, len(rows))


@dataclass(frozen=True)
class Part:
    """The rows of one table that one rank wrote.

    Attributes:
        rank: who wrote them.
        ranges: the rows, in file order, one range after the other.
        files: "values" and the names of optimizer states → file name.
    """

    rank: int
    ranges: tuple[RowRange, ...]
    files: dict[str, str]

    @property
    def count(self) -> int:
        """How many rows."""
        return sum(part.count for part in self.ranges)


@dataclass(frozen=True)
class CoresEntry:
    """The cores of a tensor-train table.

    Attributes:
        row_factors, dim_factors, ranks: as in `TensorTrainShape`.
        files: "core1" … "core3", and "core1.sum" for a state → file name.
    """

    row_factors: tuple[int, ...]
    dim_factors: tuple[int, ...]
    ranks: tuple[int, ...]
    files: dict[str, str]


@dataclass(frozen=True)
class TableEntry:
    """One table: its shape, its update rule, and its parts, or its cores where it is a tensor-train table."""

    num_rows: int
    dim: int
    dtype: str
    optimizer: str
    parts: tuple[Part, ...]
    cores: CoresEntry | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint except the numbers."""

    folder: str
    world_size: int
    tables: dict[str, TableEntry]
    metadata: dict[str, Any]
    format: int = FORMAT

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, path: Path) -> Manifest:
        """From the text of the file at `path`, which errors name."""
        try:
            values = json.loads(text)
            if values["format"] != FORMAT:
                raise CheckpointError(f"{path} has format {values['format']}; this rowmesh reads {FORMAT}")
            tables = {name: _table_entry(entry) for name, entry in values["tables"].items()}
            return cls(values["folder"], values["world_size"], tables, values["metadata"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is no checkpoint manifest: {type(error).__name__} {error}") from None


def file_name(table: str, rank: int, kind: str) -> str:
    """A file name for any table name."""
    return f"{quote(table, safe='')}.{rank}.{kind}.npy"


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def as_numpy(values: Tensor) -> npt.NDArray[Any]:
    """A view for files; NumPy has no bfloat16, whose bits are kept as int16."""
    values = values.detach()
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()


def _table_entry(values: dict[str, Any]) -> TableEntry:
    parts = tuple(
        Part(part["rank"], tuple(RowRange(**bounds) for bounds in part["ranges"]), part["files"])
        for part in values.pop("parts")
    )
    if (cores := values.pop("cores", None)) is not None:
        files = cores.pop("files")
        cores = CoresEntry(**{name: tuple(numbers) for name, numbers in cores.items()}, files=files)
    return TableEntry(**values, parts=parts, cores=cores)
