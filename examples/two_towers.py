"""Two towers: users and items as vectors whose product says what fits, for retrieval.

python examples/two_towers.py --steps 200
OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/two_towers.py

A user is an id and a history of items; the history reads the same table as the item tower. The loss is a softmax over
the items of the batch: each user's own item against those of the other samples of the same rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rowmesh import AdaGrad, EmbeddingCollection, EmbeddingOptimizer, Embeddings, Mesh, SparseBatch, TableSpec
from rowmesh.run.metrics import Predictions

NUM_USERS, NUM_ITEMS, NUM_TASTES, HISTORY, DIM = 2000, 400, 10, 5, 16
RULE = AdaGrad(lr=0.1)
TABLES = [
    TableSpec(name="user", num_rows=NUM_USERS, dim=DIM, optimizer=RULE),
    # One vocabulary for both towers: two features of one table. The mean of a bag of one item is its row.
    TableSpec(name="item", num_rows=NUM_ITEMS, dim=DIM, features=("item", "history"), pooling="mean", optimizer=RULE),
]


class TwoTowers(nn.Module):
    """Vectors of unit length: `users` and `items`, each `[B, DIM]`.

    Both towers are in one module, so that one DistributedDataParallel averages the gradients of both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.item = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))

    def forward(self, user: Tensor, history: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        """From the looked-up vectors `[B, DIM]` of the three features."""
        users = self.user(torch.cat([user, history], dim=1))
        return nn.functional.normalize(users, dim=1), nn.functional.normalize(self.item(item), dim=1)


def main(arguments: Sequence[str] | None = None) -> nn.Module:
    """Trains, evaluates, and returns the network."""
    options = parse(arguments)
    mesh = Mesh.connect()
    embeddings = EmbeddingCollection(TABLES, mesh=mesh)
    torch.manual_seed(0)
    network = TwoTowers()
    model = DistributedDataParallel(network, process_group=mesh.group) if mesh.world_size > 1 else network
    sparse_optimizer = EmbeddingOptimizer(embeddings)
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        sparse, ids = drawn(step, options.batch_size, mesh)
        users, items = model(*inputs(embeddings(sparse)))
        loss = in_batch_softmax(users, items, ids)
        dense_optimizer.zero_grad()
        loss.backward()
        dense_optimizer.step()
        sparse_optimizer.step()
        if mesh.rank == 0 and step % options.log_every == 0:
            now = time.perf_counter()
            speed = options.log_every * options.batch_size / (now - start)  # at first with compiling kernels
            start = now
            print(f"step {step}: loss {loss.item():.4f} on rank 0, {speed:,.0f} samples/s")

    # Does a user's own item score above a random one? AUC: how often it does.
    predictions = Predictions()
    with torch.no_grad():
        for number in range(4):
            sparse, _ = drawn(-1 - number, options.batch_size, mesh)
            users, items = network(*inputs(embeddings(sparse)))
            for candidates, label in ((items, 1.0), (items.roll(1, dims=0), 0.0)):
                predictions.add((users * candidates).sum(1), torch.full((len(users),), label))
    metrics = predictions.metrics(mesh)
    if mesh.rank == 0:
        print(f"after step {options.steps}: AUC {metrics.auc:.4f}")
    embeddings.close()
    return network


def inputs(vectors: Embeddings) -> tuple[Tensor, Tensor, Tensor]:
    """What TwoTowers takes."""
    return vectors["user"], vectors["history"], vectors["item"]


def in_batch_softmax(users: Tensor, items: Tensor, ids: Tensor, temperature: float = 0.1) -> Tensor:
    """Cross entropy of each user's own item among all items of the batch.

    Popular items are negatives more often: their logits are lowered by the log of how often, or they would be learned
    to score too low. The same item in another sample is no negative.

    Source: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations" (RecSys'19).
    """
    counts = torch.bincount(ids, minlength=NUM_ITEMS)[ids]
    logits = users @ items.T / temperature - (counts / len(ids)).log()
    is_own_again = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
    return nn.functional.cross_entropy(logits.masked_fill(is_own_again, -torch.inf), torch.arange(len(ids)))


def drawn(number: int, batch_size: int, mesh: Mesh) -> tuple[SparseBatch, Tensor]:
    """The share of this rank of a batch, and its items `[B]`: a user's history and item are of the user's taste."""
    generator = torch.Generator().manual_seed(1_000_000 + number)
    users = torch.randint(NUM_USERS, (batch_size,), generator=generator)
    # Items of taste t are t, t + 10, t + 20, …; of each the first are the most popular.
    shape = (batch_size, HISTORY + 1)
    popularity = (torch.rand(shape, generator=generator) ** 2 * (NUM_ITEMS // NUM_TASTES)).long()
    items = popularity * NUM_TASTES + (users % NUM_TASTES)[:, None]
    mine = slice(mesh.rank, None, mesh.world_size)
    users, history, item = users[mine], items[mine, 1:], items[mine, 0]
    lengths = torch.tensor([1, HISTORY, 1]).repeat_interleave(len(users))  # bags feature by feature
    sparse = SparseBatch(
        features=("user", "history", "item"),
        ids=torch.cat([users, history.flatten(), item]),
        batch_size=len(users),
        jagged_offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
    )
    return sparse, item


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Two towers on drawn histories.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=512, help="samples a step, over all ranks together")
    parser.add_argument("--log-every", type=int, default=10)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
