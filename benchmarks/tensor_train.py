"""Tensor-train look-ups and training steps on one thread, beside what others have.

    python -m benchmarks.tensor_train
    python -m benchmarks.tensor_train --ablation        what each part of it gives, and reordering
    python -m benchmarks.tensor_train --device cuda     on a GPU, with --ablation too: `benchmarks.tensor_train_cuda`
    python -m benchmarks.tensor_train --footprint       sizes of the tables of three data sets
    python -m benchmarks.tensor_train --versus-dense    a table of 40 M rows, beside a dense one that fits
    python -m benchmarks.tensor_train --quality         AUC of models with such tables, beside dense ones

One bag an id, Zipf-distributed and scattered over the table; cores of the same shapes for everyone. Forward is without
gradients; a training step is forward, backward and an SGD update. `rowmesh` updates through TensorTrainOptimizer,
`rowmesh autograd` through torch.optim.SGD on dense gradients, as all peers do. Ratios with a target are over the
fastest of the peers that multiply per id; `plain_torch_unique` removes duplicates first and is reported beside them.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import (
    tensor_train_ablation,
    tensor_train_cuda,
    tensor_train_footprint,
    tensor_train_orders,
    tensor_train_quality,
    tensor_train_versus_dense,
)
from benchmarks.command import Report
from benchmarks.measure import summarize
from benchmarks.peers.tensor_train import has_tensorly, make
from benchmarks.workload import Zipf
from rowmesh.tables.tensor_train import factor_dim, factor_rows
from rowmesh.tables.update_rules import SGD
from rowmesh.tensor_train import TensorTrainEmbeddingBag, TensorTrainOptimizer

ROW_FACTORS = {1_000_000: [100, 100, 100], 10_000_000: [200, 250, 200]}  # those of the peers' own benchmark
TARGETS = {"forward": {16: 3.0, 64: 10.0}, "train": {16: 4.0, 64: 8.0}}
LR = 0.01
_MALLOC = {-1: 2**31 - 1, -2: 2**28, -3: 2**30}  # trim threshold, top padding, mmap threshold

Contestants = dict[str, Callable[[Tensor], Any]]


@dataclass(frozen=True)
class Case:
    """One table and batch size."""

    num_rows: int
    dim: int
    rank: int
    batch: int

    @property
    def name(self) -> str:
        """What sets it apart."""
        return f"rows{self.num_rows}_dim{self.dim}_rank{self.rank}_batch{self.batch}"

    @property
    def row_factors(self) -> list[int]:
        """The same for all contestants."""
        return ROW_FACTORS.get(self.num_rows) or list(factor_rows(self.num_rows))

    def make_bag(self) -> TensorTrainEmbeddingBag:
        """Ours."""
        return TensorTrainEmbeddingBag(
            self.num_rows, self.dim, mode="sum", rank=self.rank, row_factors=self.row_factors, seed=0
        )


def step_of(forward: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, grad: Tensor) -> Callable[..., None]:
    """Forward, backward, update."""

    def step(ids: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(ids).backward(grad)
        optimizer.step()

    return step


def without_gradients(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Forward as in inference."""

    def infer(ids: Tensor) -> Tensor:
        with torch.no_grad():
            return forward(ids)

    return infer


def contestants(case: Case, peers: dict[str, str], grad: Tensor) -> dict[str, Contestants]:
    """Of forward and of training, by name; `peers` are names with their checkouts."""
    found: dict[str, Contestants] = {"forward": {}, "train": {}}
    for name in ("rowmesh", "rowmesh autograd"):
        bag = case.make_bag()

        def ours(ids: Tensor, bag: TensorTrainEmbeddingBag = bag) -> Tensor:
            return bag(ids.view(-1, 1))

        if name == "rowmesh":
            found["forward"][name] = without_gradients(ours)
            optimizer: torch.optim.Optimizer = TensorTrainOptimizer(bag, SGD(lr=LR))
        else:
            optimizer = torch.optim.SGD(bag.parameters(), lr=LR)
        found["train"][name] = step_of(ours, optimizer, grad)
    for name, checkout in peers.items():
        torch.manual_seed(0)
        forward, parameters = make(
            name, case.row_factors, list(factor_dim(case.dim)), case.rank, case.num_rows, checkout
        )
        found["forward"][name] = without_gradients(forward)
        found["train"][name] = step_of(forward, torch.optim.SGD(parameters, lr=LR), grad)
    return found


def measure(functions: Contestants, batches: list[Tensor], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every call; in each round every contestant runs its warm-up and its steps, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(options.repeats):
        for name, function in functions.items():
            for k in range(options.warmup + options.steps):
                ids = batches[(number * options.steps + k) % len(batches)]
                began = time.perf_counter()
                function(ids)
                if k >= options.warmup:
                    seconds[name].append(time.perf_counter() - began)
    return seconds


def draw(num_rows: int, batch: int, options: argparse.Namespace) -> list[Tensor]:
    """Batches of ids."""
    zipf = Zipf(num_rows, options.zipf)
    return [
        torch.from_numpy(zipf.sample(np.random.default_rng([options.seed, number]), (batch,)))
        for number in range(min(options.steps * options.repeats, 16))
    ]


def run_case(report: Report, case: Case, batches: list[Tensor], options: argparse.Namespace) -> None:
    """Forward and training of all contestants."""
    peers = {"plain_torch": "", "plain_torch_unique": ""}
    peers |= {"tensorly_torch": ""} if has_tensorly() else {}
    peers |= {"t3nsor_gather": options.t3nsor} if options.t3nsor else {}
    peers |= {"ttrec_torch": options.recsys_benchmark} if options.recsys_benchmark else {}
    peers |= {"embedding_bag": ""} if case.rank == options.rank[0] else {}
    grad = torch.randn(case.batch, case.dim, generator=torch.Generator().manual_seed(0))
    shape = case.make_bag().shape
    counts = {
        "unique_ids": int(np.median([len(ids.unique()) for ids in batches])),
        "unique_prefixes": int(np.median([len((ids // shape.row_factors[2]).unique()) for ids in batches])),
        "cores_mb": round(shape.num_parameters * 4 / 1e6, 2),
        "times_smaller": round(shape.compression, 1),
    }
    for kind, functions in contestants(case, peers, grad).items():
        timings = {name: summarize(times) for name, times in measure(functions, batches, options).items()}
        per_id = [name for name in peers if name not in ("plain_torch_unique", "embedding_bag")]
        best = min(per_id, key=lambda name: timings[name]["step_ms"])
        ours = timings["rowmesh"]["step_ms"]
        for name, timing in timings.items():
            report.line(
                case=case.name,
                kind=kind,
                contestant=name,
                **timing,
                **counts,
                ratio=round(timing["step_ms"] / ours, 2),
                **({"best_peer": best, "target": TARGETS[kind].get(case.rank)} if name == "rowmesh" else {}),
            )
        for peer in (best, "plain_torch_unique"):
            report.ratio(f"{case.name} {kind}: {peer} / rowmesh", round(timings[peer]["step_ms"] / ours, 2))


def tune_malloc() -> None:
    """Keeps freed memory, for peers and for us: fresh pages are up to half of a step's time. glibc only."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        for option, value in _MALLOC.items():
            ctypes.CDLL(None).mallopt(option, value)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", type=_integers, default=[1_000_000, 10_000_000], help="rows, separated by commas")
    add("--dim", type=_integers, default=[16, 64])
    add("--rank", type=_integers, default=[16, 32, 64])
    add("--batch", type=_integers, default=[4096])
    add("--zipf", type=float, default=1.1, help="exponent of the distribution of ids")
    add("--steps", type=int, default=8, help="timed calls of a round")
    add("--warmup", type=int, default=2, help="calls before them")
    add("--repeats", type=int, default=3, help="rounds; in each, every contestant runs once")
    add("--seed", type=int, default=1)
    add("--t3nsor", default="", help="checkout of KhrulkovV/tt-pytorch")
    add("--recsys-benchmark", default="", help="checkout of chenxing1999/recsys-benchmark")
    add("--ablation", action="store_true", help="instead: what order, reuse, aggregation and fused update give")
    add("--footprint", action="store_true", help="instead: sizes of three data sets' tables, beside the paper's")
    add("--versus-dense", action="store_true", help="instead: a 40 M × 128 table beside a dense one that fits")
    add("--dense-bytes", type=int, default=4 << 30, help="of that")
    tensor_train_orders.add_options(parser)
    tensor_train_quality.add_options(parser)
    tensor_train_cuda.add_options(parser)
    add("--quick", action="store_true", help="a small case that ends within 30 s")
    add("--output", type=Path, help="also append the lines to this file")
    if "cuda" in parser.parse_known_args(arguments)[0].device:
        parser.set_defaults(**tensor_train_cuda.DEFAULTS)
    options = parser.parse_args(arguments)
    if options.quick:
        quick = {
            "rows": [100_000],
            "dim": [16],
            "rank": [16],
            "batch": [1024],
            "steps": 4,
            "repeats": 2,
            "planted_rows": [20_000],
        }
        for name, value in quick.items():
            if getattr(options, name) == parser.get_default(name):
                setattr(options, name, value)
    return options


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    """Runs every case asked for."""
    options = parse(arguments)
    torch.set_num_threads(1)
    tune_malloc()
    report = Report("tensor_train", options.output)
    if options.device == "cuda":
        tensor_train_cuda.run(report, options, Case, draw)
        return
    if options.footprint:
        tensor_train_footprint.run(report, options)
    elif options.versus_dense:
        tensor_train_versus_dense.run(report, options, measure)
    elif options.quality:
        tensor_train_quality.run(report, options)
    else:
        run_cases(report, options)
    if options.ablation:
        tensor_train_orders.run(report, options, Case, measure)
    report.finish()


def run_cases(report: Report, options: argparse.Namespace) -> None:
    """Every combination of rows, batch, dim and rank."""
    for num_rows in options.rows:
        for batch in options.batch:
            batches = draw(num_rows, batch, options)
            for dim in options.dim:
                for rank in options.rank:
                    case = Case(num_rows, dim, rank, batch)
                    if options.ablation:
                        tensor_train_ablation.run_case(report, case, batches, options, measure)
                    else:
                        run_case(report, case, batches, options)


if __name__ == "__main__":
    main()
