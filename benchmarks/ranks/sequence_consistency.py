"""One rank of a whole training of FuXi, in one of the ways that `benchmarks.sequence_consistency` compares."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.ranks.setup import serve
from benchmarks.workload import Workload
from rowmesh import Adam, EmbeddingCollection, EmbeddingOptimizer, Mesh, Pipeline, SparseBatch, TableSpec
from rowmesh.collection.outputs import Embeddings
from rowmesh.data.events import SequenceLoader, Sequences
from rowmesh.data.events.batch import SequenceBatch, spans
from rowmesh.data.events.sequences import SplitName
from rowmesh.exchange.transports import TransportName
from rowmesh.models.sequence import SequenceEncoder
from rowmesh.models.sequence.losses import cosine, sampled_softmax
from rowmesh.run.gradients import SharedGradients
from rowmesh.run.sequence.exchange import RowShares, total
from rowmesh.run.sequence.ranking import Seen, rank_targets
from rowmesh.run.sequence.ranking_metrics import RankingMetrics
from rowmesh.run.sequence.sharded_softmax import item_range
from rowmesh.tables import Normal

FEATURES = ("clicked", "following", "negative")
TEMPERATURE = 0.05
Lookup = tuple[Tensor, Tensor, Tensor]  # the vectors of each feature


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained; the same in every way.

    Attributes:
        folder: of the prepared events.
        dtype: "float64" or "float32", of rows and network.
        dim, blocks, heads, max_length: of FuXi-α.
        batch_size: users of a step, over all ranks.
        epochs: over the users.
        negatives: items that a user's targets are compared with, drawn for each user and step.
        lr: of Adam, of rows and of the network.
        evaluate_every: steps between two evaluations of the test split.
        seed: of first values, order and negatives.
    """

    folder: str
    dtype: str = "float64"
    dim: int = 32
    blocks: int = 2
    heads: int = 2
    max_length: int = 50
    batch_size: int = 32
    epochs: int = 10
    negatives: int = 64
    lr: float = 1e-3
    evaluate_every: int = 21
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Way:
    """How it is trained.

    Attributes:
        depth: of a pipeline; None: a plain loop.
        micro_batches: of a pipeline.
        transport: between ranks.
        stale: by how many steps rows are looked up too early, and not corrected; in a plain loop.
    """

    depth: int | None = None
    micro_batches: int = 1
    transport: TransportName = "collective"
    stale: int = 0


@dataclass(frozen=True, eq=False)
class Item:
    """A step's events and the ids that they look up; a sample is a user."""

    events: SequenceBatch
    sparse: SparseBatch

    def take(self, samples: Tensor) -> Item:
        """The given users."""
        raise NotImplementedError("samples keep their order: no clustering")


class Training:
    """A model and its tables.

    Args:
        mesh: the ranks.
        settings: what is trained.
        way: how.
    """

    def __init__(self, mesh: Mesh, settings: Settings, way: Way) -> None:
        self._mesh, self._settings, self._way = mesh, settings, way
        self._data = Sequences.open(settings.folder)
        self._dtype = getattr(torch, settings.dtype)
        torch.manual_seed(settings.seed)
        self._encoder = SequenceEncoder(
            "fuxi_alpha", settings.dim, settings.blocks, settings.heads, settings.max_length
        ).to(self._dtype)
        table = TableSpec(
            name="item",
            num_rows=self._data.num_items,
            dim=settings.dim,
            features=FEATURES,
            pooling="none",
            dtype=self._dtype,
            optimizer=Adam(lr=settings.lr),
            initializer=Normal(std=0.02),
        )
        self._items = EmbeddingCollection([table], mesh=mesh, seed=settings.seed, transport=way.transport)
        self._gradients = SharedGradients(self._encoder, mesh, way.transport)
        self._optimizer = torch.optim.Adam(self._encoder.parameters(), lr=settings.lr)
        self._row_optimizer = EmbeddingOptimizer(self._items)
        self._losses: list[float] = []
        self._points: list[dict[str, float]] = []

    def run(self, file: str | None = None) -> dict[str, Any]:
        """Trains; returns the curves, and a digest of the model, which rank 0 also writes to a file."""
        if self._way.stale:
            self._run_stale(self._way.stale)
        elif self._way.depth is None:
            for item in self._read():
                self._step(item, lambda item=item: [(slice(0, item.sparse.batch_size), self._items(item.sparse))])
        else:
            with Pipeline(self._items, depth=self._way.depth, micro_batches=self._way.micro_batches) as pipeline:
                for window in pipeline.windows(self._read()):
                    self._step(window.item, lambda window=window: ((p.samples, p.embeddings) for p in window))
        model = self._model()
        self._items.close()
        if file is not None and self._mesh.rank == 0:
            torch.save(model, file)
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model))
        return {"losses": self._losses, "points": self._points, "digest": digest.hexdigest()}

    def _read(self) -> Iterator[Item]:
        settings = self._settings
        loader = self._loader("train", settings.batch_size, shuffle=True)
        step = 0
        for _ in range(settings.epochs):
            for events in loader:
                draws = np.random.default_rng([settings.seed, step])
                negatives = draws.integers(self._data.num_items, size=(len(self._data.offsets) - 1, settings.negatives))
                yield Item(events, _ids(events, torch.from_numpy(negatives)[events.users]))
                step += 1

    def _loader(self, split: SplitName, batch_size: int, *, shuffle: bool = False) -> SequenceLoader:
        return SequenceLoader(
            self._data,
            split,
            batch_size=batch_size,
            max_length=self._settings.max_length,
            rank=self._mesh.rank,
            world_size=self._mesh.world_size,
            shuffle=shuffle,
            seed=self._settings.seed,
        )

    def _step(self, item: Item, parts: Callable[[], Any]) -> None:
        """One step over micro-batches, which `parts` gives; the loss is the mean over the targets of all ranks."""
        count = float(total(self._mesh, torch.tensor([item.events.num_ids])))
        self._gradients.zero()
        loss = torch.zeros(1, dtype=self._dtype)
        for users, embeddings in parts():
            loss += self._backward(item, users, _vectors(embeddings), count)
        self._end_step(loss, count)

    def _end_step(self, loss: Tensor, count: float) -> None:
        self._row_optimizer.step()
        self._gradients.average()
        self._optimizer.step()
        self._losses.append(float(total(self._mesh, loss)) / count)
        if len(self._losses) % self._settings.evaluate_every == 0:
            self._points.append({"step": len(self._losses), **self._evaluate()})

    def _backward(self, item: Item, users: slice, vectors: Lookup, count: float) -> Tensor:
        """The loss of some users, summed; gradients are averaged over ranks afterwards."""
        loss = self._loss(item.events.take(np.arange(users.start, users.stop)), item.sparse, users, vectors)
        (loss * (self._mesh.world_size / count)).backward()
        return loss.detach()

    def _loss(self, events: SequenceBatch, sparse: SparseBatch, users: slice, vectors: Lookup) -> Tensor:
        clicked, following, negatives = vectors
        queries = self._encoder(clicked, events.offsets, events.times, events.request_times)
        queries, following = cosine(queries, following, TEMPERATURE)
        _, negatives = cosine(queries, negatives, 1.0)
        size = self._settings.negatives
        drawn = sparse.ids[-sparse.batch_size * size :].view(-1, size)[users]
        of_users = [queries.sum() * 0 + following.sum() * 0 + negatives.sum() * 0]  # of a rank without users too
        for user, (low, high) in enumerate(zip(events.offsets[:-1].tolist(), events.offsets[1:].tolist(), strict=True)):
            losses = sampled_softmax(
                queries[low:high],
                following[low:high],
                negatives[user * size : (user + 1) * size],
                events.targets[low:high],
                drawn[user],
            )
            of_users.append(losses.sum())
        return torch.stack(of_users).sum().view(1)

    def _run_stale(self, stale: int) -> None:
        """Rows are read `stale` updates too early; their gradients go to the rows as they are by then."""
        ahead: deque[tuple[Item, Lookup]] = deque()
        for item in chain(self._read(), [None] * stale):
            if item is not None:
                with torch.no_grad():
                    ahead.append((item, _copies(_vectors(self._items(item.sparse)))))
            if item is None or len(ahead) > stale:
                self._stale_step(*ahead.popleft())

    def _stale_step(self, item: Item, vectors: Lookup) -> None:
        count = float(total(self._mesh, torch.tensor([item.events.num_ids])))
        self._gradients.zero()
        loss = self._backward(item, slice(0, item.sparse.batch_size), vectors, count)
        current = _vectors(self._items(item.sparse))
        torch.autograd.backward(current, [_gradient(each) for each in vectors])
        self._end_step(loss, count)

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """HR@10 and NDCG@10 of the test split, seen items removed, all others ranked."""
        mesh, metrics = self._mesh, RankingMetrics()
        mine = item_range(self._data.num_items, mesh.rank, mesh.world_size)
        items = self._look_up(torch.arange(mine.start, mine.stop))
        for events in self._loader("test", 1024):
            last = events.offsets[1:] - 1
            vectors = self._look_up(events.items)
            queries = self._encoder(vectors, events.offsets, events.times, events.request_times)[last]
            queries, keys = cosine(queries, items, TEMPERATURE)
            metrics.add(rank_targets(mesh, queries, events.targets[last], keys, mine.start, self._seen(events.users)))
        found = metrics.compute(mesh)
        return {name: found[name].value for name in ("hr@10", "ndcg@10")}

    def _seen(self, users: Tensor) -> Seen:
        """All that users did before what the test predicts, also what the model does not read any more."""
        data, numbers = self._data, users.numpy()
        places, offsets = spans(data.offsets[numbers], data.targets("test")[numbers])
        return Seen(torch.from_numpy(offsets), torch.from_numpy(data.items[places].astype(np.int64)))

    def _look_up(self, ids: Tensor) -> Tensor:
        batch = SparseBatch((FEATURES[0],), ids, 1, jagged_offsets=torch.tensor([0, len(ids)]))
        return self._items(batch, features=[FEATURES[0]])[FEATURES[0]].values

    @torch.no_grad()
    def _model(self) -> list[Tensor]:
        """All rows, then the parameters of the network; the same on every rank."""
        mine = item_range(self._data.num_items, self._mesh.rank, self._mesh.world_size)
        rows = self._look_up(torch.arange(mine.start, mine.stop))
        return [
            RowShares.of(self._mesh, len(rows)).gather(rows),
            *(each.detach() for each in self._encoder.parameters()),
        ]


def train(mesh: Mesh, settings: dict[str, Any], way: dict[str, Any], file: str | None = None) -> dict[str, Any]:
    """One training, see `Settings` and `Way`. Collective."""
    return Training(mesh, Settings(**settings), Way(**way)).run(file)


def _ids(events: SequenceBatch, negatives: Tensor) -> SparseBatch:
    """A user's events, what follows each of them, and the user's negatives."""
    users, size = negatives.shape
    bounds, count = events.offsets[1:], events.num_ids
    drawn = torch.arange(1, users + 1) * size + 2 * count
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), bounds, bounds + count, drawn])
    ids = torch.cat([events.items, events.targets, negatives.flatten()])
    return SparseBatch(FEATURES, ids, users, jagged_offsets=offsets)


def _vectors(embeddings: Embeddings) -> Lookup:
    clicked, following, negatives = (embeddings[name].values for name in FEATURES)
    return clicked, following, negatives


def _copies(vectors: Lookup) -> Lookup:
    clicked, following, negatives = (each.clone().requires_grad_() for each in vectors)
    return clicked, following, negatives


def _gradient(vectors: Tensor) -> Tensor:
    assert vectors.grad is not None
    return vectors.grad


class Commands:
    """What the benchmark may ask for."""

    def __init__(self, workload: Workload, mesh: Mesh) -> None:
        self._mesh = mesh

    def train(self, settings: dict[str, Any], way: dict[str, Any], file: str | None = None) -> dict[str, Any]:
        """One training."""
        return train(self._mesh, settings, way, file)

    def close(self) -> None:
        """Holds nothing between commands."""


def main() -> None:
    """Serves until the benchmark hangs up."""
    serve(Commands, "train")


if __name__ == "__main__":
    main()
