"""Tensor-train look-ups and training steps on a GPU: `benchmarks.tensor_train --device cuda`.

Ours is all that a step needs: distinct ids, their arrangement, rows, the gradients of equal ids summed, the fused
update of the cores. Beside it the slices of every id, gathered and multiplied by `torch.bmm`, the same on distinct ids,
and `nn.EmbeddingBag` for scale; SGD for all. With `--ablation`, ours with one part after the other left out, on ids
drawn one by one and on planted communities in three orders. Matrix products have the precision that `--precision` gives
torch, ours and the peers' alike. Nothing is reported where rows are wrong.

Source: EL-Rec (SC'22) §VI, Fig. 14, 17, 18.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import Report
from benchmarks.measure import summarize
from benchmarks.peers.tensor_train import make
from rowmesh.ops.tensor_train import reference
from rowmesh.tables.tensor_train import factor_dim
from rowmesh.tables.update_rules import SGD

LR = 0.01
DEFAULTS: dict[str, Any] = {"rank": [16, 32, 64, 128], "batch": [4096, 65536], "steps": 20, "warmup": 5}
TOLERANCE = {"highest": 1e-5, "high": 1e-4, "medium": 1e-1}  # of a value, over the largest one


@dataclass(frozen=True)
class Level:
    """Which parts of a step are in use.

    Attributes:
        distinct: every id once.
        shared: the product of a prefix once.
        fused: the update with the gradients, not of dense ones.
    """

    distinct: bool = True
    shared: bool = True
    fused: bool = True


LEVELS = {
    "one by one": Level(distinct=False, shared=False),
    "distinct ids": Level(shared=False),
    "prefixes": Level(distinct=False),
    "distinct ids and prefixes": Level(),
    "distinct ids and prefixes, dense gradients": Level(fused=False),
}
WHOLE = "distinct ids and prefixes"


class DeviceTable:
    """Cores on a device, looked up and trained by the kernels.

    Args:
        case: of `benchmarks.tensor_train`.
        level: which parts are in use.
        grad: `[batch, D]`, of what a look-up returns.
    """

    def __init__(self, case: Any, level: Level, grad: Tensor) -> None:
        bag = case.make_bag()
        self.cores = [core.detach().to(grad.device) for core in bag.cores]
        self.shape, self._level, self._grad = bag.shape, level, grad
        self._segment = torch.tensor([0, case.batch], device=grad.device)

    def look_up(self, ids: Tensor) -> Tensor:
        """`[N, D]`."""
        rows, inverse, _, _ = self._forward(ids)
        return rows if inverse is None else rows.index_select(0, inverse)

    def train(self, ids: Tensor) -> None:
        """Look-up, backward and update."""
        from rowmesh.ops.tensor_train import cuda

        rows, inverse, arrangement, products = self._forward(ids)
        if inverse is not None:
            rows.index_select(0, inverse)
        gradients = self._grad if inverse is None else self._summed(inverse)
        if self._level.fused:
            numbers = SGD().numbers(LR, 1.0, 1)
            cuda.update(self.cores, [(), (), ()], arrangement, products, gradients, "sgd", numbers)
            return
        for core, gradient in zip(self.cores, cuda.backward(self.cores, arrangement, products, gradients), strict=True):
            core.sub_(gradient, alpha=LR)

    def _forward(self, ids: Tensor) -> tuple[Tensor, Tensor | None, Any, Tensor]:
        from rowmesh.ops.segment_unique.cuda import segment_unique
        from rowmesh.ops.tensor_train import cuda

        count = inverse = None
        if self._level.distinct:
            found = segment_unique(ids, self._segment)
            ids, count, inverse = found.unique, found.num_unique, found.inverse
        arrangement = cuda.arrange(ids, self.shape.row_factors, self.shape.num_rows, count, shared=self._level.shared)
        rows, products = cuda.forward(self.cores, arrangement)
        return rows, inverse, arrangement, products

    def _summed(self, inverse: Tensor) -> Tensor:
        from rowmesh.ops.merge.cuda import merge
        from rowmesh.ops.merge_update.cuda import sum_merged

        return sum_merged(merge(inverse), self._grad, torch.empty_like(self._grad))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: on a GPU instead")
    parser.add_argument(
        "--precision",
        choices=tuple(TOLERANCE),
        default="highest",
        help="of --device cuda: of float32 matrix products; see torch.set_float32_matmul_precision",
    )


def missing() -> str | None:
    """Why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device; run this on a machine with an NVIDIA GPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; in a checkout: pip install '.[gpu]'"
    return None


def run(
    report: Report, options: argparse.Namespace, make_case: Callable[..., Any], draw: Callable[..., list[Tensor]]
) -> None:
    """Every combination of rows, batch, dim and rank; one line that says why where there is no GPU."""
    reason = missing()
    if reason is not None:
        report.line(device="cuda", unavailable=reason)
        return
    device = torch.device("cuda")
    torch.set_float32_matmul_precision(options.precision)
    report.line(device=torch.cuda.get_device_name(), torch=torch.__version__, precision=options.precision)
    for num_rows in options.rows:
        for batch in options.batch:
            orders = {"drawn": [ids.to(device) for ids in draw(num_rows, batch, options)]}
            for dim in options.dim:
                for rank in options.rank:
                    case = make_case(num_rows, dim, rank, batch)
                    if options.ablation:
                        run_ablation(report, case, orders, options, device)
                    else:
                        run_case(report, case, orders["drawn"], options, device)
    if options.ablation:
        _run_planted(report, options, make_case, device)
    report.finish()


def _run_planted(
    report: Report, options: argparse.Namespace, make_case: Callable[..., Any], device: torch.device
) -> None:
    """The ablation on planted communities, scattered, by frequency and reordered."""
    from benchmarks.tensor_train_orders import planted, regrouped

    for num_rows in options.planted_rows:
        orders = planted(num_rows, options)
        for batch in options.batch:
            cut = {
                name: [torch.from_numpy(ids).to(device, torch.int64) for ids in regrouped(batches, batch)]
                for name, batches in orders.items()
            }
            if not all(cut.values()):
                report.line(planted_rows=num_rows, batch=batch, unavailable="fewer ids are planted than one batch has")
                continue
            for dim in options.dim:
                for rank in options.rank:
                    run_ablation(report, make_case(num_rows + 1, dim, rank, batch), cut, options, device)


def run_case(
    report: Report, case: Any, batches: list[Tensor], options: argparse.Namespace, device: torch.device
) -> None:
    """Forward and training of all contestants."""
    for kind, functions in contestants(case, batches[0], options, device).items():
        timings = measure(functions, batches, options)
        ours = timings["rowmesh"]["step_ms"]
        for name, timing in timings.items():
            ratio = round(timing["step_ms"] / ours, 2)
            report.line(case=case.name, kind=kind, contestant=name, **timing, **_counts(batches, case), ratio=ratio)
            if name != "rowmesh":
                report.ratio(f"{case.name} {kind}: {name} / rowmesh", ratio)


def contestants(
    case: Any, ids: Tensor, options: argparse.Namespace, device: torch.device
) -> dict[str, dict[str, Callable[[Tensor], Any]]]:
    """Of forward and of training, by name.

    Raises:
        AssertionError: ours finds other rows than the reference.
    """
    from benchmarks.tensor_train import step_of, without_gradients  # which imports this module

    grad = torch.randn(case.batch, case.dim, generator=torch.Generator().manual_seed(0)).to(device)
    ours = DeviceTable(case, LEVELS[WHOLE], grad)
    _check(ours, ids, options.precision)
    found: dict[str, dict[str, Callable[[Tensor], Any]]] = {
        "forward": {"rowmesh": ours.look_up},
        "train": {"rowmesh": ours.train},
    }
    peers = ["plain_torch", "plain_torch_unique"] + (["embedding_bag"] if case.rank == options.rank[0] else [])
    for name in peers:
        forward, parameters = make(name, case.row_factors, list(factor_dim(case.dim)), case.rank, case.num_rows, "")
        for parameter in parameters:
            parameter.data = parameter.data.to(device)
        found["forward"][name] = without_gradients(forward)
        found["train"][name] = step_of(forward, torch.optim.SGD(parameters, lr=LR), grad)
    return found


def run_ablation(
    report: Report, case: Any, orders: Mapping[str, list[Tensor]], options: argparse.Namespace, device: torch.device
) -> None:
    """Forward and training, one part after the other left out, on ids in every order."""
    grad = torch.randn(case.batch, case.dim, generator=torch.Generator().manual_seed(0)).to(device)
    tables = {name: DeviceTable(case, level, grad) for name, level in LEVELS.items()}
    for table in tables.values():
        _check(table, next(iter(orders.values()))[0], options.precision)
    for order, batches in orders.items():
        for kind, functions in (
            ("forward", {name: table.look_up for name, table in tables.items() if LEVELS[name].fused}),
            ("train", {name: table.train for name, table in tables.items()}),
        ):
            timings = measure(functions, batches, options)
            for name, timing in timings.items():
                ratio = round(timing["step_ms"] / timings[WHOLE]["step_ms"], 2)
                report.line(
                    case=case.name,
                    kind=kind,
                    order=order,
                    arrangement=name,
                    **timing,
                    **_counts(batches, case),
                    ratio=ratio,
                )
                report.ratio(f"{case.name} {kind} {order}: {name} / all", ratio)


def measure(
    functions: Mapping[str, Callable[[Tensor], Any]], batches: list[Tensor], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Times of every contestant, each on the same batches in every round, in turn.

    `step_ms` is between two events on the device; `wall_ms` what a step takes where one follows the other.
    """
    on_device: dict[str, list[float]] = {name: [] for name in functions}
    on_host: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(options.repeats):
        for name, function in functions.items():
            for k in range(options.warmup):
                function(batches[k % len(batches)])
            seconds, wall_s = _time(function, [batches[k % len(batches)] for k in range(options.steps)])
            on_device[name] += seconds
            on_host[name].append(wall_s / options.steps)
    return {name: {**summarize(on_device[name]), "wall_ms": round(min(on_host[name]) * 1e3, 4)} for name in functions}


def _time(function: Callable[[Tensor], Any], batches: list[Tensor]) -> tuple[list[float], float]:
    """Seconds of every call on the device, and of all of them on the host."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in batches]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for ids, (begin, end) in zip(batches, events, strict=True):
        begin.record()
        function(ids)
        end.record()
    torch.cuda.synchronize()
    wall_s = time.perf_counter() - began
    return [begin.elapsed_time(end) / 1e3 for begin, end in events], wall_s


def _check(table: DeviceTable, ids: Tensor, precision: str) -> None:
    """Nothing is reported where rows are wrong."""
    expected = reference.rows([core.double() for core in table.cores], ids)
    off = float((table.look_up(ids) - expected).abs().max() / expected.abs().max())
    assert off < TOLERANCE[precision], f"rows are wrong by {off:.1e} of the largest value"


def _counts(batches: list[Tensor], case: Any) -> dict[str, int]:
    """Distinct ids and prefixes of a batch."""
    ids = batches[0]
    return {"unique_ids": len(ids.unique()), "unique_prefixes": len((ids // case.row_factors[2]).unique())}
