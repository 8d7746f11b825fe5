"""What a plan costs: seconds and memory of searching one, for hundreds to thousands of ranks.

    python -m benchmarks.planning

As `rowmesh plan` does without options, every quick strategy makes a plan of the 26 tables of Criteo Kaggle
(`benchmarks.shapes`), for nodes of 8 ranks and links between nodes that are 4.21 times as dear; then `--replicas auto`
for `--replicas-ranks`. Each search is a process of its own, from its first import on, which reads the counts from a
file. Ratios are the targets over what is measured, so that 1 or more meets them: 10 s and 1 GB for any number of ranks,
30 s with replicas. Searching uses one thread: processor time, which other work on the machine hardly changes, is what
the ratio of seconds is of.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGET_S = {"auto": 10.0, "replicas auto": 30.0}
TARGET_BYTES = 1e9
RANKS_PER_NODE = 8
INTER_OVER_INTRA = 4.21
BATCH_SIZE = 512  # samples a rank
QUICK_SCALE = 0.01


def main(arguments: list[str] | None = None) -> None:
    """Measures every case, a process each."""
    from benchmarks.command import Report
    from benchmarks.shapes import draw

    options = _parser().parse_args(arguments)
    if options.case:
        print(json.dumps(measured(options.case, Path(options.profile), options.ranks[0])))
        return
    report = Report("planning", options.output)
    shape = draw(options.shape, scale=QUICK_SCALE if options.quick else 1.0)
    cases = [("auto", ranks) for ranks in (options.ranks[:1] if options.quick else options.ranks)]
    if options.replicas_ranks and not options.quick:
        cases.append(("replicas auto", options.replicas_ranks))
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        shape.counted.save(profile)
        for case, ranks in cases:
            found = [_in_a_process(case, profile, ranks) for _ in range(1 if options.quick else options.repeats)]
            least = min(found, key=lambda each: each["processor_s"])
            by_seconds, by_memory = TARGET_S[case] / least["processor_s"], TARGET_BYTES / least["peak_bytes"]
            report.line(
                case=case,
                ranks=ranks,
                tables=len(shape.counted.tables),
                rows=shape.num_rows,
                **least,
                runs=len(found),
                target_s=TARGET_S[case],
                target_bytes=TARGET_BYTES,
            )
            report.ratio(f"{case}, {ranks} ranks: target over seconds", round(by_seconds, 2))
            report.ratio(f"{case}, {ranks} ranks: target over memory", round(by_memory, 2))
    report.finish()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=_integers, default=[256, 1024, 4096], help="simulated ranks, separated by commas")
    add("--replicas-ranks", type=int, default=1024, help="ranks of the search with replicas; 0 leaves it out")
    add("--shape", default="kaggle", help="avazu, kaggle or terabyte")
    add("--repeats", type=int, default=2, help="processes of each case, of which that with the least time counts")
    add("--quick", action="store_true", help="a small case that ends within 30 s")
    add("--output", type=Path, help="also append the lines to this file")
    add("--case", default="", help=argparse.SUPPRESS)
    add("--profile", default="", help=argparse.SUPPRESS)
    return parser


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _in_a_process(case: str, profile: Path, ranks: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.planning", "--case", case, "--profile", str(profile)]
    began = time.perf_counter()
    done = subprocess.run([*command, "--ranks", str(ranks)], check=True, stdout=subprocess.PIPE)
    return {"elapsed_s": round(time.perf_counter() - began, 2), **json.loads(done.stdout)}


def measured(case: str, path: Path, ranks: int) -> dict[str, Any]:
    """Searches a plan in this process, and says which it found and what the process took until then."""
    from rowmesh.placement.comparison import compare
    from rowmesh.placement.profile import Profile
    from rowmesh.placement.request import Request
    from rowmesh.placement.strategies.problem import Problem
    from rowmesh.placement.topology import Topology
    from rowmesh.placement.two_dimensional import compare_replicas

    topology = Topology.grouped(ranks // RANKS_PER_NODE, RANKS_PER_NODE, INTER_OVER_INTRA)
    problem = Problem(Profile.load(path), topology, Request(batch_size=BATCH_SIZE))
    plan = compare(problem).plan if case == "auto" else compare_replicas(problem).plan
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "strategy": plan.strategy,
        "ranges": sum(len(table.ranges) for table in plan.tables),
        "processor_s": round(used.ru_utime + used.ru_stime, 2),
        "peak_bytes": used.ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
