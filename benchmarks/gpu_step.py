"""A training step with all tables on one GPU: the sparse part, and a whole DLRM.

    python -m benchmarks.gpu_step                    26 tables of 10 million rows or what fits, dim 128, batch 65,536
    python -m benchmarks.gpu_step --rows 1000000 --dim 64
    python -m benchmarks.gpu_step --quick            small tables

`sparse` is look-up, backward from a given gradient and update, with SGD: ours beside `nn.EmbeddingBag(sparse=True)`,
and beside the floor, the bytes that must move over the rate of a copy. `dlrm` is a whole step; `embedding_tax` is its
time over that of the dense network alone; ours also runs through a pipeline that is a batch ahead. Tables of one
contestant at a time are in memory; steps are timed as they follow each other, in blocks that end with a
synchronization. Batches come from pinned memory of the host.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import Report
from benchmarks.gpu_ops import machine, missing
from benchmarks.measure import median, summarize

TAX_TARGET = 1.15
_STEPS_A_BLOCK = 20  # or what a pipeline needs to begin, after each synchronization, would be seen
_MEMORY_SHARE = 0.7  # of what is free, for rows; the rest is for vectors, gradients and torch's allocator


def main(arguments: list[str] | None = None) -> None:
    """Measures what is asked for.

    Raises:
        AssertionError: the contestants do not train the same rows.
    """
    options = _parse(arguments)
    report = Report("gpu_step", options.output)
    reason = missing()
    if reason is not None:
        report.line(unavailable=reason)
        return
    _run(options, report)
    report.finish()


def _run(options: argparse.Namespace, report: Report) -> None:
    from benchmarks import gpu_step_cases as cases  # whose kernels need triton, which may be missing

    device = torch.device("cuda", torch.cuda.current_device())
    cases.check(cases.Sizes(rows=1000, dim=16, batch=256, num_batches=2), device)
    sizes = _fitting(cases.Sizes(rows=options.rows, dim=options.dim, batch=options.batch), device)
    if options.quick:
        sizes = replace(sizes, rows=min(sizes.rows, 100_000), batch=min(sizes.batch, 8192))
    inputs = cases.draw(sizes, device)
    floor_s = cases.floor_bytes(sizes, inputs) / _copy_rate(device)
    common = {"rows": sizes.rows, "dim": sizes.dim, "batch": sizes.batch, "zipf": sizes.zipf}
    report.line(**machine(), **common, floor_ms=round(floor_s * 1e3, 4))
    blocks = 2 if options.quick else 6
    dense = _time(cases.dense_step(sizes, inputs, device, None), blocks)
    report.line(case="dense", contestant="network alone", **summarize(dense))
    contestants = {
        "rowmesh": lambda: cases.Rowmesh(sizes, "cuda"),
        "nn.EmbeddingBag": lambda: cases.EmbeddingBags(sizes, device),
    }
    found: dict[str, tuple[float, float]] = {}
    for name, make in contestants.items():
        torch.cuda.reset_peak_memory_stats(device)
        tables = make()
        sparse = _time(cases.sparse_step(tables, inputs), blocks)
        whole = _time(cases.dense_step(sizes, inputs, device, tables), blocks)
        peak_bytes = torch.cuda.max_memory_allocated(device)
        if isinstance(tables, cases.Rowmesh):
            _pipelined(report, cases.PipelinedStep(sizes, inputs, device, tables), blocks, median(whole, 9))
        del tables
        found[name] = median(sparse, 9), median(whole, 9)
        tax = round(found[name][1] / median(dense, 9), 3)
        report.line(case="sparse", contestant=name, **summarize(sparse), peak_memory_bytes=peak_bytes)
        report.line(case="dlrm", contestant=name, **summarize(whole), embedding_tax=tax, target=TAX_TARGET)
        report.ratio(f"time of the sparse step, {name} over floor", round(found[name][0] / floor_s, 3))
        in_whole_s = found[name][1] - median(dense, 9)  # where nothing else has the gradient, and launches are hidden
        report.ratio(f"time that tables add to a dlrm step, {name} over floor", round(in_whole_s / floor_s, 3))
        report.ratio(f"embedding tax, {name}", tax)
        gc.collect()
        torch.cuda.empty_cache()  # or the next one's tables have no room
    for case, ours, theirs in zip(("sparse", "dlrm"), *found.values(), strict=True):
        report.ratio(f"{case} step, times as fast as nn.EmbeddingBag", round(theirs / ours, 3))


def _pipelined(report: Report, step: Any, blocks: int, in_turn_s: float) -> None:
    """The whole step with batches routed and rows updated beside the network."""
    torch.cuda.reset_peak_memory_stats()
    try:
        seconds = _time(step, blocks)
    finally:
        step.close()
    peak_bytes = torch.cuda.max_memory_allocated()  # batches in sight have theirs
    report.line(case="dlrm", contestant="rowmesh, pipelined", **summarize(seconds), peak_memory_bytes=peak_bytes)
    report.ratio("dlrm step, in turn over pipelined", round(in_turn_s / median(seconds, 9), 3))


def _fitting(sizes: Any, device: torch.device) -> Any:
    """The sizes with as many rows as there is room for."""
    room = int(_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])
    return sizes if sizes.table_bytes <= room else replace(sizes, rows=sizes.rows * room // sizes.table_bytes)


def _time(step: Callable[[int], None], blocks: int) -> list[float]:
    """Seconds of a step, block by block; the first blocks are left out."""
    seconds = []
    for block in range(blocks + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for number in range(_STEPS_A_BLOCK):
            step(block * _STEPS_A_BLOCK + number)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / _STEPS_A_BLOCK)
    return seconds[2:]


def _copy_rate(device: torch.device) -> float:
    """Bytes that a copy reads and writes a second."""
    source = torch.zeros(2**29, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy(_: int) -> None:
        target.copy_(source)

    return 2 * source.nbytes / median(_time(copy, 5), 9)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000, help="of each of the 26 tables, at most")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=65_536, help="samples of a step")
    parser.add_argument("--quick", action="store_true", help="small tables and batches")
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
