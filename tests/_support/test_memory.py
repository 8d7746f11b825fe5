import subprocess
import sys
from pathlib import Path

import pytest

from rowmesh._support import memory
from rowmesh._support.memory import MemoryGauge

SIZE = 64 << 20
READ = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as shared:
    sum(shared[::4096])
    print("mapped", flush=True)
    sys.stdin.read()
"""
# In a process that shares little with any other: those of other tests, which come and go, change this one's share.
MEASURE = """
import mmap, os, runpy, subprocess, sys
size, read, used_bytes = int(sys.argv[1]), sys.argv[2], runpy.run_path(sys.argv[3])["used_bytes"]
descriptor = os.memfd_create("shared")
os.ftruncate(descriptor, size)
with mmap.mmap(descriptor, size) as shared:
    before = used_bytes()
    shared[:] = bytes(size)
    alone = used_bytes() - before
    command = [sys.executable, "-c", read, f"/proc/{os.getpid()}/fd/{descriptor}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        assert peer.stdout.readline() == b"mapped\\n"
        print(alone, used_bytes() - before)
        peer.stdin.close()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_shared_pages_count_once_over_the_processes_that_map_them():
    command = [sys.executable, "-c", MEASURE, str(SIZE), READ, memory.__file__]
    alone, together = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(alone) == pytest.approx(SIZE, rel=0.1)
    assert int(together) < 0.6 * SIZE


def test_resident_memory_stands_in_where_there_is_no_proportional_size(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_ROLLUP", tmp_path / "absent")
    assert memory.used_bytes() == pytest.approx(memory.resident_bytes(), rel=0.1)


def test_a_gauge_measures_seldom_enough(monkeypatch):
    sizes = iter([10, 20])
    clock = iter([0.0, 1.0, 2.0, 49.0, 52.0, 53.0])
    monkeypatch.setattr(memory, "used_bytes", lambda: next(sizes))
    monkeypatch.setattr(memory.time, "perf_counter", lambda: next(clock))
    gauge = MemoryGauge()
    assert [gauge.read() for _ in range(4)] == [10, 10, 10, 20]
