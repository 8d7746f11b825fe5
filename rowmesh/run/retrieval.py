"""Retrieval: two towers, trained by the softmax over the items of a batch, and judged by how they rank items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rowmesh._support.faults import reach
from rowmesh.collection.outputs import Embeddings
from rowmesh.data import Batch
from rowmesh.errors import DataError
from rowmesh.mesh import Mesh
from rowmesh.models import TwoTower
from rowmesh.ops.transfer import upload
from rowmesh.run.checks import check_batch, naming_lost_peers
from rowmesh.run.config import Config
from rowmesh.run.job import Job
from rowmesh.run.precision import computing_in
from rowmesh.run.sequence.evaluation import RankingEvaluation
from rowmesh.run.sequence.exchange import RowShares, total
from rowmesh.run.sequence.ranking import rank_targets
from rowmesh.run.sequence.ranking_metrics import RankingMetrics
from rowmesh.sparse import SparseBatch


def problems(config: Config) -> Iterator[str]:
    """Keys that mean nothing for the softmax over the items of a batch, or that cannot be with it."""
    defaults = type(config.train)()
    if (given := config.pipeline.micro_batches) != 1:
        yield (
            f"pipeline.micro_batches={given!r} cannot be: the softmax is over all items of a batch, and a micro-batch "
            "has some of them; pipeline.depth hides communication, too"
        )
    if config.train.device != "cpu":
        yield f"train.device={config.train.device!r} cannot be yet; leave it out"
    if config.parallel.synchronization != "exact":
        yield (
            "parallel.synchronization='average' cannot be: the negatives of a replica would be rows of the others; "
            "give exact"
        )
    for key in ("loss", "loss_weights", "progressive_every"):
        if getattr(config.train, key) != getattr(defaults, key):
            yield f"train.{key} is of predicted labels and cannot be given"


def two_tower(job: Job) -> TwoTower:
    """The network, which is one."""
    assert isinstance(job.network, TwoTower)
    return job.network


def towers(job: Job, batch: Batch, embeddings: Embeddings) -> tuple[Tensor, Tensor]:
    """Vectors of the queries and of the items of this rank's samples, both `[B, W]`."""
    dtype = embeddings.dtype
    dense = upload(batch.dense, embeddings.device).to(dtype)
    with job.linear(), computing_in(job.config.train.precision):
        queries, items = two_tower(job).towers(dense, embeddings)
    return queries.to(dtype), items.to(dtype)


def item_ids(batch: SparseBatch, feature: str) -> Tensor:
    """int64 `[B]`: the item of every sample.

    Raises:
        DataError: a sample has not exactly one.

    >>> item_ids(SparseBatch.from_bags({"user": [[1, 2], []], "item": [[7], [9]]}), "item").tolist()
    [7, 9]
    """
    place = batch.features.index(feature)
    first, end = batch.feature_range(place)
    counts = batch.offsets[place * batch.batch_size : (place + 1) * batch.batch_size + 1].diff()
    if bool((counts != 1).any()):
        sample = int((counts != 1).nonzero()[0])
        raise DataError(
            f"sample {sample} of a batch has {int(counts[sample])} ids of {feature!r}, the first of "
            "model.options.item, which is the item's id and must be one; name a feature of one id first"
        )
    return batch.ids[first:end]


def check_rewards(batch: Batch, where: str) -> None:
    """Raises DataError where a label is below 0: labels are weights of samples."""
    if bool((wrong := batch.labels < 0).any()):
        position = int(wrong.nonzero()[0])
        raise DataError(
            f"{where}: {int(wrong.sum())} of {len(batch.labels)} labels are below 0, the first of them "
            f"{batch.labels[position].item()}; with model.options.loss = 'in_batch_softmax' a label is the weight of "
            "its sample, 0 of one that is no success"
        )


def softmax_total(job: Job, batch: Batch, embeddings: Embeddings) -> Tensor:
    """Σ of weight · label · loss over this rank's samples. Collective, and so is its backward."""
    queries, items = towers(job, batch, embeddings)
    network = two_tower(job)
    assert network.softmax is not None
    losses = network.softmax(queries, items, item_ids(batch.sparse, network.item[0]))
    weights = batch.labels if batch.weights is None else batch.labels * batch.weights
    return (weights.to(losses.dtype) * losses).sum()


@dataclass(frozen=True, eq=False)
class SplitItems:
    """The distinct items of a split, of which each rank has a part.

    Attributes:
        ids: int64 `[M]`, rising; the same on every rank.
        places: int64 `[M]`, where each stands among the parts of all ranks.
        vectors: `[M_r, W]`, of this rank's part.
        first: the place of its first one.
    """

    ids: Tensor
    places: Tensor
    vectors: Tensor
    first: int

    def of(self, ids: Tensor) -> Tensor:
        """The places of items of the split."""
        return self.places[torch.searchsorted(self.ids, ids)]


class _Collector:
    """Collects the items of a split in the order of its samples, the n-th of them on rank n mod W.

    Every rank sees the items of all, so that the vector of an item is that of its first sample on any number of ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._ids, self._numbers = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        self._vectors: list[Tensor] = []

    def add(self, ids: Tensor, vectors: Tensor) -> None:
        """Takes the items of a batch. Collective; moves `B (W + 1)` numbers to every rank."""
        rows = RowShares.of(self._mesh, len(ids))
        ids, vectors = rows.gather(ids), rows.gather(vectors)
        distinct, inverse = ids.unique(return_inverse=True)
        firsts = torch.full((len(distinct),), len(ids)).scatter_reduce_(0, inverse, torch.arange(len(ids)), "amin")
        firsts = firsts[~torch.isin(distinct, self._ids)].sort().values
        numbers = torch.arange(len(firsts)) + len(self._ids)
        mine = firsts[numbers % self._mesh.world_size == self._mesh.rank]
        self._vectors.append(vectors[mine])
        self._ids, order = torch.cat([self._ids, ids[firsts]]).sort()
        self._numbers = torch.cat([self._numbers, numbers])[order]

    def items(self) -> SplitItems:
        """The items that were collected."""
        ranks, count = self._mesh.world_size, len(self._ids)
        begins = torch.tensor([0, *((count - rank + ranks - 1) // ranks for rank in range(ranks))]).cumsum(0)
        places = begins[self._numbers % ranks] + self._numbers // ranks
        return SplitItems(self._ids, places, torch.cat(self._vectors), int(begins[self._mesh.rank]))


def evaluate_retrieval(
    job: Job, split: str, batches: Callable[[], Iterable[Batch]], on_batch: Callable[[int], None] = lambda number: None
) -> RankingEvaluation:
    """Ranks the distinct items of a split for every sample of it that has a label above 0.

    Collective and blocking: every rank calls it, and gets the same. It goes through the split twice: for the vectors of
    the items, `M W / ranks` numbers on each rank, and for those of the queries.

    Args:
        job: what to evaluate.
        split: its name, for messages.
        batches: gives those of this rank, from the first on.
        on_batch: called after each batch that was ranked, with the number of batches done.

    Raises:
        DataError: no sample has a label above 0, or one has not exactly one item.
        RowmeshError: vectors are not finite.
        PeerError: a rank died, or did not come within the mesh's timeout.
    """
    doing, mesh, item = f"evaluating {split}", job.mesh, two_tower(job).item[0]
    metrics, collector = RankingMetrics(), _Collector(job.mesh)
    job.embeddings.synchronize()
    was_training = job.network.training
    job.network.eval()
    with torch.no_grad(), naming_lost_peers(mesh, doing):
        for number, batch in enumerate(batches()):
            check_batch(batch, job.schema, f"{split} batch {number} on rank {mesh.rank}")
            collector.add(item_ids(batch.sparse, item), towers(job, batch, job.embeddings(batch.sparse))[1])
        items, count = collector.items(), torch.zeros(1, dtype=torch.int64)
        for number, batch in enumerate(batches()):
            reach("evaluate.batch")
            queries, _ = towers(job, batch, job.embeddings(batch.sparse))
            chosen = batch.labels > 0
            targets = items.of(item_ids(batch.sparse, item)[chosen])
            metrics.add(rank_targets(mesh, queries[chosen], targets, items.vectors, items.first))
            count += len(targets)
            on_batch(number + 1)
        means, num_samples = metrics.compute(mesh), int(total(mesh, count))
    job.network.train(was_training)
    if not num_samples:
        raise DataError(f"{split}: no sample has a label above 0, so there is no item to be found")
    return RankingEvaluation({}, 1.0 - means["ndcg@10"].value, num_samples, len(items.ids), means)


def trained_row(evaluation: RankingEvaluation) -> tuple[str, Mapping[str, float]]:
    """The metrics of the trained model, as a row of `ranking_table`."""
    return "trained", {name: mean.value for name, mean in evaluation.means.items()}
