"""Kernels where Numba's cache cannot be written, or holds files of unknown origin."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rowmesh
from tests.support.read_only import with_read_only

PACKAGE = Path(rowmesh.__file__).parent
USE = """
import numpy as np
from rowmesh.data.window import gather_rows
out = np.zeros((2, 1), np.float32)
gather_rows(np.ones((1, 3), np.float32), np.array([0, 2]), out)
print(out.sum())
"""


def run(command, cwd=None, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "RANK")}
    return subprocess.run(command, cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=120)


@pytest.fixture
def sealed(tmp_path):
    """A copy of the package and a home, neither of which can be written: how to run Python with them."""
    package, home = tmp_path / "site", tmp_path / "home"
    shutil.copytree(PACKAGE, package / "rowmesh", ignore=shutil.ignore_patterns("__pycache__"))
    home.mkdir()

    def run_sealed(*arguments, **variables):
        command = with_read_only([sys.executable, *map(str, arguments)], package, home)
        variables |= {"PYTHONPATH": str(package), "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
        return run(command, tmp_path, **variables)

    yield run_sealed
    for root, _, _ in os.walk(tmp_path):
        Path(root).chmod(0o755)


@pytest.mark.slow
def test_kernels_are_compiled_without_a_cache_where_none_can_be_written(sealed, tmp_path):
    done = sealed("-c", USE)
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "NUMBA_CACHE_DIR" in done.stderr
    assert sealed("-c", USE, RANK="1").stderr == "", "rank 0 alone says it"
    elsewhere = sealed("-c", USE, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert (elsewhere.returncode, elsewhere.stderr) == (0, "")
    assert list((tmp_path / "cache").rglob("*.nbc"))


@pytest.mark.slow
def test_a_command_runs_from_a_read_only_package_and_home(sealed, tmp_path):
    """All kernels of preparing data, and of tables."""
    samples = ["--samples", "300", "--held-out", "50", "--max-rows", "20"]
    done = sealed("-m", "rowmesh.cli", "data", "synthesize", tmp_path / "raw", *samples)
    assert done.returncode == 0, done.stderr
    done = sealed("-m", "rowmesh.cli", "data", "prepare", tmp_path / "raw", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.slow
def test_a_damaged_cache_is_made_anew(tmp_path):
    """tests/ops/test_compiled.py damages files in other ways."""
    command, cache = [sys.executable, "-c", USE], str(tmp_path)
    assert run(command, NUMBA_CACHE_DIR=cache).returncode == 0
    files = list(tmp_path.rglob("*.nb[ci]"))
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:-100])
    again = run(command, NUMBA_CACHE_DIR=cache)
    assert (again.returncode, again.stdout) == (0, "2.0\n"), again.stderr
    assert again.stderr.count("\n") == 1, again.stderr
    assert str(tmp_path) in again.stderr
    mended = run(command, NUMBA_CACHE_DIR=cache)
    assert (mended.returncode, mended.stdout, mended.stderr) == (0, "2.0\n", "")


@pytest.mark.slow
def test_a_full_disk_ends_no_command_that_would_fill_the_cache(tmp_path):
    done = run([sys.executable, "-c", USE], NUMBA_CACHE_DIR=str(tmp_path), ROWMESH_FAULTS="ops.compiled.save=ENOSPC")
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
