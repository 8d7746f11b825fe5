"""Folders that a command cannot write, even as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_MOUNT = 'while [ "$1" != -- ]; do mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 99; shift; done; '
_PREFIX = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{_MOUNT}shift; exec "$@"', "sh"]


def with_read_only(command: list[str], *folders: Path) -> list[str]:
    """The command such that it finds folders read-only; skips the test where that cannot be arranged.

    Nothing is forbidden to root, for whom the folders become read-only mounts that the command alone sees.
    """
    if os.geteuid() != 0:
        for folder in folders:
            for root, _, _ in os.walk(folder):
                Path(root).chmod(0o555)
        return command
    prefix = [*_PREFIX, *map(str, folders), "--"]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("runs as root, who can write everywhere, and may not mount folders read-only")
    return prefix + command
