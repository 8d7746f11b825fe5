"""How many bags of a batch are equal, and what it would save to pool each distinct one once.

    python -m benchmarks.embedding_step --equal-bags --bags mlperf --construction mlperf --dim 64 --global-batch 2048
    python -m benchmarks.embedding_step --equal-bags --events FILE --pooling 30,100 --dim 64 --global-batch 2048

Tables send rows or sums, whichever is fewer bytes. Of a table that sends sums, a rank could ask for each distinct bag
once, and spread its sum over the samples that have it. Gradients travel by sample, each with the number of its bag:
added up before they are sent they would be added in another order. No ranks are started.

Bags are those of the workload or, with `--events FILE`, histories: every event is a sample, with its user, its item and
the `--pooling` items that this user liked last before the visit began. A visit ends where the user pauses for
`PAUSE_S`. Samples of a visit are neighbours in order of time, and are not in a shuffled epoch.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.command import Options, Report
from benchmarks.workload import Workload, make_batches

PAUSE_S = 30 * 60
NO_ID = -1


class Messages(NamedTuple):
    """Bytes that a rank sends and receives of one table in a step, if all rows were at other ranks.

    Attributes:
        forward: ids or slots, and rows or sums.
        backward: gradients.
    """

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Of the step."""
        return self.forward + self.backward


class Ways(NamedTuple):
    """The messages of a table by what travels.

    Attributes:
        rows: distinct rows.
        sums: the sum of every bag.
        distinct_sums: the sum of every distinct bag.
    """

    rows: Messages
    sums: Messages
    distinct_sums: Messages


def ways(bags: np.ndarray, dim: int) -> Ways:
    """What travels of a table for one rank's bags.

    Args:
        bags: int64 `[b, ids a bag]`; `NO_ID` fills bags that have fewer.
        dim: D.

    Example:
        >>> ways(np.array([[1, 2], [1, 2], [3, -1]]), dim=4).sums
        Messages(forward=68, backward=48)
    """
    distinct = np.unique(bags, axis=0)
    vector, num_rows = 4 * dim, len(np.unique(bags[bags != NO_ID]))
    num_ids, num_distinct_ids = (int((each != NO_ID).sum()) for each in (bags, distinct))
    return Ways(
        rows=Messages(num_rows * (4 + vector), num_rows * vector),
        sums=Messages(4 * num_ids + len(bags) * vector, len(bags) * vector),
        distinct_sums=Messages(4 * num_distinct_ids + len(distinct) * vector, len(bags) * (4 + vector)),
    )


def run(options: Options, report: Report) -> None:
    """Every case asked for."""
    for workload in options.workloads:
        if events := options.extra["events"]:
            for order in ("time", "shuffled"):
                batches = visits(Path(events), workload, options.ranks, order == "shuffled")
                _report_case(report, f"{workload.name}_visits_{order}", workload, options.ranks, list(batches))
        else:
            batches = make_batches(workload, 0, options.ranks, workload.num_batches)
            bags = [[bags.numpy() for bags in batch.bags] for batch in batches]
            _report_case(report, workload.name, workload, options.ranks, bags)


def visits(path: Path, workload: Workload, ranks: int, shuffled: bool) -> Iterator[list[np.ndarray]]:
    """Parts of batches that one rank has: histories, users and items; the first half of the events makes histories."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        events = sorted(
            (int(row["time_ms"]) / 1e3, int(row["user_id"]), int(row["video_id"]), row["label"] == "1")
            for row in csv.DictReader(file, delimiter="\t")
        )
    liked: dict[int, list[int]] = defaultdict(list)
    of_visit: dict[int, list[int]] = {}
    last_s: dict[int, float] = {}
    samples = []
    for time_s, user, item, is_liked in events:
        if time_s - last_s.get(user, -np.inf) > PAUSE_S:
            of_visit[user] = liked[user][-workload.pooling :]
        last_s[user] = time_s
        history = of_visit[user]
        samples.append([*history, *[NO_ID] * (workload.pooling - len(history)), user, item])
        if is_liked:
            liked[user].append(item)
    table = np.array(samples[len(samples) // 2 :])
    if shuffled:
        table = np.random.default_rng(workload.seed).permutation(table)
    size = workload.global_batch // ranks
    for first in range(0, len(table) - size + 1, size):
        part = table[first : first + size]
        yield [part[:, :-2], part[:, -2:-1], part[:, -1:]]


def _report_case(report: Report, case: str, workload: Workload, ranks: int, batches: list[list[np.ndarray]]) -> None:
    """One line: distinct bags, and bytes of a rank's messages by what travels, the mean over batches."""
    tables = [[ways(bags, workload.dim) for bags in of_table] for of_table in zip(*batches, strict=True)]
    share = (ranks - 1) / ranks / len(batches)
    totals: dict[str, np.ndarray] = {name: np.zeros(2) for name in ("rows", "sums", "fewer", "fewer_distinct")}
    num_sums = 0
    for of_table in tables:
        rows, sums, distinct = (share * np.array(each).sum(0) for each in zip(*of_table, strict=True))
        fewer = min(rows, sums, key=np.sum)
        num_sums += fewer is sums
        for name, added in zip(totals, (rows, sums, fewer, min(fewer, distinct, key=np.sum)), strict=True):
            totals[name] += added
    multi_hot = [bags for batch in batches for bags in batch if bags.shape[1] > 1]
    distinct_share = sum(len(np.unique(bags, axis=0)) for bags in multi_hot) / max(sum(map(len, multi_hot)), 1)
    saved = totals["fewer"] / totals["fewer_distinct"]
    step = totals["fewer"].sum() / totals["fewer_distinct"].sum()
    report.line(
        case=case,
        dim=workload.dim,
        samples_a_rank=workload.global_batch // ranks,
        ranks=ranks,
        **workload.bags_record,
        distinct_bags=round(distinct_share, 3),
        tables_that_send_sums=num_sums,
        bytes={name: round(of.sum()) for name, of in totals.items()},
        forward_bytes={name: round(of[0]) for name, of in totals.items()},
    )
    report.ratio(f"{case}: forward bytes", round(saved[0], 2))
    report.ratio(f"{case}: bytes of the step", round(step, 2))
