"""Every GPU kernel that rowmesh launches is listed, and compiles for GPUs that are not here."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_compile import compile_for, ops_with_kernels, signatures
from rowmesh.ops.gpu import Signature
from tests.support.triton import kernels_of

ROOT = Path(__file__).parents[2]
OPS = ops_with_kernels()
# Exact divisions and roots are subroutines; what is saved around their calls, 8 bytes stored and loaded, is no spill.
SAVED_BYTES = 16
pytestmark = pytest.mark.triton
pytest.importorskip("triton")


def launched(op):
    """The kernels that a module launches, by the arguments of its calls of `launch`."""
    for node in ast.walk(ast.parse((ROOT / f"rowmesh/ops/{op}/cuda.py").read_text())):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "launch":
                yield ast.unparse(node.args[0])
            assert not isinstance(node.func, ast.Subscript), f"{op}: {ast.unparse(node)} is not launched by launch()"


@pytest.mark.parametrize("op", OPS)
def test_every_kernel_that_is_launched_is_listed(op):
    listed = {signature.kernel.__name__ for signature in kernels_of(op).SIGNATURES}
    assert set(launched(op)) == listed


def compile_all(*options):
    """In a process of its own: kernels that can be interpreted cannot be compiled."""
    command = [sys.executable, "-W", "error", "-m", "benchmarks.gpu_compile", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "target", [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
def test_kernels_compile_without_spills(target):
    *lines, last = compile_all("--target", str(target))
    assert len(lines) == sum(len(list(signatures(op))) for op in OPS)
    assert {line["target"] for line in lines} == {f"sm_{target}"}
    assert not last["summary"]["failed"]
    spilled = {line["kernel"] for line in lines if line["spill_bytes"] > SAVED_BYTES}
    assert not spilled, f"kernels that keep registers in memory: {spilled}"
    assert max(line["registers"] for line in lines) <= 255
    assert not [line for line in lines if line["unordered"]], "a warp may read what another one has changed"
    assert not [line for line in lines if line["approximate"]], "divide by tl.div_rn, take roots by tl.sqrt_rn"


@pytest.mark.parametrize(
    "types, constants", [("*fp32", {}), ("*fp32 *i64 *fp32 *i64 i32 i32", {}), ("*fp32 *i64 *fp32 *i64", {"ROW": 1})]
)
def test_a_signature_that_does_not_fit_is_named(types, constants):
    kernel = kernels_of("gather").SIGNATURES[0].kernel
    with pytest.raises(ValueError, match=r"signature of gather does not fit its arguments \['table', 'slots'"):
        compile_for(Signature(kernel, types, {"DIM": 1, "COLUMNS": 1, "ROWS": 1} | constants), 90)
