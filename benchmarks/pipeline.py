"""Pipelines: what overlap gains where rows come over a cable, and where they come from a disk.

    python -m benchmarks.pipeline --hosts 2 --rate 500mbit --share 20,40,60    beside steps in turn, and TorchRec
    python -m benchmarks.pipeline --tier disk                                  beside no look-ahead, and all in memory

Several cases may be asked for at once. A case is a module with two functions: `add_options(parser)`, one of whose
options has the name of the case, and `run(report, options)`, which is called where that option is given.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from benchmarks.command import Report

CASES = {"hosts": "benchmarks.pipeline_hosts", "tier": "benchmarks.pipeline_tier"}


def main(arguments: list[str] | None = None) -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small cases that end within 30 s")
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    parser.add_argument("--peer-python", help="the Python of an environment with TorchRec")
    modules = {name: import_module(module) for name, module in CASES.items()}
    for module in modules.values():
        module.add_options(parser)
    options = parser.parse_args(arguments)
    asked = [module for name, module in modules.items() if getattr(options, name)]
    if not asked:
        parser.error(f"nothing asked for: give {', '.join(f'--{name}' for name in modules)}")
    report = Report("pipeline", options.output)
    for module in asked:
        module.run(report, options)
    report.finish()


if __name__ == "__main__":
    main()
