"""One rank of TorchRec: the same steps on the same batches. Run by the Python of an environment that has it.

Tables with row-wise AdaGrad, updated in the backward by FBGEMM; the network under DistributedDataParallel with SGD.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor  # noqa: E402
from torchrec.distributed import DistributedModelParallel  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology  # noqa: E402
from torchrec.distributed.types import ShardingEnv  # noqa: E402
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward  # noqa: E402
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad  # noqa: E402

from benchmarks import rank as rank_side  # noqa: E402
from benchmarks.plain_dlrm import PlainDLRM  # noqa: E402
from benchmarks.tower import Tower  # noqa: E402
from benchmarks.workload import NUM_DENSE, Workload, WorkloadBatch, make_batches  # noqa: E402


class CpuSharder(EmbeddingBagCollectionSharder):
    """The stock sharder refuses row-wise sharding on a CPU, although it runs there; this one offers what CUDA has."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types that the planner may choose."""
        return super().sharding_types("cuda")


class Model(nn.Module):
    """Tables and the network above them, or the network alone where embeddings are given."""

    def __init__(self, workload: Workload, hidden: int, precision: str) -> None:
        super().__init__()
        self.dim, self.is_half = workload.dim, precision == "bfloat16"
        self.num_tables = len(workload.table_rows)
        self.tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(name=f"t{i}", embedding_dim=self.dim, num_embeddings=rows, feature_names=[f"f{i}"])
                for i, rows in enumerate(workload.table_rows)
            ],
        )
        if hidden:
            self.network: nn.Module = Tower(NUM_DENSE, self.num_tables, self.dim, hidden)
        else:
            self.network = PlainDLRM(num_dense=NUM_DENSE, num_features=self.num_tables, dim=self.dim)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor, given: Tensor | None = None) -> Tensor:
        """Logits. The look-up comes first, so that its backward comes last."""
        vectors = self.tables(ids).values().view(-1, self.num_tables, self.dim) if given is None else given
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_half):
            return self.network(dense, vectors).float()


def build(workload: Workload, sharding: str, hidden: int, precision: str) -> DistributedModelParallel:
    """The sharded model."""
    torch.manual_seed(workload.seed)
    model = Model(workload, hidden, precision)
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": workload.lr, "eps": 1e-8})
    world_size = dist.get_world_size()
    constraint = ParameterConstraints(sharding_types=[sharding], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu"),
        constraints={f"t{i}": constraint for i in range(model.num_tables)},
    )
    sharders: Any = [CpuSharder()]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(module=model, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders)


def keyed_jagged(batch: WorkloadBatch) -> KeyedJaggedTensor:
    """The ids of a batch as TorchRec takes them."""
    keys = [f"f{i}" for i in range(len(batch.bag_sizes))]
    return KeyedJaggedTensor(keys, batch.ids.flatten(), lengths=batch.lengths, stride=len(batch.labels))


class Commands:
    """What the benchmark may ask for."""

    def __init__(self, workload: Workload, sharding: str, hidden: int = 0, precision: str = "float32") -> None:
        self._workload = workload
        self._model = build(workload, sharding, hidden, precision)
        sharded = [m for m in self._model.modules() if isinstance(m, ShardedEmbeddingBagCollection)]
        (self._tables,) = sharded
        dense = [p for name, p in self._model.named_parameters() if "network." in name]
        self._optimizer = torch.optim.SGD(dense, lr=workload.lr)
        self._loss = nn.BCEWithLogitsLoss()
        batches = make_batches(workload, dist.get_rank(), dist.get_world_size(), workload.num_batches)
        self._batches = [(batch.dense, keyed_jagged(batch), batch.labels) for batch in batches]
        samples = workload.global_batch // dist.get_world_size()
        num_tables = len(workload.table_rows)
        self._gradient = torch.randn(samples, num_tables * workload.dim) * 1e-3
        self._given = torch.randn(samples, num_tables, workload.dim, requires_grad=True)
        self._sparse_step(0)

    def round(self) -> dict[str, Any]:
        """Seconds of steps of the sparse part alone."""
        return {"seconds": rank_side.alternate({"step": self._sparse_step}, self._workload, _barrier)}

    def train(self) -> dict[str, Any]:
        """Seconds of full steps, and of the same steps with the embeddings given."""
        variants = {"full": lambda number: self._dense_step(number, None), "given": self._given_step}
        return {"seconds": rank_side.alternate(variants, self._workload, _barrier)}

    def _sparse_step(self, number: int) -> None:
        _, ids, _ = self._batches[number % len(self._batches)]
        self._tables(ids).values().backward(self._gradient)

    def _given_step(self, number: int) -> None:
        self._given.grad = None
        self._dense_step(number, self._given)

    def _dense_step(self, number: int, given: Tensor | None) -> None:
        dense, ids, labels = self._batches[number % len(self._batches)]
        self._optimizer.zero_grad(set_to_none=True)
        self._loss(self._model(dense, ids, given), labels).backward()
        self._optimizer.step()


def _barrier() -> None:
    dist.barrier()


def main() -> None:
    """Serves until the benchmark hangs up."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload, options = rank_side.settings()
    commands = Commands(workload, **options)
    rank_side.serve(round=commands.round, train=commands.train)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
