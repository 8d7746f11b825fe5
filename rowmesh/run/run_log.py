"""Everything a run writes while it trains: metrics, counters, progress, trackers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rowmesh._support.files.secrets import masked_values
from rowmesh._support.json_lines import JsonLines, utc_text
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.observe.counters import CounterLog, Source
from rowmesh.observe.progress import Progress
from rowmesh.observe.trackers import TrackedRun, Trackers
from rowmesh.observe.trackers.prometheus import PrometheusFile
from rowmesh.run.job import Job
from rowmesh.run.run_folder import RunFolder

ALL_GROUPS = "all groups"
"""In `counters.jsonl`: what the messages moved that serve all groups at once."""


REPLICAS = "replicas"
"""And beside a group's name: what keeping its replicas together moved."""
PROGRESSIVE = "progressive"
"""In `metrics.jsonl`: of a window of training steps."""
FAST_MEMORY = "fast memory"
"""And of a tiered group: what batches found there, what was read, and what was written back."""
DYNAMIC = "dynamic table"
"""And beside a table's name: how many distinct ids its owners knew, admitted, evicted, or did not admit."""
_OF_DYNAMIC = f", {DYNAMIC}"
_DYNAMIC = ("hits", "admitted", "evicted", "guests", "dropped", "promoted", "forgotten")
_TIER = ("rows_found", "rows_forwarded", "rows_read", "bytes_read", "rows_initialized", "rows_written", "bytes_written")


class RunLog:
    """Writes on rank 0; on other ranks only the collectives of `flush` happen.

    Records that cannot be written (a full disk) are counted and reported, and end no run: see
    `rowmesh._support.records`.

    Args:
        job: what is trained.
        run: where to write.
        progress: shows how far the run is.
        after: the step that the run goes on from; 0: it begins.
    """

    def __init__(self, job: Job, run: RunFolder, progress: Progress, after: int = 0) -> None:
        first = job.mesh.rank == 0
        self._open = ExitStack()
        self.progress = self._open.enter_context(progress)
        log = self.progress.write
        self._metrics = self._open.enter_context(JsonLines(run.metrics if first else None, log, goes_on=after > 0))
        self._lines = self._open.enter_context(JsonLines(run.counters if first else None, log, goes_on=after > 0))
        self._counters = CounterLog(_sources(job.embeddings), self._lines, job.mesh.group)
        self._decided: dict[str, dict[str, int]] = {}  # of dynamic tables, by all ranks, since the last interval
        self._trackers = self._open.enter_context(closing(_trackers(job, run, log, after))) if first else None

    def step(self, step: int) -> None:
        """Notes the counters of a step, and moves the progress."""
        self._counters.record(step)
        self.progress.advance(step)

    def interval(self, step: int, *, loss: float, samples_per_s: float, memory_bytes: int, **record: Any) -> None:
        """Writes the means of an interval that ends with `step`. Collective: every rank calls it.

        Lists go into `metrics.jsonl` alone.
        """
        self._flush()
        hit_rate = _hit_rate(self._decided)
        self._decided.clear()
        facts = {"loss": loss, "samples_per_s": samples_per_s, "memory_bytes": memory_bytes}
        more = {} if hit_rate is None else {"hit_rate": hit_rate}
        self._write("train", step, {**facts, **record, **more})
        self.progress.update(step, exposed_share=record.get("exposed_share"), **more, **facts)

    def evaluation(self, step: int, split: str, record: dict[str, Any]) -> None:
        """Writes the metrics of a split after `step`, and leaves its look-ups out of the counters."""
        self._counters.skip()
        self._write(split, step, record)

    def window(self, step: int, record: dict[str, Any]) -> None:
        """Writes the metrics of a window of steps that ends with `step`, predicted before they were trained on."""
        self._write(PROGRESSIVE, step, record)

    def sync(self) -> None:
        """Has all that was noted so far on disk. Collective: every rank calls it."""
        self._flush()
        self._metrics.sync()
        self._lines.sync()

    def skip(self) -> None:
        """Leaves what happened since the last step, a checkpoint say, out of the counters."""
        self._counters.skip()

    def state_dict(self) -> dict[str, dict[str, int]]:
        """The sums for the next interval as of the last `sync`; the same on all ranks."""
        return {name: dict(fields) for name, fields in self._decided.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Goes on with an interval."""
        self._decided = {name: dict(fields) for name, fields in state.items()}

    def _flush(self) -> None:
        """Writes counters, which may happen within an interval."""
        for name, fields in self._counters.flush().items():
            if name.endswith(_OF_DYNAMIC):
                before = self._decided.get(name, {})
                self._decided[name] = {field: before.get(field, 0) + added for field, added in fields.items()}

    def _write(self, kind: str, step: int, record: dict[str, Any]) -> None:
        self._metrics.write(time=utc_text(), kind=kind, step=step, **record)
        if self._trackers is not None:
            numbers = {
                name.replace("@", "_at_"): value  # which some trackers refuse
                for name, value in record.items()
                if isinstance(value, int | float) and math.isfinite(value)
            }
            self._trackers.write(kind, step, numbers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def _trackers(job: Job, run: RunFolder, log: Callable[[str], None], after: int) -> Trackers:
    """The configured trackers, under the folder's own name, wherever the run writes until it is done."""
    wanted, named = job.config.run, Path(job.config.run.folder).name
    more = {}
    if wanted.prometheus_file:
        more["prometheus_file"] = lambda run: PrometheusFile(Path(wanted.prometheus_file), run)
    tracked = TrackedRun(run.path, named, masked_values(job.config.model_dump()), log, run.id, after)
    return Trackers(tracked, wanted.trackers, more)


def _sources(embeddings: EmbeddingCollection) -> list[Source]:
    """All that is counted of some tables."""
    names, counters = [group.name for group in embeddings.groups], embeddings.counters
    found = [Source(name, each) for name, each in zip(names, counters, strict=True)]
    if "collective" in embeddings.transport:  # under the others no message serves all groups
        found.append(Source(ALL_GROUPS, embeddings.common_counters))
    if embeddings.plan.is_replicated:
        pairs = zip(names, counters, strict=True)
        found += [Source(f"{name}, {REPLICAS}", each.synchronization) for name, each in pairs]
    dynamic = embeddings.reported_dynamic_counters.items()
    found += [Source(f"{name}{_OF_DYNAMIC}", each, _DYNAMIC) for name, each in dynamic]
    tiers = embeddings.tier_counters.items()
    return found + [Source(f"{name}, {FAST_MEMORY}", each, _TIER) for name, each in tiers]


def _hit_rate(added: Mapping[str, Mapping[str, int]]) -> float | None:
    """The share of ids that dynamic tables knew already; None where there are no ids of such."""
    tables = [fields for name, fields in added.items() if name.endswith(_OF_DYNAMIC)]
    hits = sum(fields["hits"] for fields in tables)
    total = hits + sum(fields["admitted"] + fields["guests"] + fields["promoted"] for fields in tables)
    return hits / total if total else None
