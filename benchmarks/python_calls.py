"""Python functions of rowmesh that a step of the sparse part calls: what a small batch pays for layers of code.

    python -m benchmarks.python_calls

Two groups of three tables, one-sided and collective. A count does not depend on how busy the machine is.
"""

from __future__ import annotations

from benchmarks.command import Report, parse
from benchmarks.contest import take_turns
from benchmarks.contestant import Contestant, ContestantError, connect_all

MODULE = "benchmarks.ranks.python_calls"
TRANSPORTS = ("one_sided", "collective")
TARGETS = {"forward": 46, "backward": 17, "step": 60}  # one-sided


def main() -> None:
    """Counts under both transports."""
    options = parse((__doc__ or "").splitlines()[0], defaults={"global_batch": [512], "max_rows": 1000})
    report = Report("python_calls", options.output)
    workload = options.workloads[0]
    for transport in TRANSPORTS:
        with Contestant(transport, MODULE, workload, ranks=options.ranks, transport=transport) as contestant:
            ready, absent = connect_all([contestant], options.deadline_s + 60.0)
            if absent:
                raise ContestantError(absent[transport])
            calls = take_turns("count", ready, 1)[transport][0][0]
        for part, count in calls.items():
            target = TARGETS[part] if transport == "one_sided" else None
            report.line(transport=transport, part=part, calls=count, target=target)
            report.ratio(f"{transport} {part} / target", target and round(count / target, 2))
    report.finish()


if __name__ == "__main__":
    main()
