"""The costs of a run: the time of a step by stage, bytes between ranks, memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from rowmesh.observe.step_clock import STAGES
from rowmesh.placement.text import bytes_text, share_text
from rowmesh.report.charts import bars
from rowmesh.report.drawing import svg
from rowmesh.report.html import card, data_table, measure, section
from rowmesh.report.line_chart import Line, line_chart
from rowmesh.report.run_record import thinned
from rowmesh.report.shown import Shown, heading_of, side_by_side
from rowmesh.report.timeline import Lane, Span, Timeline
from rowmesh.report.traffic import Traffic

MAX_ROWS = 16
LANE_WIDTH, LANE_HEIGHT = 1000, 16
# Classes of the style sheet by stage: stages that compute, that move rows, that wait.
KINDS = {"compute": "network", "dense": "optimizer", "wait": "waits", "read": "data", "update": "update"}


def time_section(runs: Sequence[Shown]) -> str:
    """Stages of a step, and the timeline of a pipeline."""
    columns = [f"<div>{heading_of(run, runs)}{_stages(run)}</div>" for run in runs if run.record.step_ms]
    lanes = [
        f"{heading_of(run, runs)}{_timeline(run.record.timeline)}" for run in runs if run.record.timeline is not None
    ]
    note = "By the clock of the host, mean of the ranks; a GPU may still compute what the host has begun."
    return section("Where a step's time goes", note if columns else "", side_by_side(columns), *lanes)


def _stages(run: Shown) -> str:
    found = run.record.step_ms
    total = sum(found.values()) or 1.0
    strip = "".join(
        f'<i class="{stage}" style="width:{value / total:.2%}" title="{STAGES[stage]}: {value:.3g} ms"></i>'
        for stage, value in found.items()
    )
    legend = "".join(
        f'<tr><td class="words"><span class="dot {stage}"></span>{escape(STAGES[stage])}</td><td>{value:.3g} ms</td>'
        f"<td>{share_text(value / total)}</td></tr>"
        for stage, value in found.items()
    )
    exposed = run.record.mean("exposed_share")
    below = "" if exposed is None else f'<p class="note">Of the pipeline, {share_text(exposed)} waited for rows.</p>'
    return (
        f'<div class="card"><div class="head"><h3>{total:.3g} ms a step</h3></div><div class="share wide">{strip}</div>'
        f'<table class="stages"><tbody>{legend}</tbody></table>{below}</div>'
    )


def _timeline(timeline: Timeline) -> str:
    first, last = timeline.batches
    shown = len({lane.rank for lane in timeline.lanes})
    more = f" of {timeline.num_ranks}" if shown < timeline.num_ranks else ""
    rows, rank = [], None
    for lane in timeline.lanes:
        if lane.rank != rank:
            rank = lane.rank
            rows.append(f"<h4>rank {rank}</h4>")
        rows.append(_lane(lane, timeline.length_ms))
    names = dict.fromkeys(_kind(span.name) for lane in timeline.lanes for span in lane.spans)
    legend = "".join(f'<span><span class="dot {kind}"></span>{_LEGEND[kind]}</span>' for kind in names)
    title = f"Pipeline: batches {first} to {last}" if first != last else f"Pipeline: batch {first}"
    right = f"{timeline.length_ms:.3g} ms, {shown}{more} rank{'s'[: timeline.num_ranks != 1]}"
    return card(title, f'<div class="lanes">{"".join(rows)}</div><div class="levels">{legend}</div>', right)


_LEGEND = {
    "network": "computes",
    "optimizer": "updates the network",
    "waits": "waits for rows",
    "data": "reads a batch",
    "update": "updates rows",
    "rows": "routes and moves rows and gradients",
}


def _kind(stage: str) -> str:
    return KINDS.get(stage, "rows")


def _lane(lane: Lane, length_ms: float) -> str:
    scale = LANE_WIDTH / length_ms
    parts = [_span(span, scale) for span in lane.spans]
    return f'<div class="lane"><span>{escape(lane.name)}</span>{svg(LANE_WIDTH, LANE_HEIGHT, "", parts, "bars")}</div>'


def _span(span: Span, scale: float) -> str:
    odd, took_ms = " odd" if span.batch % 2 else "", span.end_ms - span.start_ms
    return (
        f'<rect class="span {_kind(span.name)}{odd}" x="{span.start_ms * scale:.1f}" y="0" '
        f'width="{max(took_ms * scale, 0.6):.1f}" height="{LANE_HEIGHT}">'
        f"<title>{escape(span.name)}, batch {span.batch}: {took_ms:.3g} ms</title></rect>"
    )


def traffic_section(runs: Sequence[Shown]) -> str:
    """Bytes between ranks, and what tiers found."""
    columns = [f"<div>{heading_of(run, runs)}{_traffic(run)}</div>" for run in runs if run.record.traffic.groups]
    note = (
        "Requests, rows and gradients that ranks received from others, whether sent or read in shared memory; medians "
        "of all steps. Predicted: by the plan, from the counts of the data, as independent draws."
    )
    return section("Bytes between ranks", note if columns else "", side_by_side(columns))


def _traffic(run: Shown) -> str:
    traffic, predicted = run.record.traffic, run.tables.predicted_bytes
    counted = traffic.bytes_per_step or 0.0
    points = [(float(s), float(b)) for s, b in zip(traffic.steps, traffic.received, strict=True)]
    lines = [Line("counted", thinned(points), run.style, text="")]
    if predicted is not None and points:
        lines.append(
            Line("predicted", [(points[0][0], predicted), (points[-1][0], predicted)], "limit", text="{:,.0f} B")
        )
    ratio = f"{counted / predicted:.3f} × predicted" if predicted else "not predicted"
    chart = card(f"{bytes_text(counted)} a step", line_chart("bytes a step", lines, from_zero=True), ratio)
    steps = max(len(traffic.steps), 1)
    rows = [_traffic_row(traffic, name, steps) for name in (*traffic.groups, *traffic.shared)]
    heads = ["group of tables, a step", "ids", "distinct", "received", "rounds"]
    return f'<div class="beside">{chart}{data_table(heads, rows)}</div>'


def _traffic_row(traffic: Traffic, name: str, steps: int) -> list[str]:
    counts = traffic.groups.get(name) or traffic.shared[name]
    unique = traffic.unique_share(name) if name in traffic.groups else None
    return [
        escape(name).replace("_", "_<wbr>"),
        f"{counts['ids'] / steps:,.0f}" if counts.get("ids") else "",
        "" if unique is None else share_text(unique),
        bytes_text(counts.get("bytes_received", 0) / steps),
        f"{counts.get('all_to_all_rounds', 0) / steps:.3g}",
    ]


def memory_section(runs: Sequence[Shown]) -> str:
    """Memory by rank: what each uses, and what of it is tables and network."""
    columns = [f"<div>{heading_of(run, runs)}{body}</div>" for run in runs if (body := _memory(run))]
    note = "Pages that ranks of a host share count once, in parts. Below, what was laid out at the start."
    return section("Memory by rank", note if columns else "", side_by_side(columns))


def _memory(run: Shown) -> str:
    used, parts = run.record.memory_by_rank, run.record.about.get("memory_bytes") or []
    shown = ""
    if used:
        texts = [bytes_text(value) for value in used]
        shown = f'<div class="card">{measure("used at last", texts, used)}{bars(used, max(used), texts)}</div>'
    return f'<div class="beside">{shown}{_memory_table(parts) if parts else ""}</div>' if used or parts else ""


def _memory_table(parts: Sequence[dict[str, float]]) -> str:
    heads = list(dict.fromkeys(name for rank in parts for name in rank))
    if len(parts) <= MAX_ROWS:
        rows = [[str(rank), *(bytes_text(of.get(name, 0)) for name in heads)] for rank, of in enumerate(parts)]
    else:
        rows = list(_extremes(heads, parts))
    return data_table(["rank", *heads], rows)


def _extremes(heads: Sequence[str], parts: Sequence[dict[str, float]]) -> Iterator[list[str]]:
    for name, pick in (("least", min), ("most", max)):
        yield [name, *(bytes_text(pick(of.get(head, 0) for of in parts)) for head in heads)]
