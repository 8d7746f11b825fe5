"""The GPU kernels, each beside torch's and beside a copy of the same bytes.

    python -m benchmarks.gpu_ops                   26 tables of 65,536 ids, dims 64 and 128
    python -m benchmarks.gpu_ops --op gather       of one op; may be given again
    python -m benchmarks.gpu_ops --quick           small inputs

Contestants run in turns and are timed by CUDA events. `ratio` has how many times as fast as a peer we are, and under
`copy` the bytes that must move over what a copy moves in the same time. Nothing is reported where results are wrong.
Without a GPU a line says so.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import Report

OPS = (
    "segment_unique",
    "gather",
    "pool",
    "merge_update",
    "bound_ids",
    "route",
    "average",
    "window",
    "initialize",
    "update_slices",
    "dynamic_index",
)


def missing() -> str | None:
    """Why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device; run this on a machine with an NVIDIA GPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; in a checkout: pip install '.[gpu]'"
    return None


def main(arguments: list[str] | None = None) -> None:
    """Runs every case asked for.

    Raises:
        AssertionError: a kernel gives wrong results.
    """
    options = _parse(arguments)
    report = Report("gpu_ops", options.output)
    reason = missing()
    if reason is not None:
        report.line(unavailable=reason)
        return
    report.line(**machine())
    _run(options, report)
    report.finish()


def _run(options: argparse.Namespace, report: Report) -> None:
    # The kernels' modules import triton, which may be missing.
    from benchmarks import gpu_cases, gpu_dynamic_cases, gpu_index_cases, gpu_table_cases, gpu_timing

    device = torch.device("cuda")
    sizes = gpu_cases.QUICK if options.quick else gpu_cases.Sizes()
    if options.dim:
        sizes = replace(sizes, dims=tuple(options.dim))
    copy_bytes = 2**26 if options.quick else 2**31
    torch.manual_seed(0)
    cases = gpu_cases.CASES | gpu_index_cases.CASES | gpu_table_cases.CASES | gpu_dynamic_cases.CASES
    for op in options.op or OPS:
        for case in cases[op](sizes, device):
            case.check()
            timings = gpu_timing.measure(
                gpu_timing.contestants(case, copy_bytes, device), warmup=5, rounds=10 if options.quick else 50
            )
            found = gpu_timing.judge(case, timings, copy_bytes)
            for name, times in timings.items():
                report.line(case=case.name, contestant=name, **times, **(found if name == "rowmesh" else {}))
            for peer, ratio in found["ratio"].items():
                report.ratio(f"{case.name} over {peer}", ratio)


def machine() -> dict[str, Any]:
    """The GPU, and the versions of what runs on it."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=OPS, help="one op; may be given again")
    parser.add_argument("--dim", action="append", type=int, help="64 and 128 by default; may be given again")
    parser.add_argument("--quick", action="store_true", help="small inputs, in a few seconds")
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
