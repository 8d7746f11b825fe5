"""link_tree: a second name for the files of a folder, without a second copy of their bytes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rowmesh._support.files.atomic import sync_file, sync_folder


def link_tree(source: Path, target: Path) -> None:
    """Makes the folder `target` with the files of `source`: hard links, or copies where the file system has none.

    Names and content are on disk when this returns. For files that are never written to again, only replaced.

    Raises:
        OSError: it cannot be made.
    """
    shutil.copytree(source, target, copy_function=_link)
    for folder, _, _ in os.walk(target):
        sync_folder(Path(folder))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
        sync_file(Path(target))
