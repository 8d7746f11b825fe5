"""Whether freed memory is kept, seen by the page faults of a program that takes and frees a large buffer."""

import os
import subprocess
import sys

import pytest

from rowmesh.observe import allocator as module
from rowmesh.observe.allocator import VARIABLES, allocator, keep_memory

FAULTS = """
import resource, runpy, sys
keep_memory = runpy.run_path(sys.argv[1])["keep_memory"]  # torch is not needed, and takes long to import
if "keep" in sys.argv:
    print(keep_memory())
import numpy
def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        numpy.ones(64 << 20, numpy.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(3)
print(faults(10))
"""


def run(*words, **environment):
    plain = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "GLIBC_TUNABLES")}
    command = [sys.executable, "-c", FAULTS, module.__file__, *words]
    done = subprocess.run(command, env=plain | environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


@pytest.mark.skipif(allocator() != "glibc", reason="another allocator has settings of its own")
def test_freed_memory_is_kept_where_nothing_else_is_asked_for():
    (given_back,) = run()
    kept, faults = run("keep")
    assert kept == "True"
    assert int(faults) < 100
    assert int(given_back) > 10 * (64 << 20) // (2 << 20)  # pages of 4 KB, or of 2 MB where those are always on


def test_the_environment_decides(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "1000000")
    assert not keep_memory()
    monkeypatch.delenv(VARIABLES[0])
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")
    assert not keep_memory()


def test_another_allocator_is_left_alone(monkeypatch):
    monkeypatch.setattr("rowmesh.observe.allocator.allocator", lambda: "jemalloc")
    assert not keep_memory()
