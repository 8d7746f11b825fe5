"""DataSource: the files of a data set, from a folder or from lists of files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, AllowInfNan, Strict, TypeAdapter, ValidationError

from rowmesh.data.metadata import SPLITS, check_optimum
from rowmesh.data.schema import SCHEMAS, Schema
from rowmesh.errors import ConfigurationError, DataError

SCHEMA_FILE = "schema.toml"
OPTIMUM_FILE = "optimum.json"
NO_SCHEMA = f"name the columns with --schema: {', '.join(SCHEMAS)} or a TOML file"
_OPTIMUM = TypeAdapter(
    dict[str, Annotated[dict[str, Annotated[float, Strict(), AllowInfNan(False)]], AfterValidator(check_optimum)]]
)
OTHER_NAMES = {"dev": "validation", "val": "validation", "eval": "validation", "holdout": "test", "held": "test"}
"""How files of splits are called elsewhere, and what they are called here."""


@dataclass(frozen=True)
class DataSource:
    """What `prepare` reads.

    Attributes:
        files: split → files; only "train" where the other splits are to be cut from it.
        schema: the columns.
        optimum: split → scores of the true probabilities, where they are known.
    """

    files: dict[str, list[Path]]
    schema: Schema
    optimum: dict[str, dict[str, float]] = field(default_factory=dict)

    @staticmethod
    def find(
        inputs: Sequence[Path],
        schema: str | None = None,
        *,
        validation: Sequence[Path] = (),
        test: Sequence[Path] = (),
    ) -> DataSource:
        """From one folder, or from files.

        A folder has `schema.toml`, unless a schema is named, and files whose names begin with "train",
        and perhaps "validation" and "test", read in order of their names. With it may come `optimum.json`.

        Raises:
            ConfigurationError: no schema.
            DataError: no such file or folder, a folder without training files, or one whose files are named
                after splits that do not exist.
        """
        for path in (*inputs, *validation, *test):
            if not path.exists():
                raise DataError(f"{path}: no such file or folder")
        folder = inputs[0] if len(inputs) == 1 and inputs[0].is_dir() else None
        if folder is None:
            if schema is None:
                raise ConfigurationError(NO_SCHEMA)
            files = {"train": list(inputs), "validation": list(validation), "test": list(test)}
            return DataSource(_without_empty(files), Schema.load(schema))
        if validation or test:
            raise ConfigurationError(
                f"{folder} is a folder; put validation and test files into it, or list the training files"
            )
        return DataSource(_split_files(folder), Schema.load(schema or _schema_file(folder)), _read_optimum(folder))


def _split_files(folder: Path) -> dict[str, list[Path]]:
    files = {split: sorted(path for path in folder.glob(f"{split}*") if path.is_file()) for split in SPLITS}
    read = {path for paths in files.values() for path in paths}
    for path in sorted(set(folder.iterdir()) - read):
        if split := next((split for name, split in OTHER_NAMES.items() if path.name.lower().startswith(name)), None):
            raise DataError(
                f"{path} would not be read: in a folder, names of files begin with {', '.join(SPLITS)}. "
                f"Rename it to {split}… or move it away, or list files and options: TRAIN_FILES --{split} {path}"
            )
    if not files["train"]:
        raise DataError(f"{folder}: no file whose name begins with 'train'")
    return _without_empty(files)


def _without_empty(files: dict[str, list[Path]]) -> dict[str, list[Path]]:
    return {split: paths for split, paths in files.items() if paths}


def _schema_file(folder: Path) -> Path:
    path = folder / SCHEMA_FILE
    if not path.is_file():
        raise ConfigurationError(f"{folder} has no {SCHEMA_FILE}; {NO_SCHEMA}")
    return path


def _read_optimum(folder: Path) -> dict[str, dict[str, float]]:
    path = folder / OPTIMUM_FILE
    if not path.is_file():
        return {}
    try:
        return _OPTIMUM.validate_python(json.loads(path.read_bytes()))
    except ValidationError as error:
        item = error.errors()[0]
        key = ".".join(str(part) for part in item["loc"] if part != "[key]") or "the file"
        raise DataError(f"{path}: {key}: {item['msg']}; draw the data again, or remove the file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error}); draw the data again, or remove the file") from error
