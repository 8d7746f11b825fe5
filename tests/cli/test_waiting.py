"""Threads of OpenMP sleep while they wait in rowmesh commands, unless the environment says otherwise."""

import os
import subprocess
import sys

import pytest

from rowmesh.cli import waiting


@pytest.mark.parametrize(
    "given, expected",
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "9"}, None)],
)
def test_the_environment_decides(monkeypatch, given, expected):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    waiting.wait_passively()
    assert os.environ.get("OMP_WAIT_POLICY") == expected


def test_it_is_said_before_torch_is_there():
    """OpenMP reads it when it is loaded."""
    program = """
import sys
from rowmesh.cli import __main__, waiting
assert "torch" not in sys.modules
__main__.wait_passively = lambda: (waiting.wait_passively(), print("torch" in sys.modules))
__main__.main(["--version"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[0] == "False", done.stderr
