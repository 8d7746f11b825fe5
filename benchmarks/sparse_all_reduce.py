"""Copies of rows kept equal: gradients summed at owners against the paper's sparse, a dense, and an all-gather way.

    python -m benchmarks.sparse_all_reduce --ranks 2
    python -m benchmarks.sparse_all_reduce --ranks 4
    python -m benchmarks.sparse_all_reduce --hosts 2x2

Every rank has the gradients of some of the copied rows; after a step all copies of all ranks are updated by the sum.
Timed are the messages and what is done with them, from gradients to updated copies, over gloo: within this host, or
with `--hosts 2xRANKS` on two that a cable of 1 Gbit/s joins (`benchmarks.hosts`).
"""

from __future__ import annotations

from typing import Any

from benchmarks.command import Options, Report, parse
from benchmarks.contest import joined
from benchmarks.contestant import Contestant, ContestantError, connect_all
from benchmarks.hosts import Hosts, HostsError
from benchmarks.measure import slowest, summarize
from benchmarks.workload import Workload

MODULE = "benchmarks.ranks.sparse_all_reduce"
OURS, *PEERS = "owners", "local_aggregated", "dense", "all_gather"
SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
OVERLAPS = ("independent", "same", "disjoint")
MAX_ERROR = 1e-6


def cases(ranks: int, quick: bool) -> list[tuple[float, str]]:
    """Touched shares and overlaps that differ.

    >>> cases(2, quick=True)
    [(0.1, 'independent')]
    >>> len(cases(4, quick=False))
    15
    """
    if quick:
        return [(0.1, "independent")]
    shares = [(share, overlap) for share in SHARES[:-1] for overlap in OVERLAPS]
    return [*((s, overlap) for s, overlap in shares if overlap != "disjoint" or s * ranks <= 1), (SHARES[-1], "same")]


def check(answers: list[dict[str, Any]]) -> dict[str, float]:
    """The largest error of each variant.

    Raises:
        ContestantError: a sum is wrong, or our copies are not equal to the bit.
    """
    errors = {name: max(answer[name]["error"] for answer in answers) for name in answers[0]}
    if any(error > MAX_ERROR for error in errors.values()):
        raise ContestantError(f"sums are wrong by more than {MAX_ERROR}: {errors}")
    digests = {answer[OURS]["digest"] for answer in answers}
    if len(digests) > 1:
        raise ContestantError(f"copies differ between ranks: {digests}")
    return errors


def run_case(options: Options, report: Report, contestant: Contestant, share: float, overlap: str) -> None:
    """One touched share and overlap: a line for each variant."""
    drawn = contestant.ask("draw", share=share, overlap=overlap)[0]
    errors = check(contestant.ask("check"))
    rounds = [contestant.ask("round") for _ in range(options.repeats)]
    counts = contestant.ask("count")
    where = options.extra["hosts"] or f"{options.ranks} ranks"
    case = f"{where}, {share:.0%} {overlap}"
    lines = {}
    for name in (OURS, *PEERS):
        timing = summarize([second for answers in rounds for second in slowest(answers, name)])
        sent = sum(answer[name] for answer in counts) / len(counts)
        lines[name] = {"step_ms": timing["step_ms"], "bytes_sent_a_rank": round(sent)}
        report.line(
            case=case,
            variant=name,
            ranks=options.ranks,
            dim=options.workloads[0].dim,
            rows=options.extra["rows"],
            share=share,
            overlap=overlap,
            **drawn,
            **timing,
            bytes_sent_a_rank=round(sent),
            error=float(f"{errors[name]:.2g}"),
            times_ours=round(timing["step_ms"] / lines[OURS]["step_ms"], 2),
        )
    for peer in PEERS:
        for what, key in (("time", "step_ms"), ("bytes", "bytes_sent_a_rank")):
            report.ratio(f"{case}: {peer} / ours {what}", round(lines[peer][key] / lines[OURS][key], 2))


def run(options: Options, report: Report, workload: Workload, hosts: Hosts | None) -> None:
    """All cases of one dim, on ranks that stay.

    Raises:
        ContestantError: the ranks did not start, failed, or have wrong sums.
    """
    name, rows = f"{options.ranks} ranks", options.extra["rows"]
    with Contestant(name, MODULE, workload, ranks=options.ranks, hosts=hosts, num_rows=rows) as contestant:
        _, absent = connect_all([contestant], options.deadline_s + 60.0)
        if absent:
            raise ContestantError(absent[name])
        for share, overlap in cases(options.ranks, options.quick):
            run_case(options, report, contestant, share, overlap)


def main() -> None:
    """Runs every case.

    Raises:
        SystemExit: hosts cannot be made here; says why.
    """
    options = parse((__doc__ or "").splitlines()[0], defaults={"dim": [64]}, rows=32768, hosts="")
    report = Report("sparse_all_reduce", options.output)
    try:
        with joined(options) as (options, hosts):
            for workload in options.workloads:
                run(options, report, workload, hosts)
    except HostsError as error:
        raise SystemExit(f"sparse_all_reduce: {error}") from error
    report.finish()


if __name__ == "__main__":
    main()
