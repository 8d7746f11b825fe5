"""The sparse part of a training step: forward, backward and update of 26 tables, against TorchRec.

    python -m benchmarks.embedding_step --dim 16,64,128 --global-batch 4096,16384 --peer-python PEER/bin/python
    python -m benchmarks.embedding_step --dim 64 --global-batch 4096,16384 --pooling 10 --peer-python PEER/bin/python
    python -m benchmarks.embedding_step --bags mlperf --dim 64,128 --global-batch 2048 --peer-python PEER/bin/python
    python -m benchmarks.embedding_step --bags mlperf --hosts 2 --rate 500mbit --dim 64 --peer-python PEER/bin/python
    python -m benchmarks.embedding_step --wire bfloat16 --dim 64,128
    python -m benchmarks.embedding_step --wire bfloat16 --hosts 2x1 --dim 16,64,128 --global-batch 4096
    python -m benchmarks.embedding_step --plan cyclic --dim 16,64 --global-batch 4096,16384
    python -m benchmarks.embedding_step --storage dynamic --dim 16,64 --global-batch 4096,16384
    python -m benchmarks.embedding_step --plan cyclic --hosts 2x2 --dim 16,64 --global-batch 4096,16384
    python -m benchmarks.embedding_step --equal-bags --bags mlperf --construction mlperf --dim 64 --global-batch 2048
    python -m benchmarks.embedding_step --equal-bags --events FILE --pooling 30,100 --dim 64 --global-batch 2048

Both transports, beside TorchRec's table-wise and row-wise sharding; the phases of a step, and its distance to a floor.
With `--bags mlperf` tables and bags of MLPerf's DLRM-DCNv2, 214 ids a sample, or those of a JSON file; with
`--construction mlperf` the first id of a bag decides the others, as in MLPerf's data.
With `--hosts 2 --rate R`: by messages alone, between two hosts that a cable of this speed joins.
With `--send rows,sums,auto`: over messages once for each (`benchmarks.sending`); the summary has rows over the others.
With `--wire bfloat16` also messages with rounded rows and gradients, and those without over these in the summary; and
with `--hosts`, these two alone, between two hosts by the speed of their cable (`benchmarks.wire_step`).
With `--plan STRATEGY` or `--plan FILE`: the step by a plan against the step without (`benchmarks.planned_step`), on
this host or, with `--hosts 2xRANKS`, on two that a cable of 1 Gbit/s joins (`benchmarks.hosts`).
With `--storage dynamic`: the step on dynamic tables over the step on dense ones (`benchmarks.dynamic_step`).
With `--equal-bags`: how many bags are equal, and what that could save (`benchmarks.equal_bags`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import dynamic_step, equal_bags, planned_step, sending, wire_step
from benchmarks.command import Options, Report, parse
from benchmarks.contest import contestants, joined, take_turns
from benchmarks.contestant import Contestant
from benchmarks.hosts import Hosts, HostsError
from benchmarks.measure import median, slowest, summarize
from benchmarks.workload import Workload

MODULE = "benchmarks.ranks.embedding_step"
WHOLE, ROUNDED = "rowmesh collective", "rowmesh collective, rounded"


def target(workload: Workload, transport: str) -> float | None:
    """How many times faster than the peer's better sharding this case is meant to be."""
    if workload.bags == "mlperf":
        return {"one_sided": {64: 4.0, 128: 5.0}, "collective": {64: 2.0, 128: 2.5}}[transport].get(workload.dim)
    if workload.pooling in (30, 100):
        return {"one_sided": 3.0, "collective": 1.6}[transport]
    if workload.pooling == 10:
        return {"one_sided": 4.0, "collective": 2.0}[transport]
    if workload.pooling != 1 or workload.global_batch not in (4096, 16384):
        return None
    if transport == "collective":
        return 4.0
    return 7.0 if workload.global_batch == 16384 else {16: 12.0, 64: 10.0, 128: 8.0}.get(workload.dim)


def run_case(options: Options, report: Report, workload: Workload, hosts: Hosts | None) -> None:
    """One case: rounds in turns, then where the time goes."""
    ours = sending.ours(options, workload, hosts, MODULE)
    if options.extra["wire"]:
        ours[ROUNDED] = MODULE, {"transport": "collective", "wire_dtype": options.extra["wire"]}
    cable = {} if hosts is None else {"hosts": options.extra["hosts"], "rate": options.extra["rate"]}
    about = describe(workload) | cable
    case = "_".join([workload.name, *cable.values()])
    with contestants(options, report, workload, ours, hosts) as (own, peers):
        rounds = take_turns("round", [*own, *peers], options.repeats, hosts)
        answers = {each.name: [answer for answers in rounds[each.name] for answer in answers] for each in own}
        pings = [ping for of_one in answers.values() for answer in of_one for ping in answer["ping_pong_ns"]]
        times = {name: timing(workload, rounds[name], pings) for name in rounds}
        # Which rows a step reads is known where no table sends sums.
        of_rows = [answer for name in answers if "sums" not in ours[name][1] for answer in answers[name]]
        floor = floor_of(of_rows) if of_rows else {}
        for peer in peers:
            report.line(case=case, contestant=peer.name, **about, **times[peer.name])
        best = min((peer.name for peer in peers), key=lambda name: times[name]["step_ms"], default=None)
        for contestant in own:
            name, settings = contestant.name, ours[contestant.name][1]
            step_ms = times[name]["step_ms"]
            peer_ms = None if best is None else times[best]["step_ms"]
            ratio = None if peer_ms is None else round(peer_ms / step_ms, 2)
            report.line(
                case=case,
                contestant=name,
                **about,
                **times[name],
                **phases_of(contestant),
                **floor,
                times_floor=round(step_ms / floor["floor_ms"], 2) if floor else None,
                peer=best,
                peer_step_ms=peer_ms,
                ratio=ratio,
                target=target(workload, settings["transport"]) if hosts is None else None,
                **{key: settings[key] for key in ("wire_dtype", "sums") if key in settings},
            )
            report.ratio(f"{case}_{sending.short_name(name)}", ratio)
        for name in [name for name in ours if WHOLE in ours and name.startswith(f"{WHOLE}, ")]:
            ratio = round(times[WHOLE]["step_ms"] / times[name]["step_ms"], 2)
            report.ratio(f"{case}_rows_over_{sending.short_name(name)}", ratio)


def describe(workload: Workload) -> dict[str, Any]:
    """What lines say of the workload."""
    return {
        "dim": workload.dim,
        "global_batch": workload.global_batch,
        **workload.bags_record,
        "max_rows": workload.max_rows,
        "zipf": workload.zipf,
    }


def timing(workload: Workload, rounds: list[list[dict[str, Any]]], pings: Sequence[float]) -> dict[str, Any]:
    """Step times over all rounds, with the ping-pong of those rounds (ours measure it, for the peer too), and bytes."""
    line: dict[str, Any] = summarize([second for answers in rounds for second in slowest(answers, "step")])
    if pings:
        line["ping_pong_ns"] = {"median": median(pings, 0), "min": round(min(pings)), "max": round(max(pings))}
    ranks = [answer for answers in rounds for answer in answers]
    if "received_bytes" in ranks[0]:
        line["received_bytes"] = round(max(answer["received_bytes"] for answer in ranks))
    if "cable_bytes" in ranks[0]:
        steps = workload.warmup + workload.steps
        line["cable_bytes"] = round(median([answer["cable_bytes"] / steps for answer in ranks], 0))
    return line


def floor_of(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The bytes a rank must move in a step, and how long a copy of as many takes, over all rounds and ranks of ours."""
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


def phases_of(contestant: Contestant) -> dict[str, Any]:
    """The phases of a step of ours, and their shares."""
    phases = contestant.ask("phases")[0]["phase_ms"]
    total = sum(phases.values())
    return {"phase_ms": phases, "phase_share": {name: round(ms / total, 3) for name, ms in phases.items()}}


def main() -> None:
    """Runs every case asked for."""
    defaults = {"dim": [16, 64, 128], "global_batch": [4096, 16384]}
    options = parse(
        (__doc__ or "").splitlines()[0],
        defaults=defaults,
        plan="",
        hosts="",
        rate="",
        send="rows",
        wire="",
        storage="dense",
        bags="",
        construction="drawn",
        equal_bags=False,
        events="",
    )
    report = Report("embedding_step", options.output)
    if options.extra["equal_bags"]:
        equal_bags.run(options, report)
        report.finish()
        return
    if options.extra["wire"] and options.extra["hosts"] and not options.extra["rate"]:
        wire_step.run(options, report)
        report.finish()
        return
    if options.extra["storage"] == "dynamic":
        dynamic_step.run(options, report)
        report.finish()
        return
    if options.extra["plan"] or (options.extra["hosts"] and not options.extra["rate"]):
        planned_step.run(options, report)
        report.finish()
        return
    try:
        with joined(options) as (options, hosts):
            for workload in options.workloads:
                run_case(options, report, workload, hosts)
    except HostsError as error:
        raise SystemExit(f"embedding_step: {error}") from error
    report.finish()


if __name__ == "__main__":
    main()
