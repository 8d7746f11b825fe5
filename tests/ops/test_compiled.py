"""Compiled functions and their files, in this process; tests/faults/test_kernel_cache.py has them in commands."""

import ast
import errno
import sys
import threading
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numba
import pytest
from filelock import FileLock

import rowmesh
from rowmesh._support.faults import arm
from rowmesh.ops import compiled as module

SOURCE = """
from rowmesh.ops.compiled import compiled

@compiled(nogil=True)
def twice(a):
    return a * {factor}
"""
DAMAGES = {
    "empty": lambda content: b"",
    "one byte": lambda content: content[:1],
    "the checksum alone": lambda content: content[:16],
    "half": lambda content: content[: len(content) // 2],
    "all but a byte": lambda content: content[:-1],
    "more": lambda content: content + b"\0",
    "garbage": lambda content: bytes(range(1, 256)) * 20,
    "a flipped bit": lambda content: content[:-100] + bytes([content[-100] ^ 4]) + content[-99:],
    "zeros inside": lambda content: content[:1000] + bytes(2000) + content[3000:],
}


@pytest.fixture
def declare(tmp_path, monkeypatch):
    """Declares a function as a new process would, in a module that is there once, with a cache in `cache`."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_said", set())
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # to which sources of one second and one size are the same

    def declare(factor=2):
        path = tmp_path / "kernels.py"
        path.write_text(SOURCE.format(factor=factor))
        spec = spec_from_file_location("kernels", path)
        loaded = module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded.twice

    return declare


def files(tmp_path):
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def hits(function):
    return sum(function.stats.cache_hits.values())


def test_a_kernel_is_compiled_once_for_each_signature(declare, tmp_path):
    first, second = declare(), declare()
    assert (first(3), first(0.5), hits(first)) == (6, 1.0, 0)
    assert len(files(tmp_path)) == 2
    assert (second(3), second(0.5), hits(second)) == (6, 1.0, 2)


def test_the_folder_of_the_cache_can_be_asked_for(declare, tmp_path):
    declare()
    assert module.cache_folder().startswith(str(tmp_path / "cache"))


def test_other_sources_are_compiled_again_into_the_same_file(declare, tmp_path, caplog):
    assert declare()(3) == 6
    before = files(tmp_path)
    changed = declare(factor=5)
    assert (changed(3), hits(changed)) == (15, 0)
    assert files(tmp_path) == before
    again = declare(factor=5)
    assert (again(3), hits(again)) == (15, 1)
    assert not caplog.records


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_made_anew_and_named(declare, tmp_path, caplog, damage):
    declare()(3)
    [path] = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    again = declare()
    assert (again(3), hits(again)) == (6, 0)
    assert [record.getMessage() for record in caplog.records] == [
        f"kernels are compiled again, as {path} cannot be used: it is not what was written"
    ]
    mended = declare()
    assert (mended(3), hits(mended)) == (6, 1)
    assert files(tmp_path) == [path]


@pytest.mark.parametrize("error", ["ENOSPC", "EROFS", "EACCES"])
def test_a_file_that_cannot_be_written_is_said_once(declare, tmp_path, caplog, error):
    with arm(f"ops.compiled.save={error}"):
        function = declare()
        assert (function(3), function(0.5)) == (6, 1.0)
    [record] = caplog.records
    assert "NUMBA_CACHE_DIR" in record.getMessage()
    assert getattr(errno, error)
    assert not files(tmp_path)


def test_other_ranks_say_nothing(declare, caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with arm("ops.compiled.save=ENOSPC"):
        assert declare()(3) == 6
    assert not caplog.records


def test_nowhere_to_write_is_said_once(declare, caplog, monkeypatch):
    monkeypatch.setattr(module._Cache._impl_class, "_locator_classes", [])
    function = declare()
    assert function(3) == 6
    assert module.cache_folder() is None
    [record] = caplog.records
    assert "set NUMBA_CACHE_DIR" in record.getMessage()


def test_one_module_says_how_kernels_are_compiled():
    package = Path(rowmesh.__file__).parent
    for path in package.rglob("*.py"):
        if "njit" in (text := path.read_text()):  # to parse every file takes seconds
            names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(ast.parse(text))}
            assert "njit" not in names or path == package / "ops" / "compiled.py", path


def test_of_several_processes_one_compiles(declare, tmp_path):
    declare()(2)
    (whole,) = files(tmp_path)
    content = whole.read_bytes()
    whole.unlink()
    lock = FileLock(whole.with_suffix(".lock"), thread_local=False)
    lock.acquire()  # as another process that compiles, and is done a moment later
    later = threading.Timer(0.3, lambda: (whole.write_bytes(content), lock.release()))
    later.start()
    function = declare()
    assert function(2) == 4
    later.join()
    assert hits(function) == 1
    assert files(tmp_path) == [whole]


def test_a_process_that_takes_too_long_is_not_waited_for(declare, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WAIT_S", 0.1)
    declare()(2)
    (whole,) = files(tmp_path)
    whole.unlink()
    with FileLock(whole.with_suffix(".lock")):
        function = declare()
        assert function(2) == 4
    assert hits(function) == 0
    assert whole.exists()
