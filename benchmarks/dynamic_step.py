"""The sparse step on dynamic tables over the same step on dense ones (`embedding_step --storage dynamic`).

Both do the same steps, in turns, in one run. Tables have room for all ids that occur, and batches go round: after the
warm-up nearly all ids are known. What a table costs that admits and evicts is `benchmarks.dynamic_table`.
"""

from __future__ import annotations

from benchmarks.command import Options, Report
from benchmarks.contest import contestants, take_turns
from benchmarks.measure import slowest, summarize

MODULE = "benchmarks.ranks.embedding_step"
TRANSPORTS = ("one_sided", "collective")
TARGET = 1.35


def run(options: Options, report: Report) -> None:
    """Every case asked for."""
    for workload in options.workloads:
        ours = {
            f"{storage} {transport}": (MODULE, {"transport": transport, "storage": storage})
            for transport in TRANSPORTS
            for storage in ("dense", "dynamic")
        }
        with contestants(options, report, workload, ours) as (own, _):
            rounds = take_turns("round", own, options.repeats)
            phases = {each.name: each.ask("phases")[0]["phase_ms"] for each in own}
        step_ms = {}
        for name, answers in rounds.items():
            timing = summarize([second for each in answers for second in slowest(each, "step")])
            step_ms[name] = timing["step_ms"]
            report.line(case=workload.name, contestant=name, **timing, phase_ms=phases[name], target=TARGET)
        for transport in TRANSPORTS:
            ratio = step_ms[f"dynamic {transport}"] / step_ms[f"dense {transport}"]
            report.ratio(f"{workload.name}_{transport}_dynamic_over_dense", round(ratio, 2))
