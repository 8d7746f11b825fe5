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
from tests.support.triton import find_obstacle, kernels_of

ROOT = Path(__file__).parents[2]
OPS = ops_with_kernels()
# Exact divisions and roots are subroutines; what is saved around their calls, 8 bytes stored and loaded, is no spill.
SAVED_BYTES = 16
# On an H200 attention was faster with few warps, of which some keep a little in memory, than with more.
SPILLED_BYTES = {"sequence_attention": 40}
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


def run(module, *arguments):
    """In a process of its own: kernels that can be interpreted cannot be compiled."""
    command = [sys.executable, "-W", "error", "-m", module, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout


def compile_all(*options):
    return [json.loads(line) for line in run("benchmarks.gpu_compile", *options).splitlines()]


def test_every_kernel_compiles_without_spills():
    check(compile_all("--quick"), 90, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 90, 100])
def test_kernels_compile_without_spills(target):
    check(compile_all("--target", str(target)), target, quick=False)


def check(found, target, *, quick):
    *lines, last = found
    assert len(lines) == sum(len(list(signatures(op, quick))) for op in OPS)
    assert {line["target"] for line in lines} == {f"sm_{target}"}
    assert not last["summary"]["failed"]
    spilled = {line["kernel"] for line in lines if line["spill_bytes"] > SPILLED_BYTES.get(line["op"], SAVED_BYTES)}
    assert not spilled, f"kernels that keep registers in memory: {spilled}"
    assert max(line["registers"] for line in lines) <= 255
    assert not [line for line in lines if line["unordered"]], "a warp may read what another one has changed"
    assert not [line for line in lines if line["approximate"]], "divide by tl.div_rn, take roots by tl.sqrt_rn"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_compile_as_tests_launch_them(tmp_path):
    """With the alignments, dims and numbers that tests have: other forms than those that are listed."""
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    file, this = str(tmp_path / "launches"), Path(__file__).relative_to(ROOT)
    tests = ["tests/ops", f"--ignore={this}", "-m", "triton and not slow", "-p", "no:cacheprovider"]
    run("tests.support.launches", "record", file, *tests)
    forms = [json.loads(line) for line in run("tests.support.launches", "compile", file).splitlines()]
    assert {form["kernel"] for form in forms} == {listed.name for op in OPS for listed in signatures(op)}
    assert not [form for form in forms if "error" in form]
    assert not [form for form in forms if form["approximate"]]
    # `average` carries rows around a loop; where they are so short that all warps have a copy, that is no fault.
    assert not [form for form in forms if form["unordered"] and form["kernel"] != "average"]


@pytest.mark.parametrize(
    "types, constants", [("*fp32", {}), ("*fp32 *i64 *fp32 *i64 i32 i32", {}), ("*fp32 *i64 *fp32 *i64", {"ROW": 1})]
)
def test_a_signature_that_does_not_fit_is_named(types, constants):
    kernel = kernels_of("gather").SIGNATURES[0].kernel
    with pytest.raises(ValueError, match=r"signature of gather does not fit its arguments \['table', 'slots'"):
        compile_for(Signature(kernel, types, {"DIM": 1, "COLUMNS": 1, "ROWS": 1} | constants), 90)
