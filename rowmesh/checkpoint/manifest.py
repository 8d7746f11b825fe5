"""The contents of a checkpoint: which file has which rows of which table.

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

A dynamic table has files of the ids that it knows, in the order of their logical shards, with counts, last steps and
scores, of the rows in the same order, and of what its shards count beside::

        C3.0.shards.npy        how many ids and candidates each shard has, its step, and its window of counting
        C3.0.ids.npy           …, counts, last_steps, scores, values, sum: by id
        C3.0.candidate_ids.npy …, candidate_counts; and sketch, by shard

An increment has only the rows that changed since its parent, another checkpoint beside it:

::

    checkpoints/
      step-000000200/          a full one, or an increment itself
      step-000000400/          its manifest names step 200, with the folder of its files and the digest of its manifest
        manifest.json
        85d2…/
          dense.pt             whole, as are cores
          C1.0.rows.npy        which rows of C1, by rank 0
          C1.0.values.npy      … in this order
          C3.0.removed.npy     of a dynamic table the ids that are gone (tombstones), and as above those that were seen,
          C3.0.ids.npy         …; what its shards count beside is whole
          C3.0.demoted_removed.npy  where ids are demoted, those that left the store, and as above those that came to it
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy.typing as npt
import torch
from pydantic import PlainValidator, TypeAdapter, ValidationError
from torch import Tensor

from rowmesh._support.files.checksums import Checksums
from rowmesh._support.files.manifest import OWN_SUM, own_sum
from rowmesh._support.files.names import file_stem
from rowmesh.checkpoint.entries import (
    DEMOTED_INCREMENT_FORMAT,
    FORMAT,
    KNOWN_FORMAT,
    Count,
    Positive,
    TableEntry,
)
from rowmesh.errors import CheckpointError, DamagedCheckpointError

MANIFEST = "manifest.json"
DENSE = "dense.pt"
FOLDER_PATTERN = "[0-9a-f]{16}"
_ADVICE = "restore it from a copy, or train again"
_MOST_OF_TABLE = 200  # bytes of a file's name; rank and kind come after it


@dataclass(frozen=True)
class Identity:
    """Which checkpoint it is.

    Attributes:
        folder: of its files.
        digest: of its manifest.
    """

    folder: str
    digest: str


@dataclass(frozen=True)
class Parent:
    """The checkpoint that an increment adds to.

    Attributes:
        step: after which the parent was written; it is beside the increment.
        identity: of the parent.
        depth: how many increments there are between it and the full one; 0: it is full.
    """

    step: Count
    identity: Identity
    depth: Count


def _checksums(values: Any) -> Checksums:
    """From the values in a manifest; ValueError where they are none."""
    try:
        return values if isinstance(values, Checksums) else Checksums.from_json(values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no checksums ({type(error).__name__} {error})") from None


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint except the numbers.

    Attributes:
        folder: of the files, beside the manifest.
        world_size: how many ranks wrote it.
        tables: by name.
        metadata: of the caller.
        checksums: by file name.
        parent: of an increment; None: it is full.
        replaces: the increment that was made a full one of; those that add to it add to this one.
        digest: of the text that it was read from; "" where it was not read.
    """

    folder: str
    world_size: Positive
    tables: dict[str, TableEntry]
    metadata: dict[str, Any]
    checksums: dict[str, Annotated[Checksums, PlainValidator(_checksums)]] = field(default_factory=dict)
    format: int = FORMAT
    parent: Parent | None = None
    replaces: Identity | None = None
    digest: str = field(default="", compare=False)

    @property
    def identity(self) -> Identity:
        """By which increments name it."""
        return Identity(self.folder, self.digest)

    @property
    def depth(self) -> int:
        """How many increments there are from the full one to it."""
        return self.parent.depth + 1 if self.parent else 0

    def to_json(self) -> str:
        """The text of `manifest.json`, with a checksum of itself."""
        checksums = {name: each.to_json() for name, each in self.checksums.items()}
        values = {**asdict(self), "checksums": checksums}
        del values["digest"]
        return json.dumps({**values, OWN_SUM: own_sum(values)}, indent=1)

    @classmethod
    def from_json(cls, text: str, path: Path) -> Manifest:
        """From the text of the file at `path`, which errors name.

        Raises:
            DamagedCheckpointError: it is not what was written, or describes what cannot be: rows in no file or in two,
                a file elsewhere.
            CheckpointError: it is none, or that of a later version.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpointError(f"{path} is no checkpoint manifest: {type(error).__name__} {error}") from None
        try:
            found = values.pop(OWN_SUM, None)
            if found is None:
                raise DamagedCheckpointError(
                    f"{path} is damaged, or no checkpoint manifest: {OWN_SUM} is missing, the checksum of the other "
                    f"keys; {_ADVICE}"
                )
            if found != own_sum(values):
                raise DamagedCheckpointError(f"{path} is damaged: {OWN_SUM} is not that of the other keys; {_ADVICE}")
            if values["format"] not in range(FORMAT, DEMOTED_INCREMENT_FORMAT + 1):
                raise CheckpointError(
                    f"{path} has format {values['format']!r}; this rowmesh reads 1 to {DEMOTED_INCREMENT_FORMAT}"
                )
            values["digest"] = found
            manifest = _ADAPTER.validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            detail = error.errors()[0]
            where = ".".join(str(part) for part in detail["loc"])
            reason = f"{where}: {detail['msg']}" if where else detail["msg"]
            raise CheckpointError(f"{path} is no checkpoint manifest: {reason}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is no checkpoint manifest: {type(error).__name__} {error}") from None
        try:
            manifest.check()
        except ValueError as error:
            raise DamagedCheckpointError(f"{path} is damaged: {error}; {_ADVICE}") from None
        return manifest

    def check(self) -> None:
        """Raises ValueError where it describes what no writer wrote."""
        if not re.fullmatch(FOLDER_PATTERN, self.folder):
            raise ValueError(f"folder {self.folder!r} is no name that rowmesh gives")
        if (self.format not in (FORMAT, KNOWN_FORMAT)) != (self.parent is not None):
            raise ValueError(f"format {self.format} is {'of increments' if self.parent is None else 'of full ones'}")
        for name, table in self.tables.items():
            if strangers := [file for file in table.content.file_names if not _is_plain(file)]:
                raise ValueError(f"table {name!r} has a file {strangers[0]!r}, which is no name of a file beside it")
            if not isinstance(dtype := getattr(torch, table.dtype, None), torch.dtype) or not dtype.is_floating_point:
                raise ValueError(f"table {name!r} has dtype {table.dtype!r}, which is none of rows")
            table.content.check(name, is_increment=self.parent is not None)
        names = [DENSE, *(file for table in self.tables.values() for file in table.content.file_names)]
        if twice := [(name, count) for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"{twice[0][0]} is named {twice[0][1]} times, and every file has a use of its own")
        if lacking := [name for name in names if name not in self.checksums]:
            raise ValueError(f"there is no checksum of {lacking[0]}")


def step_name(step: int) -> str:
    """The name of the folder of a checkpoint after a step.

    >>> step_name(200)
    'step-000000200'
    """
    return f"step-{step:09}"


def file_name(table: str, rank: int, kind: str) -> str:
    """A file name for any table name.

    >>> file_name(".hidden/a", 0, "values")
    '%2Ehidden%2Fa.0.values.npy'
    """
    name = file_stem(table, _MOST_OF_TABLE)
    return f"{'%2E' + name[1:] if name.startswith('.') else name}.{rank}.{kind}.npy"


def as_numpy(values: Tensor) -> npt.NDArray[Any]:
    """A view for files; NumPy has no bfloat16, whose bits are kept as int16."""
    values = values.detach()
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()


def _is_plain(name: str) -> bool:
    """Whether it names a file of the folder itself."""
    return bool(name) and "/" not in name and "\0" not in name and not name.startswith(".")


_ADAPTER = TypeAdapter(Manifest)
