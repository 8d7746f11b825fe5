"""Systems without what Linux has: rowmesh can be imported, and one process trains.

Windows and macOS lack modules, functions and constants of Linux. They are taken away here once the libraries below
rowmesh are imported, which know their own ways.
"""

import subprocess
import sys

import pytest

from rowmesh.errors import ConfigurationError

HIDE = """
import ctypes, mmap, os, select, signal, sys, time
import cyclopts, filelock, numba.experimental, pathlib, psutil, pyarrow.csv, pyarrow.parquet, pydantic, rich.progress
import rich.table, subprocess, tempfile, tomli_w, torch.distributed.nn.functional, torch.optim, torch._dynamo, xxhash
import numba.core.caching, rich.console

class _Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, _Hidden())
for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty"):
    sys.modules.pop(name, None)
GONE = {
    os: "fork memfd_create sched_getaffinity getuid geteuid getppid pidfd_open pread pwrite preadv pwritev fstatvfs "
        "posix_fadvise posix_fallocate fdatasync O_CLOEXEC O_DIRECTORY O_DIRECT MFD_CLOEXEC sched_yield "
        "getpgid killpg",
    signal: "SIGHUP SIGKILL SIGSTOP SIGCONT SIGUSR1 pthread_kill setitimer",
    mmap: "MAP_PRIVATE MAP_ANONYMOUS MAP_SHARED PROT_READ PROT_WRITE",
    select: "poll epoll",
    time: "CLOCK_MONOTONIC",
}
for module, names in GONE.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
os.supports_dir_fd = set()
open_file = os.open

def no_folders(path, flags, mode=0o777, *, dir_fd=None):
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return open_file(path, flags, mode)

library = ctypes.CDLL

def no_own_library(name, *arguments, **options):
    if name is None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    return library(name, *arguments, **options)

os.open, ctypes.CDLL, sys.platform = no_folders, no_own_library, "win32"
"""
TRAIN = """
import torch
from rowmesh import Adam, EmbeddingCollection, EmbeddingOptimizer, Mesh, Pipeline, SparseBatch, TableSpec
from rowmesh.data import Batch
tables = [TableSpec(name="a", num_rows=300_000, dim=4), TableSpec(name="b", num_rows=9, dim=4, storage="tiered"),
          TableSpec(name="c", num_rows=64, dim=4, storage="tensor_train", optimizer=Adam())]
with Mesh.connect() as mesh:
    embeddings = EmbeddingCollection(tables, mesh=mesh)
    optimizer = EmbeddingOptimizer(embeddings)
    batch = SparseBatch.from_bags({"a": [[1, 2], [299_999]], "b": [[3], [8]], "c": [[1], []]})
    before = embeddings(batch).values.detach().clone()
    embeddings(batch).values.square().sum().backward()
    optimizer.step()
    assert not torch.equal(embeddings(batch).values, before)
    pipeline = Pipeline(embeddings)
    for window in pipeline.windows([Batch(torch.zeros(2, 0), batch, torch.zeros(2))] * 2):
        for part in window:
            part.embeddings.values.square().sum().backward()
        optimizer.step()
    print("trained", embeddings.step_count)
"""
COMMANDS = """
from rowmesh.cli.__main__ import main
def run(*arguments):
    try:
        main(list(arguments))
    except SystemExit as end:
        assert end.code == 0, arguments
open("config.toml", "w").write(
    "data.folder = 'data'\\ndata.batch_size = 100\\nmodel.bottom = [8]\\nmodel.top = [8]\\ntables.dim = 4\\n"
    "train.steps = 3\\nrun.folder = 'run'\\n")
run("data", "synthesize", "raw", "--samples", "500", "--held-out", "50", "--max-rows", "20")
run("data", "prepare", "raw", "--out", "data")
run("train", "config.toml")
run("train", "config.toml", "--overwrite", "pipeline.depth=1")
run("evaluate", "run", "--split", "validation")
run("export", "run", "--out", "exported")
run("env")
"""


def run(code, folder):
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)


def test_one_process_trains(tmp_path):
    done = run(HIDE + TRAIN, tmp_path)
    assert (done.returncode, done.stdout) == (0, "trained 3\n"), done.stderr


@pytest.mark.slow
def test_commands_work(tmp_path):
    done = run(HIDE + COMMANDS, tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert (tmp_path / "exported" / "tables").is_dir()


def test_a_file_of_rows_says_what_is_missing(tmp_path, monkeypatch):
    import os

    from rowmesh.tables import FileStore

    monkeypatch.delattr(os, "pread")
    with pytest.raises(ConfigurationError, match=r"file store .*/rows: this system cannot read files at a position"):
        FileStore(10, 8, path=tmp_path / "rows")
