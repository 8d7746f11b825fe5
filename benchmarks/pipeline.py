"""Pipelines: what overlap gains where rows come over a cable, where they come from a disk, and both.

    python -m benchmarks.pipeline --hosts 2 --rate 500mbit --share 20,40,60    beside steps in turn, and TorchRec
    python -m benchmarks.pipeline --tier disk                                  beside no look-ahead, and all in memory
    python -m benchmarks.pipeline --el-rec                                     tensor-train, tiered and dense tables
    python -m benchmarks.pipeline --ablation --sweep --figure FILE.svg         each half of nested pipelining, and both
    python -m benchmarks.pipeline --replicas 1,2,4                             over tables with replicas
    python -m benchmarks.pipeline --stages                                     the schedule alone, stages that sleep

Several cases may be asked for at once.
"""

from __future__ import annotations

import argparse

from benchmarks.command import run_cases

CASES = {
    "hosts": "benchmarks.pipeline_hosts",
    "tier": "benchmarks.pipeline_tier",
    "el_rec": "benchmarks.pipeline_el_rec",
    "ablation": "benchmarks.pipeline_ablation",
    "replicas": "benchmarks.pipeline_replicas",
    "stages": "benchmarks.pipeline_stages",
}


def main(arguments: list[str] | None = None) -> None:
    """Runs what is asked for."""
    run_cases("pipeline", __doc__, CASES, arguments, _add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer-python", help="the Python of an environment with TorchRec")


if __name__ == "__main__":
    main()
