"""A TorchRec script, and what each of its lines becomes. Runs without TorchRec.

python examples/from_torchrec.py --steps 200
OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/from_torchrec.py

Comments that begin with `TorchRec:` are the lines that the code below them replaces. docs/from_torchrec.md has the
table of all counterparts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# TorchRec: from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
# TorchRec: from torchrec.distributed import DistributedModelParallel
# TorchRec: from torchrec.distributed.planner import EmbeddingShardingPlanner
# TorchRec: from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
# TorchRec: from torchrec.optim import RowWiseAdagrad, KeyedOptimizerWrapper
# TorchRec: from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, Pipeline, RowWiseAdaGrad, SparseBatch, TableSpec
from rowmesh.data import Batch

# TorchRec: from torchrec.models.dlrm import DLRM, DLRMTrain
from rowmesh.models import DLRM
from rowmesh.run.metrics import Predictions

ROWS = {"user": 2000, "item": 500, "shop": 50}
NUM_DENSE, DIM = 4, 16


def main(arguments: Sequence[str] | None = None) -> nn.Module:
    """Trains, evaluates, and returns the network."""
    options = parse(arguments)
    torch.manual_seed(0)

    # TorchRec: dist.init_process_group("gloo")
    # Also joins a group that is there already.
    mesh = Mesh.connect()

    # TorchRec: apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.1, "eps": 1e-8})
    # The rule is the table's own; `Adam`, `AdaGrad` and `SGD` are there too.
    rule = RowWiseAdaGrad(lr=0.1)

    # TorchRec: tables = [EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=num,
    # TorchRec:                              feature_names=[name]) for name, num in ROWS.items()]
    # Configs that are there already: TableSpec.from_embedding_bag_config(config, optimizer=rule).
    tables = [
        TableSpec(name=f"t_{name}", dim=DIM, num_rows=num, features=(name,), optimizer=rule)
        for name, num in ROWS.items()
    ]

    # TorchRec: ebc = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    # TorchRec: plan = EmbeddingShardingPlanner(topology=…, constraints=…).collective_plan(model, sharders, pg)
    # TorchRec: model = DistributedModelParallel(DLRMTrain(DLRM(ebc, …)), plan=plan, sharders=sharders)
    # The collection is sharded when it is made. Without a plan every table's rows are cyclic over all ranks; one that
    # `rowmesh plan` makes adds copies of hot rows, and changes no bit of the model.
    embeddings = EmbeddingCollection(tables, mesh=mesh)
    network = DLRM(num_dense=NUM_DENSE, num_features=len(tables), dim=DIM, bottom=[32], top=[32])
    # DistributedModelParallel wraps the dense part itself; here the program does, and the tables stay outside.
    model = DistributedDataParallel(network, process_group=mesh.group) if mesh.world_size > 1 else network

    # TorchRec: dense_optimizer = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())),
    # TorchRec:                                         lambda params: torch.optim.Adam(params, lr=0.002))
    # TorchRec: optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])
    # Rows are not updated in backward, but when step is called.
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    sparse_optimizer = EmbeddingOptimizer(embeddings)

    # TorchRec: pipeline = TrainPipelineSparseDist(model, optimizer, device)
    # Both begin the exchange of a batch while the one before is computed. Rows are never those of a step before.
    pipeline = Pipeline(embeddings, depth=1)

    # TorchRec: iterator = iter(loader)
    # TorchRec: while True: loss, _ = pipeline.progress(iterator)      # until StopIteration
    # The step stays in the program: `progress` is the body of this loop.
    start = time.perf_counter()
    with pipeline:
        for step, window in enumerate(pipeline.windows(drawn(1, options.steps, options.batch_size, mesh)), start=1):
            batch = window.item
            dense_optimizer.zero_grad()
            loss = torch.zeros(())
            for part in window:  # its micro-batches: one, unless Pipeline(…, micro_batches=…)
                logits = model(batch.dense[part.samples], part.embeddings.stacked())
                labels = batch.labels[part.samples]
                losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
                share = losses / len(batch.labels)  # gradients of micro-batches add up
                share.backward()
                loss += share.detach()
            dense_optimizer.step()
            sparse_optimizer.step()
            if mesh.rank == 0 and step % options.log_every == 0:
                now = time.perf_counter()
                speed = options.log_every * options.batch_size / (now - start)  # at first with compiling kernels
                start = now
                print(f"step {step}: loss {loss.item():.4f} on rank 0, {speed:,.0f} samples/s")

    # TorchRec: metrics = RecMetricModule(…); metrics.update(…); metrics.compute()
    # TorchRec: keyed_tensor = ebc(kjt)
    predictions = Predictions()
    with torch.no_grad():
        for batch in drawn(-4, 4, options.batch_size, mesh):
            vectors = embeddings(batch.sparse)  # vectors["user"] is [B, D], as keyed_tensor["user"]
            predictions.add(network(batch.dense, vectors.stacked()), batch.labels)
    metrics = predictions.metrics(mesh)
    if mesh.rank == 0:
        print(f"after step {options.steps}: AUC {metrics.auc:.4f}, log-loss {metrics.log_loss:.4f}")
    embeddings.close()
    return network


def drawn(first: int, num: int, batch_size: int, mesh: Mesh) -> Iterator[Batch]:
    """The share of this rank of batches that depend on their number alone."""
    truth = torch.Generator().manual_seed(0)
    effects = [torch.randn(num_rows, generator=truth) for num_rows in ROWS.values()]
    for number in range(first, first + num):
        generator = torch.Generator().manual_seed(1_000_000 + number)
        dense = torch.randn(batch_size, NUM_DENSE, generator=generator)
        ids = torch.stack([(torch.rand(batch_size, generator=generator) ** 3 * rows).long() for rows in ROWS.values()])
        logits = dense.sum(1) + sum(effect[row] for effect, row in zip(effects, ids, strict=True))
        labels = torch.bernoulli(torch.sigmoid(logits), generator=generator)
        mine = slice(mesh.rank, None, mesh.world_size)
        yield Batch(dense[mine], to_sparse(ids[:, mine]), labels[mine])


def to_sparse(ids: Tensor) -> SparseBatch:
    """From ids `[F, B]`, one a bag."""
    # TorchRec: lengths = torch.ones(ids.numel(), dtype=torch.int64)
    # TorchRec: kjt = KeyedJaggedTensor(keys=list(ROWS), values=ids.flatten(), lengths=lengths)
    # Tensors of a KeyedJaggedTensor that is there already: SparseBatch.from_keyed_jagged_tensor(kjt).
    return SparseBatch.from_dense(list(ROWS), ids)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="The counterpart of a TorchRec script.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=512, help="samples a step, over all ranks together")
    parser.add_argument("--log-every", type=int, default=10)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
