"""The sparse part of a training step: forward, backward and update of 26 tables, against TorchRec.

    python -m benchmarks.embedding_step --dim 16,64,128 --global-batch 4096,16384 --peer-python PEER/bin/python
    python -m benchmarks.embedding_step --dim 64 --global-batch 4096,16384 --pooling 10 --peer-python PEER/bin/python
    python -m benchmarks.embedding_step --wire bfloat16 --dim 64,128
    python -m benchmarks.embedding_step --wire bfloat16 --hosts 2x1 --dim 16,64,128 --global-batch 4096
    python -m benchmarks.embedding_step --plan cyclic --dim 16,64 --global-batch 4096,16384
    python -m benchmarks.embedding_step --storage dynamic --dim 16,64 --global-batch 4096,16384
    python -m benchmarks.embedding_step --plan cyclic --hosts 2x2 --dim 16,64 --global-batch 4096,16384

Both transports, beside TorchRec's table-wise and row-wise sharding; the phases of a step, and its distance to a floor.
With `--wire bfloat16` also messages with rounded rows and gradients, over those without (`rounded` in the summary); and
with `--hosts`, these two alone, between two hosts by the speed of their cable (`benchmarks.wire_step`).
With `--plan STRATEGY` or `--plan FILE`: the step by a plan against the step without (`benchmarks.planned_step`), on
this host or, with `--hosts 2xRANKS`, on two that a cable of 1 Gbit/s joins (`benchmarks.hosts`).
With `--storage dynamic`: the step on dynamic tables over the step on dense ones (`benchmarks.dynamic_step`).
"""

from __future__ import annotations

from typing import Any

from benchmarks import dynamic_step, planned_step, wire_step
from benchmarks.command import Options, Report, parse
from benchmarks.contest import Answers, contestants, take_turns
from benchmarks.contestant import Contestant
from benchmarks.measure import median, slowest, summarize
from benchmarks.workload import Workload

MODULE = "benchmarks.ranks.embedding_step"
TRANSPORTS = ("one_sided", "collective")
OURS = [f"rowmesh {transport}" for transport in TRANSPORTS]
ROUNDED = "rowmesh collective, rounded"


def target(workload: Workload, transport: str) -> float | None:
    """How many times faster than the peer's better sharding this case is meant to be."""
    if workload.pooling == 10:
        return {"one_sided": 4.0, "collective": 2.0}[transport]
    if workload.pooling != 1 or workload.global_batch not in (4096, 16384):
        return None
    if transport == "collective":
        return 4.0
    return 7.0 if workload.global_batch == 16384 else {16: 12.0, 64: 10.0, 128: 8.0}.get(workload.dim)


def run_case(options: Options, report: Report, workload: Workload) -> None:
    """One case: rounds in turns, then where the time goes."""
    ours = {name: (MODULE, {"transport": transport}) for name, transport in zip(OURS, TRANSPORTS, strict=True)}
    if options.extra["wire"]:
        ours[ROUNDED] = MODULE, {"transport": "collective", "wire_dtype": options.extra["wire"]}
    with contestants(options, report, workload, ours) as (own, peers):
        rounds = take_turns("round", [*own, *peers], options.repeats)
        floor = floor_of(rounds)
        peer_ms = {peer.name: report_peer(report, workload, peer.name, rounds) for peer in peers}
        if options.extra["wire"]:
            own, rounded = own[:-1], timing(ROUNDED, rounds)
            report.line(**describe(workload, ROUNDED), **rounded, wire_dtype=options.extra["wire"])
            whole = timing(OURS[-1], rounds)["step_ms"]
            report.ratio(f"{workload.name}_collective_rounded", round(whole / rounded["step_ms"], 2))
        for contestant, transport in zip(own, TRANSPORTS, strict=True):
            best = min(peer_ms, key=peer_ms.__getitem__, default=None)
            line = {**timing(contestant.name, rounds), **against_floor(contestant, rounds, floor)}
            ratio = None if best is None else round(peer_ms[best] / line["step_ms"], 2)
            report.line(
                **describe(workload, contestant.name),
                **line,
                peer=best,
                peer_step_ms=best and peer_ms[best],
                ratio=ratio,
                target=target(workload, transport),
            )
            report.ratio(f"{workload.name}_{transport}", ratio)


def describe(workload: Workload, contestant: str) -> dict[str, Any]:
    """What stands at the beginning of a line."""
    return {
        "case": workload.name,
        "contestant": contestant,
        "dim": workload.dim,
        "global_batch": workload.global_batch,
        "pooling": workload.pooling,
        "max_rows": workload.max_rows,
        "zipf": workload.zipf,
    }


def timing(name: str, rounds: Answers) -> dict[str, Any]:
    """Step times over all rounds, with the ping-pong of those rounds (ours measure it, for the peer too)."""
    seconds = [second for answers in rounds[name] for second in slowest(answers, "step")]
    pings = [ping for ours in OURS for answers in rounds[ours] for ping in answers[0]["ping_pong_ns"]]
    ping_pong = {"median": median(pings, 0), "min": round(min(pings)), "max": round(max(pings))}
    return {**summarize(seconds), "ping_pong_ns": ping_pong}


def report_peer(report: Report, workload: Workload, name: str, rounds: Answers) -> float:
    """Reports one sharding of the peer; returns its median."""
    line = timing(name, rounds)
    report.line(**describe(workload, name), **line)
    return line["step_ms"]


def floor_of(rounds: Answers) -> dict[str, Any]:
    """The bytes a rank must move in a step, and how long a copy of as many takes, over all rounds and ranks of ours."""
    answers = [answer for name in OURS for of_round in rounds[name] for answer in of_round]
    parts = {
        name: round(sum(answer["floor_bytes"][name] for answer in answers) / len(answers))
        for name in answers[0]["floor_bytes"]
    }
    floor_ms = median([answer["floor_s"] * 1e3 for answer in answers], 4)
    return {
        "floor_ms": floor_ms,
        "floor_bytes": parts,
        "copy_gb_per_s": round(sum(parts.values()) / floor_ms / 1e6, 1),
    }


def against_floor(contestant: Contestant, rounds: Answers, floor: dict[str, Any]) -> dict[str, Any]:
    """The phases of one of ours, and its distance to the floor."""
    phases = contestant.ask("phases")[0]["phase_ms"]
    total = sum(phases.values())
    shares = {name: round(milliseconds / total, 3) for name, milliseconds in phases.items()}
    step_ms = timing(contestant.name, rounds)["step_ms"]
    return {"phase_ms": phases, "phase_share": shares, **floor, "times_floor": round(step_ms / floor["floor_ms"], 2)}


def main() -> None:
    """Runs every case asked for."""
    defaults = {"dim": [16, 64, 128], "global_batch": [4096, 16384]}
    options = parse((__doc__ or "").splitlines()[0], defaults=defaults, plan="", hosts="", wire="", storage="dense")
    report = Report("embedding_step", options.output)
    if options.extra["wire"] and options.extra["hosts"]:
        wire_step.run(options, report)
        report.finish()
        return
    if options.extra["storage"] == "dynamic":
        dynamic_step.run(options, report)
        report.finish()
        return
    if options.extra["plan"] or options.extra["hosts"]:
        planned_step.run(options, report)
        report.finish()
        return
    for workload in options.workloads:
        run_case(options, report, workload)
    report.finish()


if __name__ == "__main__":
    main()
