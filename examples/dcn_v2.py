"""DCN-v2 on drawn clicks: tables of different dims side by side, low-rank cross layers beside a deep network.

python examples/dcn_v2.py --steps 200
OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/dcn_v2.py

Source: Wang et al., "DCN V2" (arXiv:2008.13535), the parallel structure with low-rank cross layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rowmesh import AdaGrad, EmbeddingCollection, EmbeddingOptimizer, Mesh, SparseBatch, TableSpec
from rowmesh.run.metrics import Predictions

NUM_DENSE = 4
RULE = AdaGrad(lr=0.1)
TABLES = [
    TableSpec(name="user", num_rows=2000, dim=16, optimizer=RULE),
    TableSpec(name="item", num_rows=500, dim=16, optimizer=RULE),
    # Frequent ids with little to say need fewer numbers; a bag of several ids is averaged.
    TableSpec(name="tags", num_rows=50, dim=8, pooling="mean", optimizer=RULE),
]


class CrossLayer(nn.Module):
    """x₀ ⊙ (U V x + b) + x, of rank R."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.v, self.u = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """`[B, width]`."""
        return x0 * self.u(self.v(x)) + x


class DCNv2(nn.Module):
    """Cross layers and a deep network over the same input; one logit from both."""

    def __init__(self, width: int, *, num_cross: int = 2, rank: int = 8, hidden: int = 32) -> None:
        super().__init__()
        self.cross = nn.ModuleList(CrossLayer(width, rank) for _ in range(num_cross))
        self.deep = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.head = nn.Linear(width + hidden, 1)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Logits `[B]` from `dense` `[B, 4]` and `vectors` `[B, ΣD]`."""
        x0 = x = torch.cat([dense, vectors], dim=1)
        for layer in self.cross:
            x = layer(x0, x)
        return self.head(torch.cat([x, self.deep(x0)], dim=1)).squeeze(1)


def main(arguments: Sequence[str] | None = None) -> nn.Module:
    """Trains, evaluates, and returns the network."""
    options = parse(arguments)
    mesh = Mesh.connect()
    embeddings = EmbeddingCollection(TABLES, mesh=mesh)
    torch.manual_seed(0)
    network = DCNv2(NUM_DENSE + sum(embeddings.dims))
    model = DistributedDataParallel(network, process_group=mesh.group) if mesh.world_size > 1 else network
    sparse_optimizer = EmbeddingOptimizer(embeddings)
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        dense, sparse, labels = drawn(step, options.batch_size, mesh)
        # All vectors side by side, [B, 16 + 16 + 8]; `stacked()` would need equal dims.
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, embeddings(sparse).values), labels)
        dense_optimizer.zero_grad()
        loss.backward()
        dense_optimizer.step()
        sparse_optimizer.step()
        if mesh.rank == 0 and step % options.log_every == 0:
            now = time.perf_counter()
            speed = options.log_every * options.batch_size / (now - start)  # at first with compiling kernels
            start = now
            print(f"step {step}: loss {loss.item():.4f} on rank 0, {speed:,.0f} samples/s")

    predictions = Predictions()
    with torch.no_grad():
        for number in range(4):
            dense, sparse, labels = drawn(-1 - number, options.batch_size, mesh)
            predictions.add(network(dense, embeddings(sparse).values), labels)
    metrics = predictions.metrics(mesh)
    if mesh.rank == 0:
        print(f"after step {options.steps}: AUC {metrics.auc:.4f}, log-loss {metrics.log_loss:.4f}")
    embeddings.close()
    return network


def drawn(number: int, batch_size: int, mesh: Mesh) -> tuple[Tensor, SparseBatch, Tensor]:
    """The share of this rank of a batch: dense features `[B, 4]`, ids, labels `[B]`.

    Users and items have tastes of two numbers: a click depends on their product, which a cross layer can learn.
    """
    truth = torch.Generator().manual_seed(0)
    users, items = torch.randn(2000, 2, generator=truth), torch.randn(500, 2, generator=truth)
    tag_effects = torch.randn(50, generator=truth)
    generator = torch.Generator().manual_seed(1_000_000 + number)
    dense = torch.randn(batch_size, NUM_DENSE, generator=generator)
    user, item = ((torch.rand(batch_size, generator=generator) ** 3 * num).long() for num in (2000, 500))
    num_tags = torch.randint(0, 4, (batch_size,), generator=generator)  # a bag may be empty: its vector is 0
    tags = torch.randint(50, (int(num_tags.sum()),), generator=generator).split(num_tags.tolist())
    tag_means = torch.stack([tag_effects[bag].sum() / max(1, len(bag)) for bag in tags])
    logits = dense.sum(1) + 2 * (users[user] * items[item]).sum(1) + tag_means
    labels = torch.bernoulli(torch.sigmoid(logits), generator=generator)
    mine = slice(mesh.rank, None, mesh.world_size)
    return dense[mine], bags(user[mine], item[mine], tags[mine]), labels[mine]


def bags(user: Tensor, item: Tensor, tags: Sequence[Tensor]) -> SparseBatch:
    """One user, one item and any number of tags a sample: bags feature by feature, with offsets between them."""
    lengths = torch.cat([torch.ones(2 * len(user), dtype=torch.int64), torch.tensor([len(bag) for bag in tags])])
    return SparseBatch(
        features=("user", "item", "tags"),
        ids=torch.cat([user, item, *tags]),
        batch_size=len(user),
        jagged_offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="DCN-v2 on drawn clicks.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=512, help="samples a step, over all ranks together")
    parser.add_argument("--log-every", type=int, default=10)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
