"""Trace: what every thread of every rank did when, as Chrome-trace JSON, which Perfetto opens.

A process is a rank, a thread a resource; arrows follow a batch from one of its stages to the next.

Format: "Trace Event Format", the JSON array of complete events (`X`), flow events (`s`, `t`, `f`) and metadata (`M`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rowmesh._support.files.atomic import write_text


class Event(NamedTuple):
    """One thing that a thread did.

    Attributes:
        name: what.
        thread: which.
        batch: of which batch.
        part: of which of its micro-batches.
        start_s, end_s: when, by one clock for all ranks.
    """

    name: str
    thread: str
    batch: int
    part: int
    start_s: float
    end_s: float


def trace_events(ranks: Sequence[Iterable[Event]]) -> list[dict[str, Any]]:
    """The events of all ranks, in the order of the ranks.

    Example:
        >>> trace_events([[Event("rows", "rows", 3, 0, 1.0, 1.5)]])[-1]["dur"]
        500000.0
    """
    everyone = [sorted(events, key=lambda event: event.start_s) for events in ranks]
    begin = min((events[0].start_s for events in everyone if events), default=0.0)
    found: list[dict[str, Any]] = []
    for rank, events in enumerate(everyone):
        threads = {name: number for number, name in enumerate(dict.fromkeys(event.thread for event in events))}
        found.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for name, number in threads.items():
            found.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}})
        seen: set[int] = set()
        for event in events:
            where = {"pid": rank, "tid": threads[event.thread], "ts": (event.start_s - begin) * 1e6}
            # An arrow binds to the slice that is open at its time: it is put where the slice begins.
            flow = {"cat": "batch", "name": "batch", "id": f"{rank}.{event.batch}", "bp": "e"}
            found.append({"ph": "t" if event.batch in seen else "s", **flow, **where})
            seen.add(event.batch)
            about = {"batch": event.batch, "micro-batch": event.part}
            found.append(
                {"ph": "X", "name": event.name, "args": about, "dur": (event.end_s - event.start_s) * 1e6, **where}
            )
    return found


def write_trace(path: Path, ranks: Sequence[Iterable[Event]]) -> None:
    """Writes the trace of all ranks, whole or not at all."""
    write_text(path, json.dumps({"traceEvents": trace_events(ranks), "displayTimeUnit": "ms"}) + "\n")
