"""The embedding tax: a full DLRM step over the same step with its embeddings given, beside TorchRec's.

    python -m benchmarks.train_step --dim 16,64 --peer-python PEER/bin/python

Then the growth of memory over `--memory-steps` steps, full ones and of the sparse part alone. With `--tensor-train`
instead: the same step with large tables as tensor-train cores, beside the step with all of them dense.
"""

from __future__ import annotations

from typing import Any

from benchmarks import train_step_tensor_train
from benchmarks.command import Options, Report, parse
from benchmarks.contest import Answers, contestants, take_turns
from benchmarks.contestant import Contestant
from benchmarks.measure import median, slowest, summarize
from benchmarks.workload import Workload

MODULE = "benchmarks.ranks.train_step"
TARGETS = {16: 1.05, 64: 1.08}
TRANSPORTS = ("one_sided", "collective")


def run_case(options: Options, report: Report, workload: Workload) -> None:
    """One case: rounds in turns, then memory over many steps."""
    ours = {f"rowmesh {name}": (MODULE, {"transport": name}) for name in TRANSPORTS}
    with contestants(options, report, workload, ours) as (own, peers):
        rounds = take_turns("train", [*own, *peers], options.repeats)
        peer_tax = {peer.name: report_tax(report, workload, peer.name, rounds) for peer in peers}
        best = min(peer_tax, key=peer_tax.__getitem__, default=None)
        for contestant, transport in zip(own, TRANSPORTS, strict=True):
            beside = {"peer": best, "peer_tax": best and peer_tax[best], "target": TARGETS.get(workload.dim)}
            tax = report_tax(report, workload, contestant.name, rounds, **beside)
            report.ratio(f"{workload.name}_{transport}", tax)
        if best is not None:
            report.ratio(f"{workload.name}_{best}", peer_tax[best])
        for part in ("full", "sparse"):
            report_memory(report, workload, own[0], part, 20 if options.quick else options.extra["memory_steps"])


def report_tax(report: Report, workload: Workload, name: str, rounds: Answers, **beside: Any) -> float:
    """Reports the two steps of one contestant and their ratio; returns the ratio."""
    seconds = {step: [s for answers in rounds[name] for s in slowest(answers, step)] for step in ("full", "given")}
    full, given = (summarize(seconds[step], step) for step in ("full", "given"))
    differences = [(a - b) * 1e3 for a, b in zip(seconds["full"], seconds["given"], strict=True)]
    tax = round(full["full_ms"] / given["given_ms"], 4)
    report.line(
        case=workload.name,
        contestant=name,
        dim=workload.dim,
        global_batch=workload.global_batch,
        pooling=workload.pooling,
        **(full | given),
        difference_ms=median(differences),
        samples_per_s=round(workload.global_batch / full["full_ms"] * 1e3),
        tax=tax,
        **beside,
    )
    return tax


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
        tensor_train=False,
        tensor_train_rank=16,
        tensor_train_rows=100_000,
    )
    report = Report("train_step", options.output)
    run = train_step_tensor_train.run_case if options.extra["tensor_train"] else run_case
    for workload in options.workloads:
        run(options, report, workload)
    report.finish()


if __name__ == "__main__":
    main()
