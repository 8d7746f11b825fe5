"""A torch training loop with DistributedDataParallel, saved on some number of ranks and loaded on another.

python examples/ddp_loop.py --save runs/ddp_loop
OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/ddp_loop.py --load runs/ddp_loop
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rowmesh
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, RowWiseAdaGrad, SparseBatch, TableSpec
from rowmesh.models import DLRM
from rowmesh.run.metrics import Predictions

ROWS = {"user": 2000, "item": 500, "shop": 50}
NUM_DENSE, DIM = 4, 16


def main(arguments: Sequence[str] | None = None) -> nn.Module:
    """Trains, evaluates, and returns the network."""
    options = parse(arguments)
    mesh = Mesh.connect()  # reads torchrun's variables; without them, one process
    optimizer = RowWiseAdaGrad(lr=0.1)
    tables = [TableSpec(name=name, num_rows=num, dim=DIM, optimizer=optimizer) for name, num in ROWS.items()]
    embeddings = EmbeddingCollection(tables, mesh=mesh)
    torch.manual_seed(0)
    network = DLRM(num_dense=NUM_DENSE, num_features=len(ROWS), dim=DIM, bottom=[32], top=[32])
    # Averages the gradients of the network. Those of rows are averaged by EmbeddingOptimizer: the tables stay outside.
    model = DistributedDataParallel(network, process_group=mesh.group) if mesh.world_size > 1 else network
    sparse_optimizer = EmbeddingOptimizer(embeddings)
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=0.002)

    # All that a resumed loop needs, by name. Plain values such as the step are returned by `load`.
    state = {"embeddings": embeddings, "network": model, "sparse": sparse_optimizer, "dense": dense_optimizer}
    first = 0
    if options.load:  # every rank calls it, whatever number of ranks saved
        first = rowmesh.load(options.load, state)["step"]
    start = time.perf_counter()
    for step in range(first, first + options.steps):
        dense, sparse, labels = drawn(step, options.batch_size, mesh)
        logits = model(dense, embeddings(sparse).stacked())  # [B, F, D] → [B]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)  # the mean over this rank's samples
        dense_optimizer.zero_grad()
        loss.backward()
        dense_optimizer.step()
        sparse_optimizer.step()
        if mesh.rank == 0 and (step + 1) % options.log_every == 0:
            now = time.perf_counter()
            speed = options.log_every * options.batch_size / (now - start)  # at first with compiling kernels
            start = now
            print(f"step {step + 1}: loss {loss.item():.4f} on rank 0, {speed:,.0f} samples/s")

    # Other samples, which no step has seen; each rank scores its own.
    predictions = Predictions()
    with torch.no_grad():
        for number in range(4):
            dense, sparse, labels = drawn(-1 - number, options.batch_size, mesh)
            predictions.add(network(dense, embeddings(sparse).stacked()), labels)
    metrics = predictions.metrics(mesh)  # of the samples of all ranks
    if mesh.rank == 0:
        print(f"after step {first + options.steps}: AUC {metrics.auc:.4f}, log-loss {metrics.log_loss:.4f}")
    if options.save:  # every rank writes its own rows
        rowmesh.save(options.save, state | {"step": first + options.steps}, overwrite=True)
    embeddings.close()
    return network


def drawn(number: int, batch_size: int, mesh: Mesh) -> tuple[Tensor, SparseBatch, Tensor]:
    """The share of this rank of a batch: dense features `[B, 4]`, ids, labels `[B]`.

    The batch depends on its number alone: any number of ranks trains on the same samples.
    """
    truth = list(planted_effects())
    generator = torch.Generator().manual_seed(1_000_000 + number)
    dense = torch.randn(batch_size, NUM_DENSE, generator=generator)
    # Cubed: few ids are frequent, and most are rare, as in real data.
    ids = torch.stack([(torch.rand(batch_size, generator=generator) ** 3 * num).long() for num in ROWS.values()])
    logits = dense.sum(1) + sum(effects[row] for effects, row in zip(truth, ids, strict=True))
    labels = torch.bernoulli(torch.sigmoid(logits), generator=generator)
    mine = slice(mesh.rank, None, mesh.world_size)
    return dense[mine], SparseBatch.from_dense(list(ROWS), ids[:, mine]), labels[mine]


def planted_effects() -> Iterator[Tensor]:
    """What each id adds to the true logit, table by table."""
    generator = torch.Generator().manual_seed(0)
    for num_rows in ROWS.values():
        yield torch.randn(num_rows, generator=generator)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train, save and load with DistributedDataParallel.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=512, help="samples a step, over all ranks together")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--save", help="write the model to this folder at the end, in place of one that is there")
    parser.add_argument("--load", help="go on from the model in this folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
