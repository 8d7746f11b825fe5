"""RankingEvaluation: where the items that came stand among all, over sharded tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowmesh._support.faults import reach
from rowmesh.data.events import SequenceLoader, Sequences
from rowmesh.data.events.batch import SequenceBatch, spans
from rowmesh.data.events.sequences import SplitName
from rowmesh.run.checks import naming_lost_peers
from rowmesh.run.evaluation import Evaluation
from rowmesh.run.job import Job
from rowmesh.run.sequence.batches import events_alone, items_alone
from rowmesh.run.sequence.candidates import Candidates
from rowmesh.run.sequence.data import ITEM, SCORED
from rowmesh.run.sequence.options import SequenceOptions
from rowmesh.run.sequence.ranking import Seen, rank_targets
from rowmesh.run.sequence.ranking_metrics import Mean, RankingMetrics
from rowmesh.run.sequence.sharded_softmax import item_range

USERS = 1024
"""Users of a batch of an evaluation, over all ranks."""
SHOWN = ("hr@10", "ndcg@10", "hr@50", "ndcg@50", "mrr")


@dataclass(frozen=True)
class RankingEvaluation(Evaluation):
    """How well a model ranks the item that came.

    Attributes:
        users: of whom something was predicted; samples, where a sample is a user's request.
        candidates: items that were ranked: all, those that a dynamic table knows, or those of a split.
        means: `hr@K`, `ndcg@K`, `mrr`, and `tied`, the share of targets that tie.
        floor: the same of a ranking by popularity; empty where that was not asked for.
    """

    users: int = 0
    candidates: int = 0
    means: Mapping[str, Mean] = field(default_factory=dict)
    floor: Mapping[str, Mean] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Users."""
        return self.users

    @property
    def text(self) -> str:
        """The most telling numbers, in a line."""
        return f"NDCG@10 {self.means['ndcg@10'].value:.5f}, HR@10 {self.means['hr@10'].value:.5f}"

    def as_record(self) -> dict[str, Any]:
        """Every mean; `loss` is 1 − NDCG@10."""
        return {"samples": self.users, "loss": self.loss, **{name: mean.value for name, mean in self.means.items()}}

    def as_file(self) -> dict[str, Any]:
        """The same with 95 % intervals over users, and what popularity reaches."""
        intervals = {name: list(mean.interval) for name, mean in self.means.items()}
        floor = {name: mean.value for name, mean in self.floor.items()}
        return {**self.as_record(), "intervals": intervals, **({"popularity": floor} if floor else {})}


def ranking_table(title: str, rows: Iterable[tuple[str, Mapping[str, float]]]) -> list[str]:
    """The most telling means of several rankings, below a title."""
    header = f"{'':<18}" + "".join(f"{name.upper():>12}" for name in SHOWN)
    return [title, header, *(f"  {name:<16}" + "".join(f"{of[key]:>12.5f}" for key in SHOWN) for name, of in rows)]


def evaluate_ranking(
    job: Job,
    data: Sequences,
    split: SplitName,
    options: SequenceOptions,
    on_batch: Callable[[int], None] = lambda number: None,
    *,
    with_floor: bool = False,
) -> RankingEvaluation:
    """Ranks all items for every user of a split. Collective and blocking: every rank calls it, and gets the same.

    Where the items' table is dynamic, the ids that it knows are ranked, and any other target stands after them.

    Every rank holds its part of all items, `M D / W` numbers.

    Raises:
        RowmeshError: vectors are not finite.
        PeerError: a rank died, or did not come within the mesh's timeout.
    """
    mesh, doing = job.mesh, f"evaluating {split}"
    metrics, floor = RankingMetrics(options.ties), RankingMetrics(options.ties)
    loader = _loader(job, data, split, options)
    counts = torch.from_numpy(data.popularity(split)).float()[:, None]
    part = item_range(data.num_items, mesh.rank, mesh.world_size)  # of popularity
    job.embeddings.synchronize()
    was_training = job.network.training
    job.network.eval()
    with torch.no_grad(), naming_lost_peers(mesh, doing):
        candidates = Candidates.of(job, data.num_items)
        items = vectors_of(job, candidates.ids[candidates.slice(mesh)], options)
        for number, batch in enumerate(loader):
            reach("evaluate.batch")
            last = batch.offsets[1:] - 1
            queries, targets = queries_of(job, batch, options)[last], batch.targets[last]
            seen = seen_by(data, batch.users.numpy(), split) if options.seen == "remove" else None
            metrics.add(candidates.rank(mesh, queries, targets, items, seen))
            if with_floor:
                ones = torch.ones(len(targets), 1)
                numbers, seen = _numbers(data, targets), seen and replace(seen, items=_numbers(data, seen.items))
                floor.add(rank_targets(mesh, ones, numbers, counts[part.start : part.stop], part.start, seen))
            on_batch(number + 1)
        means = metrics.compute(mesh)
        floors = floor.compute(mesh) if with_floor else {}
    job.network.train(was_training)
    return RankingEvaluation({}, 1.0 - means["ndcg@10"].value, loader.num_users, len(candidates), means, floors)


def queries_of(job: Job, batch: SequenceBatch, options: SequenceOptions) -> Tensor:
    """`[N, D]`, what the network gives after each event. Collective: every rank looks its events up."""
    names = [name for table in job.embeddings.tables for name in table.features if name not in (ITEM, SCORED)]
    side = []
    found = job.embeddings(events_alone(batch, names), features=(ITEM, *names))
    for name in names:  # a value that the training did not have adds nothing
        side.append(found[name].values.masked_fill((batch.side[name] < 0)[:, None], 0.0))
    with job.linear():
        queries = job.network(found[ITEM].values, batch.offsets, batch.times, batch.request_times, side)
    return torch.nn.functional.normalize(queries, dim=-1) if options.is_cosine else queries


def vectors_of(job: Job, items: Tensor, options: SequenceOptions) -> Tensor:
    """`[len(items), D]`, to be compared with queries. Collective."""
    vectors = job.embeddings(items_alone(items), features=(SCORED,))[SCORED].values
    return torch.nn.functional.normalize(vectors, dim=-1) if options.is_cosine else vectors


def seen_by(data: Sequences, users: np.ndarray, split: SplitName) -> Seen:
    """All that users did before what a split predicts, also what is too long ago to be read."""
    events, offsets = spans(data.offsets[:-1][users], data.targets(split)[users])
    return Seen(torch.from_numpy(offsets), torch.from_numpy(data.item_ids(data.items[events])))


def _numbers(data: Sequences, ids: Tensor) -> Tensor:
    return torch.from_numpy(data.item_numbers(ids.numpy()))


def _loader(job: Job, data: Sequences, split: SplitName, options: SequenceOptions) -> SequenceLoader:
    return SequenceLoader(
        data,
        split,
        batch_size=USERS,
        max_length=options.max_length,
        rank=job.mesh.rank,
        world_size=job.mesh.world_size,
    )
