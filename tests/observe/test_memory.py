import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rowmesh.observe import MemoryGauge, memory

SIZE = 64 << 20
READ = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as shared:
    sum(shared[::4096])
    print("mapped", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_shared_pages_count_once_over_the_processes_that_map_them():
    descriptor = os.memfd_create("shared")
    os.ftruncate(descriptor, SIZE)
    with mmap.mmap(descriptor, SIZE) as shared:
        before = memory.used_bytes()
        shared[:] = bytes(SIZE)
        alone = memory.used_bytes() - before
        command = [sys.executable, "-c", READ, f"/proc/{os.getpid()}/fd/{descriptor}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
            assert peer.stdout.readline() == b"mapped\n"
            together = memory.used_bytes() - before
            peer.stdin.close()
    os.close(descriptor)
    assert alone == pytest.approx(SIZE, rel=0.1)
    assert together < 0.6 * SIZE


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


def test_available_is_what_the_control_group_has_left(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CONTROL_GROUP", tmp_path)
    on_the_host = memory.available_bytes()
    assert on_the_host > 0
    for name, text in {"max": "5000", "current": "4000", "stat": "anon 1\ninactive_file 100\nactive_file 20"}.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert memory.available_bytes() == 1120
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() == pytest.approx(on_the_host, rel=0.5)
