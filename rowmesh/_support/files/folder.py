"""Writing a folder so that it appears whole or not at all, and replaces nothing but its own kind."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rowmesh._support.faults import reach
from rowmesh._support.files.advice import described
from rowmesh._support.files.atomic import sync_file, sync_folder
from rowmesh._support.files.checksums import Checksums, checksums_of
from rowmesh._support.files.lock import exclusive
from rowmesh._support.files.manifest import MANIFEST, Manifest, contents
from rowmesh._support.files.places import local_path
from rowmesh.errors import RowmeshError


@contextlib.contextmanager
def replacing_folder(
    target: Path,
    *,
    kind: str,
    request: Mapping[str, Any],
    overwrite: bool,
    checksums: dict[str, Checksums] | None = None,
) -> Iterator[Path]:
    """A temporary folder beside `target`, which takes its place if the block ends without an error.

    On any error or interruption the temporary folder is removed and what stood at `target` stays. After a
    crash the next writer removes what was left. Two writers of one target exclude each other. Where `target`
    is a link, the link stays and the folder that it leads to is written.

    Only a folder whose manifest says that it is of this kind, and that holds nothing else, is ever removed.

    Args:
        target: the folder.
        kind: what the folder is, for its manifest.
        request: what was asked for, for its manifest.
        overwrite: replace a folder that is not empty.
        checksums: where given, the manifest gets checksums of all files: those that the block puts in here by name,
            and of other files those that are read here.

    Raises:
        RowmeshError: the target is not empty and `overwrite` is not given or something else is in it, another
            process writes it, or the disk is full.
    """
    local_path(target, "the folder")
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.parent / f".{target.name}.lock"
    refusal = f"{target} is being written by another process (it holds {lock}); wait for it to end"
    with exclusive(lock, refusal):
        partial, old = target.parent / f".{target.name}.partial", target.parent / f".{target.name}.old"
        _restore(old, target)
        _check_free(target, kind, overwrite)
        for left in (partial, old):
            _remove_left(left)
        try:
            partial.mkdir()
            Manifest(kind=kind).write(partial)
            yield partial
            files = contents(partial)
            sums = {} if checksums is None else _completed(checksums, partial, files)
            Manifest(kind=kind, request=request, files=tuple(files), checksums=sums).write(partial)
            _sync(partial)
            _check_free(target, kind, overwrite)  # much time may have passed
            if target.exists():
                target.rename(old)
            reach("files.folder.renamed_old", target)
            partial.rename(target)
            _sync_name(target)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _disk_full(target) from error
            raise
        finally:
            _restore(old, target)
            shutil.rmtree(partial, ignore_errors=True)


def _completed(known: Mapping[str, Checksums], folder: Path, files: list[str]) -> dict[str, Checksums]:
    """Checksums of all files but the manifest, which is written after them."""
    return {name: known.get(name) or checksums_of(folder / name) for name in files if name != MANIFEST}


def _sync(folder: Path) -> None:
    """Waits until a folder and its files are on disk, so that no crash leaves a renamed folder of empty files."""
    reach("files.folder.sync", folder)
    for root, _, files in os.walk(folder):
        for name in files:
            if not (Path(root) / name).is_symlink():
                sync_file(Path(root) / name)
        sync_folder(Path(root))


def _sync_name(target: Path) -> None:
    try:
        sync_folder(target.parent)
    except OSError as error:
        raise RowmeshError(
            f"{target} is written and in its place, but {target.parent} cannot be synced ({described(error)}); a power "
            "cut may bring back what was there before"
        ) from error


def _restore(old: Path, target: Path) -> None:
    """Undoes the first of the two renames where the second did not happen."""
    if not os.path.lexists(target) and not old.is_symlink() and Manifest.read(old) is not None:
        old.rename(target)


def _check_free(target: Path, kind: str, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise RowmeshError(f"{target} exists and is not a folder; choose another output folder")
    found = contents(target)
    if not found and not any(target.iterdir()):
        return
    if not overwrite:
        raise RowmeshError(f"{target} exists and is not empty; choose another folder or pass --overwrite")
    if obstacle := _obstacle(target, kind, found):
        raise RowmeshError(
            f"{target} {obstacle}, so --overwrite does not replace it; choose another folder or remove it yourself"
        )


def _obstacle(target: Path, kind: str, found: list[str]) -> str | None:
    """Why a folder that is not empty must not be removed; None where it may be."""
    manifest = Manifest.read(target)
    if manifest is None:
        return f"was not written by rowmesh (it has no {MANIFEST} of rowmesh)"
    if manifest.kind != kind:
        return f"holds {manifest.kind}, not {kind}"
    strangers = sorted(set(found) - {*manifest.files, MANIFEST})
    if strangers:
        return f"holds other files too ({', '.join(strangers[:3])}{', …' if strangers[3:] else ''})"
    return None


def _remove_left(folder: Path) -> None:
    """Removes a temporary folder that a crash left."""
    if not os.path.lexists(folder):
        return
    is_folder = folder.is_dir() and not folder.is_symlink()
    if not is_folder or (Manifest.read(folder) is None and not all(map(_is_begun_manifest, folder.iterdir()))):
        raise RowmeshError(f"{folder} is in the way, and rowmesh did not write it; move it elsewhere")
    shutil.rmtree(folder)


def _is_begun_manifest(path: Path) -> bool:
    """Whether it is what a crash leaves of the first file of a folder."""
    return path.name.startswith(f".{MANIFEST}.") and path.name.endswith(".partial")


def _disk_full(target: Path) -> RowmeshError:
    free = shutil.disk_usage(target.parent).free / 2**30
    return RowmeshError(
        f"no space left while writing {target} ({free:.1f} GiB free there now that the partial output is "
        "removed); nothing was changed. Free some space or write to another disk"
    )
