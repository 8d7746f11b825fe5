"""A full DLRM step beside TorchRec's, and the embedding tax: that over the same step with its embeddings given.

    python -m benchmarks.train_step --dim 16,64 --peer-python PEER/bin/python
    python -m benchmarks.train_step --dim 16,64 --precision bfloat16 --peer-python PEER/bin/python
    python -m benchmarks.train_step --bags mlperf --dim 64 --global-batch 2048 --peer-python PEER/bin/python
    python -m benchmarks.train_step --bags mlperf --hosts 2 --rate 500mbit --dim 64 --peer-python PEER/bin/python

The floor is what all products of the dense network take at the rate of the fastest one, measured in the same processes.
Ours computes as `rowmesh train` does; the peer's network is plain torch under DistributedDataParallel. With
`--precision bfloat16` both networks are under autocast. `benchmarks.embedding_step` says what `--bags`,
`--construction`, `--send`, `--hosts` and `--rate` are.

Then the growth of memory over `--memory-steps` steps, full ones and of the sparse part alone. With `--tensor-train`
instead: the same step with large tables as tensor-train cores, beside the step with all of them dense.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks import sending, train_step_tensor_train
from benchmarks.command import Options, Report, parse
from benchmarks.contest import Answers, contestants, joined, take_turns
from benchmarks.contestant import Contestant
from benchmarks.hosts import Hosts, HostsError
from benchmarks.measure import median, slowest, summarize
from benchmarks.workload import Workload

MODULE = "benchmarks.ranks.train_step"
TARGETS = {16: 1.05, 64: 1.08}


def run_case(options: Options, report: Report, workload: Workload, hosts: Hosts | None) -> None:
    """One case: rounds in turns, then memory over many steps."""
    precision = {"precision": options.extra["precision"]}
    cable = {} if hosts is None else {"hosts": options.extra["hosts"], "rate": options.extra["rate"] or "1gbit"}
    case = "_".join([workload.name, *cable.values()])
    ours = sending.ours(options, workload, hosts, MODULE, **precision)
    with contestants(options, report, workload, ours, hosts, **precision) as (own, peers):
        rounds = take_turns("train", [*own, *peers], options.repeats)
        floor_ms = report_floor(report, workload, own[0], **precision)
        common = {"floor_ms": floor_ms, **precision, **cable}
        theirs = {peer.name: report_steps(report, workload, peer.name, rounds, **common) for peer in peers}
        best = min(theirs, key=lambda name: theirs[name].full_ms, default=None)
        beside: dict[str, Any] = {"target": None if workload.bags or cable else TARGETS.get(workload.dim), **common}
        if best is not None:
            beside |= {"peer": best, "peer_full_ms": theirs[best].full_ms, "peer_tax": theirs[best].tax}
            report.ratio(f"{case}_{best}", theirs[best].tax)
        for contestant in own:
            transport = sending.short_name(contestant.name)
            mine = report_steps(report, workload, contestant.name, rounds, **beside)
            report.ratio(f"{case}_{transport}", mine.tax)
            report.ratio(f"{case}_{transport}_over_floor", round(mine.full_ms / floor_ms, 3))
            if best is not None:
                report.ratio(f"{case}_{best}_over_{transport}", round(theirs[best].full_ms / mine.full_ms, 3))
        for part in ("full", "sparse"):
            report_memory(report, workload, own[0], part, 20 if options.quick else options.extra["memory_steps"])


class Steps(NamedTuple):
    """A full step, and that over the step with embeddings given."""

    full_ms: float
    tax: float


def report_floor(report: Report, workload: Workload, contestant: Contestant, precision: str) -> float:
    """Reports how long the products of a step take at least, on the slowest rank; milliseconds."""
    slowest_rank = max(contestant.ask("floor"), key=lambda answer: answer["floor_ms"])
    rounded = {name: round(value, 3) for name, value in slowest_rank.items()}
    report.line(case=workload.name, precision=precision, **rounded)
    return rounded["floor_ms"]


def report_steps(report: Report, workload: Workload, name: str, rounds: Answers, **beside: Any) -> Steps:
    """Reports the two steps of one contestant, their ratio, and how far they are from the floor and the peer."""
    seconds = {step: [s for answers in rounds[name] for s in slowest(answers, step)] for step in ("full", "given")}
    full, given = (summarize(seconds[step], step) for step in ("full", "given"))
    differences = [(a - b) * 1e3 for a, b in zip(seconds["full"], seconds["given"], strict=True)]
    full_ms, tax = full["full_ms"], round(full["full_ms"] / given["given_ms"], 4)
    ratios = {"over_floor": round(full_ms / beside["floor_ms"], 3)}
    if "peer_full_ms" in beside:
        ratios["peer_over_ours"] = round(beside["peer_full_ms"] / full_ms, 3)
    report.line(
        case=workload.name,
        contestant=name,
        dim=workload.dim,
        global_batch=workload.global_batch,
        **workload.bags_record,
        **(full | given),
        difference_ms=median(differences),
        samples_per_s=round(workload.global_batch / full_ms * 1e3),
        tax=tax,
        **beside,
        **ratios,
    )
    return Steps(full_ms, tax)


def report_memory(report: Report, workload: Workload, contestant: Contestant, part: str, steps: int) -> None:
    """Reports how much memory the ranks gained over many steps, full ones or of the sparse part alone."""
    answers = contestant.ask("memory", part=part, steps=steps)
    resident = [[size / 2**20 for size in answer["resident_bytes"]] for answer in answers]
    report.line(
        case=workload.name,
        contestant=contestant.name,
        memory_of=part,
        steps=steps,
        growth_mib_by_rank=[round(after - before, 2) for before, _, after in resident],
        growth_mib_of_second_half=[round(after - halfway, 2) for _, halfway, after in resident],
        resident_mib_by_rank=[round(after) for _, _, after in resident],
    )


def main() -> None:
    """Runs every case asked for."""
    options = parse(
        (__doc__ or "").splitlines()[0],
        defaults={"dim": [16, 64]},
        memory_steps=500,
        precision="float32",
        tensor_train=False,
        tensor_train_rank=16,
        tensor_train_rows=100_000,
        hosts="",
        rate="",
        send="rows",
        bags="",
        construction="drawn",
    )
    report = Report("train_step", options.output)
    if options.extra["tensor_train"] and options.extra["hosts"]:
        raise SystemExit("train_step: --tensor-train runs on one host; leave --hosts out")
    try:
        with joined(options) as (options, hosts):
            for workload in options.workloads:
                if options.extra["tensor_train"]:
                    train_step_tensor_train.run_case(options, report, workload)
                else:
                    run_case(options, report, workload, hosts)
    except HostsError as error:
        raise SystemExit(f"train_step: {error}") from error
    report.finish()


if __name__ == "__main__":
    main()
