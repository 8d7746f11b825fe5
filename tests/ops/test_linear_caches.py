"""oneDNN keeps few operators, so that batches of ever another size take no more and more memory."""

import os
import subprocess
import sys

import pytest

from rowmesh.ops.linear import cpu
from rowmesh.ops.linear.caches import CAPACITY, VARIABLES, bound_caches

PROGRAM = """
import torch
from rowmesh.ops.linear import ALL, linear, obstacle

def resident_mb():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))

torch.set_num_threads(1)
obstacle()
weights = [torch.randn(size, 50, requires_grad=True) for size in (50, 100, 150)]
before = resident_mb()
for rows in range(1000, 1130):
    for weight in weights:
        linear(torch.randn(rows, 50, requires_grad=True), weight, passes=ALL).sum().backward()
print(resident_mb() - before)
"""


@pytest.mark.skipif(cpu.obstacle() is not None or sys.platform != "linux", reason="no oneDNN, or no /proc")
def test_memory_does_not_grow_with_the_sizes_of_batches():
    """1,170 products of other sizes each; without a bound they leave more than 500 MB."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
    assert float(done.stdout) < 300


def test_the_environment_decides(monkeypatch):
    monkeypatch.setenv(VARIABLES[0], "7")
    monkeypatch.delenv(VARIABLES[1], raising=False)
    bound_caches()
    assert [os.environ[name] for name in VARIABLES] == ["7", str(CAPACITY)]
