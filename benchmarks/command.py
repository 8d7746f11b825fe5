"""What all benchmark commands share: their options, and how they report."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.workload import CONSTRUCTIONS, Workload, read_bags

QUICK_S = 30.0
_LISTS = ("dim", "global_batch", "pooling")
# Small enough that imports take most of the time.
_QUICK: dict[str, Any] = {
    "max_rows": 20_000,
    "dim": [16],
    "global_batch": [1024],
    "steps": 10,
    "warmup": 3,
    "repeats": 1,
}


@dataclass(frozen=True)
class Options:
    """A parsed command line.

    Attributes:
        workloads: the cases: every combination of the dims, batches and poolings asked for.
        peer_python: the Python of an environment with the peer, or None.
        ranks: processes of each contestant.
        repeats: rounds; in each, every contestant runs once.
        quick: whether to end within QUICK_S.
        deadline_s: when contestants must be ready, on `time.monotonic`'s clock.
        output: a file that lines are appended to, or None.
        extra: values of a benchmark's own options.
    """

    workloads: list[Workload]
    peer_python: str | None
    ranks: int
    repeats: int
    quick: bool
    deadline_s: float
    output: Path | None
    extra: dict[str, Any]


def parse(
    description: str,
    arguments: list[str] | None = None,
    defaults: dict[str, Any] | None = None,
    **extra: bool | int | str,
) -> Options:
    """Parses a command line.

    Args:
        description: of the benchmark.
        arguments: default: the process's own.
        defaults: of this benchmark, where they differ from the workload's.
        extra: options of this benchmark alone, and their defaults, which say whether they are switches, numbers or
            text.
    """
    parser = _parser(description, extra)
    parser.set_defaults(**(defaults or {}))
    options = vars(parser.parse_args(arguments))
    if options["quick"]:
        for name, value in _QUICK.items():
            if options[name] == parser.get_default(name):
                options[name] = value
    options |= _bags(parser, options)
    names = [field.name for field in fields(Workload) if field.name in options]
    cases = itertools.product(*(options[name] for name in _LISTS))
    common = {name: options[name] for name in names if name not in _LISTS}
    workloads = [Workload(**common, **dict(zip(_LISTS, case, strict=True))) for case in cases]
    for workload in workloads:
        if workload.global_batch % options["ranks"]:
            parser.error(f"--global-batch {workload.global_batch} does not divide by {options['ranks']} ranks")
    allowed_s = QUICK_S * 0.6 if options["quick"] else 600.0
    return Options(
        workloads=workloads,
        peer_python=options["peer_python"],
        ranks=options["ranks"],
        repeats=options["repeats"],
        quick=options["quick"],
        deadline_s=time.monotonic() + allowed_s,
        output=options["output"],
        extra={name: options[name] for name in extra},
    )


def _bags(parser: argparse.ArgumentParser, options: dict[str, Any]) -> dict[str, Any]:
    """Fields of the workloads by `--bags` and `--construction`, of benchmarks that have them."""
    if (construction := options.get("construction", CONSTRUCTIONS[0])) not in CONSTRUCTIONS:
        parser.error(f"--construction {construction}: there are {', '.join(CONSTRUCTIONS)}")
    if not options.get("bags"):
        return {}
    if options["pooling"] != parser.get_default("pooling"):
        parser.error("--pooling says how many ids a bag has, and so does --bags; give either")
    try:
        return read_bags(options["bags"])
    except ValueError as error:
        parser.error(str(error))


def _parser(description: str, extra: dict[str, bool | int | str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    workload = Workload()
    add = parser.add_argument
    add("--max-rows", type=int, default=workload.max_rows, help="cap on rows per table (0: no cap)")
    add("--dim", type=_integers, default=[workload.dim], help="dimensions, separated by commas")
    add("--pooling", type=_integers, default=[workload.pooling], help="ids a bag, separated by commas")
    add("--zipf", type=float, default=workload.zipf, help="exponent of the distribution of ids")
    add("--global-batch", type=_integers, default=[workload.global_batch], help="samples a step, separated by commas")
    add("--steps", type=int, default=workload.steps, help="timed steps of a round")
    add("--warmup", type=int, default=workload.warmup, help="steps before them")
    add("--lr", type=float, default=workload.lr, help="learning rate")
    add("--seed", type=int, default=workload.seed, help="of the batches")
    add("--ranks", type=int, default=2, help="processes, of one thread each")
    add("--repeats", type=int, default=3, help="rounds; in each, every contestant runs once")
    add("--peer-python", help="python of an environment with TorchRec (benchmarks/README.md)")
    add("--quick", action="store_true", help=f"a small case that ends within {QUICK_S:.0f} s")
    add("--output", type=Path, help="also append the lines to this file")
    for name, default in extra.items():
        kind: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default)}
        add(f"--{name.replace('_', '-')}", default=default, **kind)
    return parser


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


class Report:
    """Prints JSON lines, and appends them to a file where one is given.

    Args:
        benchmark: stands in every line.
        output: the file, or None.
    """

    def __init__(self, benchmark: str, output: Path | None) -> None:
        self._benchmark = benchmark
        self._output = output
        self._ratios: dict[str, float | None] = {}

    def line(self, **record: Any) -> None:
        """Writes one line."""
        text = json.dumps({"benchmark": self._benchmark, **record})
        print(text, flush=True)
        if self._output is not None:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            with self._output.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    def ratio(self, case: str, ratio: float | None) -> None:
        """Keeps a ratio for the summary; None where the peer was not there."""
        self._ratios[case] = ratio

    def finish(self) -> None:
        """Writes the last line: the ratio of every case."""
        self.line(summary=self._ratios)


def run_cases(
    name: str,
    description: str | None,
    cases: dict[str, str],
    arguments: list[str] | None = None,
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """Runs what is asked for of a benchmark of several cases.

    A case is a module with two functions: `add_options(parser)`, one of whose options has the name of the case, and
    `run(report, options)`, which is called where that option is given.

    Args:
        name: of the benchmark.
        description: for `--help`.
        cases: name of each and its module.
        arguments: default: the process's own.
        add_options: adds those that cases share.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small cases that end within 30 s")
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    add_options(parser)
    modules = {case: import_module(module) for case, module in cases.items()}
    for module in modules.values():
        module.add_options(parser)
    options = parser.parse_args(arguments)
    asked = [module for case, module in modules.items() if getattr(options, case)]
    if not asked:
        parser.error(f"nothing asked for: give {', '.join(f'--{case}' for case in modules)}")
    report = Report(name, options.output)
    for module in asked:
        module.run(report, options)
    report.finish()


def draw_file(description: str | None, draw: Callable[[Iterator[Any]], str], arguments: Sequence[str] | None) -> None:
    """A command that draws a chart of the lines that a benchmark printed.

    Args:
        description: of the command.
        draw: makes a chart of lines.
        arguments: of the command: the file of the lines, and that of the chart.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path)
    parser.add_argument("chart", type=Path)
    options = parser.parse_args(arguments)
    lines = map(json.loads, options.lines.read_text(encoding="utf-8").splitlines())
    options.chart.write_text(draw(lines), encoding="utf-8")
