"""The next item of a sequence, by causal attention over unpooled rows.

python examples/sequence_model.py --steps 200
OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/sequence_model.py

Histories have any length. A table with `pooling="none"` returns one vector an id (`JaggedRows`), which are padded for
attention. The loss sets each next item against random ones (binary cross entropy, as SASRec does).

Source: Kang, McAuley, "Self-Attentive Sequential Recommendation" (arXiv:1808.09781), with one block.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from rowmesh import AdaGrad, EmbeddingCollection, EmbeddingOptimizer, JaggedRows, Mesh, SparseBatch, TableSpec
from rowmesh.run.metrics import Predictions

NUM_ITEMS, MAX_LENGTH, DIM = 300, 12, 16
TABLES = [
    TableSpec(
        name="item",
        num_rows=NUM_ITEMS,
        dim=DIM,
        features=("history", "next", "random"),  # three look-ups in one table; ids are fetched once
        pooling="none",
        optimizer=AdaGrad(lr=0.1),
    )
]


class CausalBlock(nn.Module):
    """One block of attention in which no position sees a later one."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(MAX_LENGTH, DIM) * 0.1)
        self.attention = nn.MultiheadAttention(DIM, num_heads=2, batch_first=True, bias=False)
        self.first_norm, self.second_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.network = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))

    def forward(self, padded: Tensor) -> Tensor:
        """`[B, L, D]` to as much. Padding is at the end, where no position before it looks: it needs no mask."""
        length = padded.shape[1]
        x = padded + self.positions[:length]
        is_later = torch.ones(length, length, dtype=torch.bool).triu(1)
        normed = self.first_norm(x)
        x = x + self.attention(normed, normed, normed, attn_mask=is_later, need_weights=False)[0]
        return x + self.network(self.second_norm(x))


def main(arguments: Sequence[str] | None = None) -> nn.Module:
    """Trains, evaluates, and returns the network."""
    options = parse(arguments)
    mesh = Mesh.connect()
    embeddings = EmbeddingCollection(TABLES, mesh=mesh)
    torch.manual_seed(0)
    network = CausalBlock()
    model = DistributedDataParallel(network, process_group=mesh.group) if mesh.world_size > 1 else network
    sparse_optimizer = EmbeddingOptimizer(embeddings)
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        batch = drawn(step, options.batch_size, mesh)
        loss = loss_of(*scores(model, embeddings, batch), batch.batch_size)
        dense_optimizer.zero_grad()
        loss.backward()
        dense_optimizer.step()
        sparse_optimizer.step()
        if mesh.rank == 0 and step % options.log_every == 0:
            now = time.perf_counter()
            speed = options.log_every * options.batch_size / (now - start)  # at first with compiling kernels
            start = now
            print(f"step {step}: loss {loss.item():.4f} on rank 0, {speed:,.0f} samples/s")

    # AUC: how often the item that came next scores above a random one.
    predictions = Predictions()
    with torch.no_grad():
        for number in range(2):
            right, wrong = scores(network, embeddings, drawn(-1 - number, options.batch_size, mesh))
            predictions.add(right, torch.ones_like(right))
            predictions.add(wrong, torch.zeros_like(wrong))
    metrics = predictions.metrics(mesh)
    if mesh.rank == 0:
        print(f"after step {options.steps}: AUC {metrics.auc:.4f}")
    embeddings.close()
    return network


def scores(model: nn.Module, embeddings: EmbeddingCollection, batch: SparseBatch) -> tuple[Tensor, Tensor]:
    """What the model gives the next item of each position, and a random one, `[N]` each."""
    vectors = embeddings(batch)
    states = unpadded(model(padded(vectors["history"])), vectors["history"])
    return (states * vectors["next"].values).sum(1), (states * vectors["random"].values).sum(1)


def padded(rows: JaggedRows) -> Tensor:
    """`[B, L, D]`, zeros behind the rows of each sample."""
    return pad_sequence(list(rows.values.split(rows.offsets.diff().tolist())), batch_first=True)


def unpadded(states: Tensor, rows: JaggedRows) -> Tensor:
    """`[N, D]`, as `rows.values` lies."""
    return states[torch.arange(states.shape[1]) < rows.offsets.diff()[:, None]]


def loss_of(right: Tensor, wrong: Tensor, num_samples: int) -> Tensor:
    """About the mean over the positions of this rank.

    The divisor is equal on all ranks, whose gradients are averaged: with the mean over its own positions each, a
    position on a rank of short sequences would weigh more.
    """
    losses = nn.functional.softplus(-right) + nn.functional.softplus(wrong)
    return losses.sum() / (num_samples * (2 + MAX_LENGTH) / 2)


def drawn(number: int, batch_size: int, mesh: Mesh) -> SparseBatch:
    """The share of this rank of sequences in which item i is mostly followed by 7 i + 3, and else by any item."""
    generator = torch.Generator().manual_seed(1_000_000 + number)
    items = [torch.randint(NUM_ITEMS, (batch_size,), generator=generator)]
    for _ in range(MAX_LENGTH):
        any_item = torch.randint(NUM_ITEMS, (batch_size,), generator=generator)
        is_usual = torch.rand(batch_size, generator=generator) < 0.8
        items.append(torch.where(is_usual, (7 * items[-1] + 3) % NUM_ITEMS, any_item))
    sequences = torch.stack(items, dim=1)  # [B, MAX_LENGTH + 1]
    lengths = torch.randint(2, MAX_LENGTH + 1, (batch_size,), generator=generator)
    random = torch.randint(NUM_ITEMS, (batch_size, MAX_LENGTH), generator=generator)
    mine = slice(mesh.rank, None, mesh.world_size)
    sequences, lengths, random = sequences[mine], lengths[mine], random[mine]
    is_there = torch.arange(MAX_LENGTH) < lengths[:, None]
    bounds = lengths.repeat(3).cumsum(0)  # the three features have as many ids
    return SparseBatch(
        features=("history", "next", "random"),
        ids=torch.cat([sequences[:, :-1][is_there], sequences[:, 1:][is_there], random[is_there]]),
        batch_size=len(lengths),
        jagged_offsets=torch.cat([bounds.new_zeros(1), bounds]),
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Next items of drawn sequences.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=128, help="samples a step, over all ranks together")
    parser.add_argument("--log-every", type=int, default=10)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
