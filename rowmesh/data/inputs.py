"""DataSource: the files of a data set, from a folder or from lists of files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
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
_UNFINISHED = (".tmp", ".part", ".partial", ".crdownload", ".swp")
_CHECKSUMS = (".md5", ".sha1", ".sha256", ".sha512", ".crc")
LEFT_OVERS = ("~", ".bak", ".old", ".orig", *_UNFINISHED, *_CHECKSUMS)
"""How names of files end that stand beside data and are none."""


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
            DataError: no such file or folder, several folders, one file twice, a folder without training files, or
                one with something that is not read and is named after a split.
        """
        for path in (*inputs, *validation, *test):
            if not path.exists():
                raise DataError(f"{path}: no such file or folder")
        folder = inputs[0] if len(inputs) == 1 and inputs[0].is_dir() else None
        if folder is None:
            if given := next((path for path in (*inputs, *validation, *test) if path.is_dir()), None):
                raise DataError(f"{given} is a folder; give one folder and nothing else, or list files")
            if schema is None:
                raise ConfigurationError(NO_SCHEMA)
            check_once((*inputs, *validation, *test))
            files = {"train": list(inputs), "validation": list(validation), "test": list(test)}
            return DataSource(_without_empty(files), Schema.load(schema))
        if validation or test:
            raise ConfigurationError(
                f"{folder} is a folder; put validation and test files into it, or list the training files"
            )
        files = _split_files(folder)
        check_once(path for paths in files.values() for path in paths)
        return DataSource(files, Schema.load(schema or _schema_file(folder)), _read_optimum(folder))


def check_once(files: Iterable[Path]) -> None:
    """Raises DataError where two of the files are one, whose rows would count twice, or be tested after training."""
    seen: dict[Path, Path] = {}
    for path in files:
        if (first := seen.get(resolved := path.resolve())) is not None:
            raise DataError(f"{first} and {path} are one file; name it once")
        seen[resolved] = path


def _split_files(folder: Path) -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for path in sorted(folder.iterdir()):
        split = next((split for split in SPLITS if path.name.startswith(split)), None)
        if split is not None and path.is_file() and not path.name.lower().endswith(LEFT_OVERS):
            files[split].append(path)
        else:
            _check_unread(path)
    if not files["train"]:
        raise DataError(f"{folder}: no file whose name begins with 'train'")
    return _without_empty(files)


def _check_unread(path: Path) -> None:
    """Raises DataError where something that is not read is named as if it were."""
    name = path.name.lower()
    if any(name.startswith(split) for split in SPLITS):
        raise DataError(f"{path} would not be read: {_why_unread(path)}. Rename it or move it away, or list files")
    if split := next((split for other, split in OTHER_NAMES.items() if name.startswith(other)), None):
        raise DataError(
            f"{path} would not be read: in a folder, names of files begin with {', '.join(SPLITS)}. "
            f"Rename it to {split}… or move it away, or list files and options: TRAIN_FILES --{split} {path}"
        )


def _why_unread(path: Path) -> str:
    if path.name.lower().endswith(LEFT_OVERS):
        return "its name ends as those of backups, checksums and unfinished files do"
    if path.is_dir():
        return "it is a folder; files stand beside each other in one folder"
    if path.is_file():
        return f"in a folder, names of files begin with {', '.join(SPLITS)}, in small letters"
    return "it is a link that leads nowhere" if path.is_symlink() else "it is no file"


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
