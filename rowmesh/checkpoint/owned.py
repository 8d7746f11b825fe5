"""Owned: finds what in a folder is of a checkpoint. That alone is removed or replaced, whatever the folder is called.

A checkpoint has a manifest, a folder of files for each time it was written (one, unless a writer was interrupted), and
in a run perhaps the best model, which is a checkpoint itself. A link is removed, and never what it leads to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

from rowmesh._support.files.atomic import remove_partial_files, sync_folder
from rowmesh.checkpoint.manifest import DENSE, FOLDER_PATTERN, MANIFEST
from rowmesh.errors import CheckpointError

BEST = "best"
"""In the checkpoint of a run, the best model by then."""
_FILE_PATTERN = rf"{re.escape(DENSE)}|.+\.\d+\..+\.npy"
_HEAD = re.compile(rb'\{\s*"folder": "' + FOLDER_PATTERN.encode() + rb'",\s*"world_size": \d')
_HEAD_BYTES = 100
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


def is_whole(folder: Path) -> bool:
    """Whether there is a checkpoint, damaged or not, and not only a part of one, or something else's `manifest.json`.

    Where the system does not let the file be read there is one: who reads it gets the error.
    """
    try:
        return _has_head(folder) or _has_files(folder)
    except OSError as error:
        return error.errno not in _NO_FILE


def check_free(folder: Path) -> None:
    """Raises CheckpointError where a checkpoint in this folder would replace something else."""
    path = folder / MANIFEST
    if os.path.lexists(path) and not _has_own_manifest(folder):
        raise CheckpointError(f"{path} is in the way, and no checkpoint's; move it elsewhere, or choose another folder")


def remove(folder: Path) -> None:
    """Removes a checkpoint, its manifest first, as far as the system lets it; the folder too where it is empty then."""
    if folder.is_symlink():
        if _has_own_manifest(folder):
            with contextlib.suppress(OSError):
                folder.unlink()
        return
    if _has_own_manifest(folder):
        try:
            (folder / MANIFEST).unlink(missing_ok=True)
        except OSError:  # without its files it would be a damaged one
            return
        with contextlib.suppress(OSError):
            sync_folder(folder)
    remove_files(folder)
    if (folder / BEST).is_dir():
        remove(folder / BEST)
    with contextlib.suppress(OSError):  # not there, or with something else in it
        folder.rmdir()


def remove_files(folder: Path, keep: str = "") -> None:
    """Removes the files of checkpoints in a folder, and what interrupted writers left, as far as the system lets it.

    Args:
        folder: where no other writer is.
        keep: the folder of the files that the manifest names.
    """
    remove_partial_files(folder, [MANIFEST])
    for path in _folders_of_files(folder):
        if path.name == keep:
            continue
        if path.is_symlink():
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def _has_own_manifest(folder: Path) -> bool:
    """Whether a manifest is a checkpoint's: it begins as such, or, if it is damaged, there are files of one."""
    with contextlib.suppress(OSError):
        if _has_head(folder):
            return True
    return _has_files(folder)


def _has_head(folder: Path) -> bool:
    with (folder / MANIFEST).open("rb") as file:
        return _HEAD.match(file.read(_HEAD_BYTES)) is not None


def _has_files(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(any(path.iterdir()) for path in _folders_of_files(folder))
    return False


def _folders_of_files(folder: Path) -> list[Path]:
    """The folders in it that have files of a checkpoint, or none, and nothing else."""
    with contextlib.suppress(OSError):
        named = [path for path in folder.iterdir() if re.fullmatch(FOLDER_PATTERN, path.name)]
        return [path for path in named if _has_files_alone(path)]
    return []


def _has_files_alone(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return all(re.fullmatch(_FILE_PATTERN, path.name) for path in folder.iterdir())
    return False
