"""What the benchmark of GPU kernels does without a GPU: it says so; and its cases are right, interpreted."""

import json

import pytest
import torch

from benchmarks import gpu_ops
from benchmarks.gpu_timing import COPY, Case, contestants, judge
from tests.support.triton import find_obstacle


def test_says_that_there_is_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    gpu_ops.main(["--quick"])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "benchmark": "gpu_ops",
        "unavailable": f"torch {torch.__version__} finds no CUDA device; run this on a machine with an NVIDIA GPU",
    }


def test_ratios_are_to_peers_and_to_what_a_copy_moves():
    case = Case("gather", print, {"torch": print}, 600, print, {COPY: 0.6})
    timings = {"rowmesh": {"call_ms": 1.0}, "torch": {"call_ms": 2.0}, COPY: {"call_ms": 0.5}}
    found = judge(case, timings, copy_bytes=500)  # a copy moves 1000 bytes in the time that we take
    assert found["ratio"] == {"torch": 2.0, "copy": 0.6}
    assert (found["copy_bytes_per_s"], found["target"]) == (1e6, {"copy": 0.6})


@pytest.mark.triton
@pytest.mark.parametrize("op", gpu_ops.OPS)
def test_contestants_of_every_case_agree(device, op):
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    from benchmarks import gpu_cases, gpu_dynamic_cases, gpu_index_cases, gpu_table_cases

    sizes = gpu_cases.Sizes(ids=8, max_rows=20, table_rows=60, entries=40, distinct=20, dims=(16,), poolings=(1, 4))
    every = gpu_cases.CASES | gpu_index_cases.CASES | gpu_table_cases.CASES | gpu_dynamic_cases.CASES
    cases = list(every[op](sizes, device))
    assert cases
    for case in cases:
        case.check()
        for function in contestants(case, 64, device).values():
            function()
        assert set(case.targets) <= {*case.peers, COPY}
        assert case.moved_bytes > 0
