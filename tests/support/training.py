"""The same training job twice: through rowmesh on a rank, and as a plain torch program in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import rowmesh
from rowmesh._support.counters import CommonCounters, GroupCounters
from rowmesh.collection.averaged_rows import AveragedRows
from rowmesh.collection.joint_optimizer import JointOptimizer
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.collection.outputs import Embeddings
from rowmesh.mesh import Mesh
from rowmesh.ops.initialize.reference import values as initial_values
from rowmesh.pipeline import BatchInFlight, Pipeline
from rowmesh.sparse import PositionWeights, SparseBatch, take
from rowmesh.tables import TableSpec
from rowmesh.tables.initializer import table_key
from rowmesh.tables.shard import LocalRows
from rowmesh.tables.update_rules import SGD, AdaGrad, Adam, RowWiseAdaGrad
from tests.support import sanitizer
from tests.support.cores import ReferenceCores, joined_cores
from tests.support.known_ids import KnownIds
from tests.support.scenario import Scenario

HEAD_LR = 0.1
SCALE = 1024.0  # a power of two, which rounds nothing


@dataclass
class Trained:
    """What a job leaves.

    Attributes:
        losses: the global loss of every backward pass.
        outputs: the looked-up vectors of every pass, of this rank's samples (of all samples in the reference).
        rows, state: table → the rows and each of their states, whole tables once merged; of tensor-train tables the
            cores', one after the other.
        copies: table → which rows this rank holds, copies included, and their values and states.
        owned: table → which rows this rank holds.
        averaged: after each step, vectors of averages, of this rank's samples.
        head: the dense layers' parameters.
        counters: group → what it moved, on this rank.
        common: what the messages that serve all groups moved, on this rank.
    """

    losses: list[float] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    rows: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    owned: dict[str, list[int]] = field(default_factory=dict)
    copies: dict[str, tuple[list[int], dict[str, Tensor]]] = field(default_factory=dict)
    averaged: list[Tensor] = field(default_factory=list)
    head: list[Tensor] = field(default_factory=list)
    counters: dict[str, GroupCounters] = field(default_factory=dict)
    common: CommonCounters = field(default_factory=CommonCounters)
    transport: str = ""
    reasons: list[str] = field(default_factory=list)


class Head(torch.nn.Module):
    """Two small dense layers over the vectors of all features; features without pooling are summed after a tanh."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(scenario.seed)
        width = sum(table.dim for _, table in scenario.features)
        # Scaled: where tanh saturates, rounding errors grow from step to step.
        first = torch.randn(width, 4, generator=generator, dtype=scenario.dtype)
        self.first = torch.nn.Parameter(first * width**-0.5)
        self.second = torch.nn.Parameter(torch.randn(4, generator=generator, dtype=scenario.dtype))
        self.positions = None
        if scenario.trains_weights:
            lengths = {name: scenario.bag_sizes[1] + index for index, (name, _) in enumerate(scenario.features, 1)}
            self.positions = PositionWeights(lengths, dtype=scenario.dtype)

    def weigh(self, batch: SparseBatch) -> SparseBatch:
        """The batch with the weights that are trained."""
        return batch if self.positions is None else self.positions(batch)

    def forward(self, vectors: Tensor) -> Tensor:
        """`[B, ΣD]` → `[B]`."""
        return torch.tanh(vectors @ self.first) @ self.second


def sum_sequence(values: Tensor, offsets: Tensor) -> Tensor:
    """One vector a sample from one an id, not linear in the rows."""
    sample = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    return torch.zeros(len(offsets) - 1, values.shape[1], dtype=values.dtype).index_add(0, sample, torch.tanh(values))


def train(mesh: Mesh, scenario: Scenario, transport: str = "auto", device: str = "cpu") -> Trained:
    """Runs a job through rowmesh; every rank of the mesh calls it."""
    if device != "cpu" and not torch.cuda.is_available():
        sanitizer.install()  # in this process: ranks import no test of kernels before
    if scenario.ranks_per_node:
        hosts = tuple(rank // scenario.ranks_per_node for rank in range(mesh.world_size))
        mesh = replace(mesh, hosts=hosts)
    job = _Job(mesh, scenario, transport, device)
    try:
        job.train()
        return job.trained
    finally:
        job.collection.close()


@dataclass(frozen=True)
class Item:
    """What a loader of a scenario gives."""

    sparse: SparseBatch
    labels: Tensor

    def take(self, samples: Tensor) -> Item:
        """The given samples."""
        return Item(take(self.sparse, samples), self.labels[samples])


class _Job:
    """A job under way on one rank."""

    def __init__(self, mesh: Mesh, scenario: Scenario, transport: str, device: str) -> None:
        self._mesh, self._scenario, self._transport, self._device = mesh, scenario, transport, device
        self._begin(scenario.seed)
        self.trained = Trained(transport=self.collection.transport)

    def _begin(self, seed: int) -> None:
        """Makes the tables, which start from a seed, the network, and their optimizers."""
        scenario = self._scenario
        self.collection = EmbeddingCollection(
            scenario.stored,
            mesh=self._mesh,
            seed=seed,
            transport=self._transport,  # type: ignore
            plan=scenario.plan,
            replicas=scenario.replicas,
            synchronization=scenario.synchronization,
            tiers=scenario.tiers,
            device=self._device,
            wire_dtype=scenario.wire_dtype,
        )
        self.head = Head(scenario)
        self._optimizer = EmbeddingOptimizer(self.collection)
        self._dense_optimizer = torch.optim.SGD(self.head.parameters(), lr=HEAD_LR)
        self._schedule = torch.optim.lr_scheduler.ExponentialLR(self._optimizer, scenario.decay)
        self._both = JointOptimizer(self._dense_optimizer, self._optimizer)
        self._scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if scenario.is_scaled else None
        self._averages = AveragedRows(self.collection, 0.5) if scenario.averages else None

    def train(self) -> None:
        """All steps."""
        scenario, step = self._scenario, 0
        self._migrate(step)
        while step < scenario.num_steps:
            self._reload(step)
            if scenario.pipeline is not None:
                step = self._train_pipelined(step)
            else:
                self._train_plain(step)
                step += 1
                self._migrate(step)
        self._reload(step)
        self.collection.synchronize()
        _keep(self.collection, scenario, self.head, self.trained)

    def _migrate(self, step: int) -> None:
        """Goes over to another plan."""
        for before, plan in self._scenario.migrations:
            if before == step:
                self.collection.migrate(plan)
                self._averages = AveragedRows(self.collection, 0.5) if self._scenario.averages else None
                dynamic = dict(self._scenario.dynamic)
                tables = tuple(table for table in self.collection.plan.tables if table.shape.name not in dynamic)
                assert replace(self.collection.plan, tables=tables) == plan

    def _reload(self, step: int) -> None:
        """Goes over to what a checkpoint has."""
        if step in self._scenario.reloads:
            assert self._scenario.folder is not None
            folder = self._scenario.folder / f"before {step}"
            rowmesh.save(folder, self._state)
            self.collection.close()
            # Rows of ids that a dynamic table does not know are in no checkpoint: they start from the seed.
            self._begin(self._scenario.seed + (not self._scenario.dynamic))
            for parameter in self.head.parameters():
                parameter.data.zero_()
            rowmesh.load(folder, self._state)

    @property
    def _state(self) -> dict[str, Any]:
        parts = {"tables": self.collection, "head": self.head, "both": self._both, "schedule": self._schedule}
        return parts if self._scaler is None else {**parts, "scaler": self._scaler}

    def _train_plain(self, step: int) -> None:
        """One step of the plain loop."""
        self._both.zero_grad()
        for part in range(self._scenario.accumulate):
            batch = self._scenario.local_batch(step, part, self._mesh.rank)
            vectors = _look_up(self.collection, self._scenario, self.head.weigh(batch.sparse))
            loss = self._backward(vectors, batch.labels)
            self.trained.outputs.append(vectors.detach().clone())
            self.trained.losses.append(float(_sum(loss, self._mesh)) / self._scenario.global_batch)
        self._average_dense()
        self._step()
        self._schedule.step()
        self._evaluate(step)

    def _train_pipelined(self, step: int) -> int:
        """Steps until one before which something else is to be done; returns its number."""
        scenario = self._scenario
        options = dict(scenario.pipeline or {})
        if disturb := options.get("disturb"):
            options["disturb"] = partial(disturb, self._mesh.rank)
        with Pipeline(self.collection, accumulate=scenario.accumulate, **options) as pipeline:
            self.trained.reasons = pipeline.reasons
            while step < scenario.num_steps:
                if step in scenario.plain:
                    self._train_plain(step)
                    step += 1
                    self._migrate(step)
                else:
                    for window in pipeline.windows(self._items(step)):
                        self._train_window(window)
                        self._evaluate(step)
                        step += 1
                        if step in scenario.pauses:
                            pipeline.pause()
                        self._migrate(step)
                        if step in {*scenario.breaks, *scenario.plain, *scenario.reloads}:
                            break
                if step in scenario.reloads:
                    break
        return step

    def _items(self, step: int) -> Iterator[Item]:
        for later in range(step, self._scenario.num_steps):
            for part in range(self._scenario.accumulate):
                batch = self._scenario.local_batch(later, part, self._mesh.rank)
                yield Item(batch.sparse, batch.labels)

    def _train_window(self, window: BatchInFlight[Item]) -> None:
        self._both.zero_grad()
        found: list[list[Tensor]] = [[] for _ in window.items]
        losses = [torch.zeros((), dtype=self._scenario.dtype) for _ in window.items]
        for part in window:
            place = next(place for place, item in enumerate(window.items) if item is part.item)
            found_rows = part.embeddings if self.head.positions is None else part.look_up(self.head.weigh)
            vectors = _joined(found_rows, self._scenario)
            losses[place] += self._backward(vectors, part.item.labels[part.samples])
            found[place].append(vectors.detach().clone())
        if self._scaler is not None or self._scenario.max_norm is not None:
            self._average_dense()
            self._step()
        else:
            self._optimizer.step()
            self._average_dense()
            self._dense_optimizer.step()
        for place, loss in enumerate(losses):
            vectors, order = torch.cat(found[place]), window.orders[place]
            self.trained.outputs.append(vectors if order is None else vectors[order.argsort()])
            self.trained.losses.append(float(_sum(loss, self._mesh)) / self._scenario.global_batch)
        self._schedule.step()

    def _backward(self, vectors: Tensor, labels: Tensor) -> Tensor:
        losses = F.binary_cross_entropy_with_logits(self.head(vectors), labels, reduction="sum")
        loss = losses * self._mesh.world_size / self._scenario.global_batch
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return losses.detach()

    def _average_dense(self) -> None:
        for parameter in self.head.parameters():
            assert parameter.grad is not None
            parameter.grad = _sum(parameter.grad, self._mesh) / self._mesh.world_size

    def _step(self) -> None:
        """Of the network and of rows, which are clipped together."""
        if self._scenario.max_norm is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self._both)
            self._optimizer.clip_grad_norm_(self._scenario.max_norm, self.head.parameters())
        if self._scaler is None:
            self._both.step()
        else:
            self._scaler.step(self._both)
            self._scaler.update()

    def _evaluate(self, step: int) -> None:
        if self._scenario.evaluates:
            with torch.no_grad():
                later = self._scenario.local_batch(step + 1, 0, self._mesh.rank)
                sparse = self.head.weigh(later.sparse)
                self.trained.outputs.append(_look_up(self.collection, self._scenario, sparse))
        if self._averages is not None:
            self._averages.update()
            with torch.no_grad(), self._averages.applied():
                sparse = self.head.weigh(self._scenario.local_batch(step + 1, 0, self._mesh.rank).sparse)
                self.trained.averaged.append(_look_up(self.collection, self._scenario, sparse))


def _look_up(collection: EmbeddingCollection, scenario: Scenario, sparse: SparseBatch) -> Tensor:
    return _joined(collection(sparse), scenario)


def _joined(found: Embeddings, scenario: Scenario) -> Tensor:
    vectors = []
    for name, table in scenario.features:
        vector = found[name]
        if table.pooling == "none":
            vector = sum_sequence(vector.values.cpu(), vector.offsets.cpu())
        vectors.append(vector.cpu())
    return torch.cat(vectors, 1)


def _sum(value: Tensor, mesh: Mesh) -> Tensor:
    value = value.clone()
    if mesh.group is not None:
        dist.all_reduce(value, group=mesh.group)
    return value


def _keep(collection: EmbeddingCollection, scenario: Scenario, head: Head, trained: Trained) -> None:
    ids = {table.name: table.num_rows for table in scenario.tables}
    for table in collection.tables:
        if table.storage == "dynamic":
            trained.rows[table.name] = _rows_of_ids(collection, table, ids[table.name])
            trained.state[table.name] = {}
            continue
        if table.storage == "tensor_train":
            cores = collection.cores(table.name)
            trained.rows[table.name] = joined_cores(cores.cores)
            trained.state[table.name] = {name: joined_cores(kept) for name, kept in cores.state.items()}
            trained.copies[table.name] = ([], {})
            continue
        pieces = collection.local_rows(table.name)
        trained.owned[table.name] = [row for piece in pieces for row in piece.rows]
        trained.rows[table.name] = joined(pieces, "values", table)
        trained.state[table.name] = {name: joined(pieces, name, table) for name in table.optimizer.state}
        held = collection.held_rows(table.name)
        kinds = ("values", *table.optimizer.state)
        trained.copies[table.name] = (
            [row for piece in held for row in piece.rows],
            {k: joined(held, k, table) for k in kinds},
        )
    trained.head = [parameter.detach().clone() for parameter in head.parameters()]
    trained.common = collection.common_counters
    trained.counters = {counters.group: counters for counters in collection.counters}


def _rows_of_ids(collection: EmbeddingCollection, table: TableSpec, num_ids: int) -> Tensor:
    """What ids from 0 read, whether they are known, demoted, or were never seen."""
    feature = table.features[0]
    batch = SparseBatch.from_bags({feature: [[i] for i in range(num_ids)]})
    with torch.no_grad():
        found = collection(batch, features=[feature])[feature]
    return (found.values if table.pooling == "none" else found).clone()


def joined(pieces: list[LocalRows], kind: str, table: TableSpec) -> Tensor:
    """A copy of the values or of one state of several pieces of a table, in their order."""
    by_row = kind != "values" and table.optimizer.state[kind] == "row"
    nothing = torch.zeros(0, *(() if by_row else (table.dim,)), dtype=table.dtype if kind == "values" else None)
    parts = [piece.values if kind == "values" else piece.state[kind] for piece in pieces if len(piece.rows)]
    return torch.cat(parts) if parts else nothing


def merged(scenario: Scenario, parts: list[Trained]) -> Trained:
    """One job from what each rank left: whole tables, outputs of all samples."""
    whole = Trained(losses=parts[0].losses, head=parts[0].head, transport=parts[0].transport)
    whole.outputs = [torch.cat(outputs) for outputs in zip(*(part.outputs for part in parts), strict=True)]
    whole.averaged = [torch.cat(outputs) for outputs in zip(*(part.averaged for part in parts), strict=True)]
    for table in scenario.stored:
        if table.storage in ("tensor_train", "dynamic"):
            _merge_equal(table.name, whole, parts)
            continue
        order = torch.tensor([row for part in parts for row in part.owned[table.name]], dtype=torch.int64)
        assert order.sort().values.tolist() == list(range(table.num_rows)), "every row has one owner"
        whole.rows[table.name] = torch.cat([part.rows[table.name] for part in parts])[order.argsort()]
        whole.state[table.name] = {
            name: torch.cat([part.state[table.name][name] for part in parts])[order.argsort()]
            for name in table.optimizer.state
        }
    return whole


def _merge_equal(table: str, whole: Trained, parts: list[Trained]) -> None:
    whole.rows[table], whole.state[table] = parts[0].rows[table], parts[0].state[table]
    for part in parts[1:]:
        assert torch.equal(part.rows[table], whole.rows[table]), "cores, and rows by id, are equal on all ranks"
        assert all(torch.equal(part.state[table][name], kept) for name, kept in whole.state[table].items())


# The reference: torch alone, one process, the whole global batch.


class ReferenceTable:
    """A table as `nn.EmbeddingBag` with a dense gradient, and its optimizer."""

    def __init__(self, table: TableSpec, seed: int, dtype: torch.dtype) -> None:
        self.table = table
        rows = np.arange(table.num_rows)
        a, b = table.initializer.parameters(table.num_rows)
        start = torch.from_numpy(
            initial_values(table_key(seed, table.name), rows, table.dim, table.initializer.name, a, b)
        )
        self.bag = torch.nn.EmbeddingBag(
            table.num_rows,
            table.dim,
            mode="mean" if table.pooling == "mean" else "sum",
            include_last_offset=True,
            _weight=start.to(dtype).to(table.dtype).to(dtype),
        )
        self.parameters = list(self.bag.requires_grad_(not table.frozen).parameters())
        self._start = self.bag.weight.detach().clone()
        self.touched = torch.zeros(table.num_rows, dtype=torch.bool)
        shapes = {"row": (table.num_rows,), "element": (table.num_rows, table.dim)}
        self.state = {
            name: torch.full(shapes[extent], table.optimizer.initial_state[name], dtype=dtype)
            for name, extent in table.optimizer.state.items()
        }
        rule = table.optimizer
        self._torch: torch.optim.Optimizer | None = None
        if isinstance(rule, SGD):
            self._torch = torch.optim.SGD(self.bag.parameters(), lr=rule.lr)
        if isinstance(rule, AdaGrad):
            self._torch = torch.optim.Adagrad(
                self.bag.parameters(), lr=rule.lr, eps=rule.eps, initial_accumulator_value=rule.initial_accumulator
            )

    def look_up(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """One vector a bag, as torch computes it; weights of a mean are divided by the bag's size."""
        if torch.is_grad_enabled():
            self.touched[ids] = True
        if self.table.pooling == "none":
            values = F.embedding(ids, self.bag.weight)
            return sum_sequence(values if weights is None else values * weights[:, None], offsets)
        if weights is None:
            return self.bag(ids, offsets)
        if self.table.pooling == "mean":
            weights = weights / torch.repeat_interleave(offsets.diff(), offsets.diff())
        return F.embedding_bag(
            ids, self.bag.weight, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )

    def step(self, decay: float, number: int) -> None:
        """One step of the rule; rows that no id named must not change."""
        if self.table.frozen:
            return
        rule, weight = self.table.optimizer, self.bag.weight.data
        gradient = self.bag.weight.grad
        if gradient is None:  # no sample anywhere
            gradient = torch.zeros_like(weight)
        before = weight.clone()
        if isinstance(rule, Adam):
            weight[self.touched] *= 1 - rule.lr * decay * rule.weight_decay
        elif rule.weight_decay:
            gradient[self.touched] += rule.weight_decay * weight[self.touched]
        if self._torch is not None:
            self._torch.param_groups[0]["lr"] = rule.lr * decay
            self._torch.step()
        elif isinstance(rule, RowWiseAdaGrad):
            self.state["sum"] += gradient.square().mean(1)
            weight -= rule.lr * decay * gradient / (self.state["sum"].sqrt() + rule.eps)[:, None]
        elif isinstance(rule, Adam):
            self._lazy_adam(rule, gradient, rule.lr * decay, number)
        if isinstance(rule, AdaGrad):
            self.state["sum"] = self._torch.state[self.bag.weight]["sum"]  # type: ignore[union-attr]
        if self.table.dtype == torch.bfloat16:
            weight.copy_(weight.bfloat16().float())
        assert torch.equal(weight[~self.touched], before[~self.touched])
        self.bag.weight.grad = None
        self.touched[:] = False

    def begin_anew(self, rows: np.ndarray) -> None:
        """Sets rows and their states to what they start from, and drops their gradients."""
        self.bag.weight.data[rows] = self._start[rows]
        for name, state in self.state.items():
            state[rows] = self.table.optimizer.initial_state[name]
        if self._torch is not None:
            for state in self._torch.state[self.bag.weight].values():
                if state.shape == self._start.shape:
                    state[rows] = self.table.optimizer.initial_state["sum"]
        if self.bag.weight.grad is not None:
            self.bag.weight.grad[rows] = 0.0

    @property
    def values(self) -> Tensor:
        """All rows."""
        return self.bag.weight.data

    def _lazy_adam(self, rule: Adam, gradient: Tensor, lr: float, number: int) -> None:
        g, m, v, at = gradient[self.touched], self.state["m"], self.state["v"], self.touched
        m[at] = rule.beta1 * m[at] + (1 - rule.beta1) * g
        v[at] = rule.beta2 * v[at] + (1 - rule.beta2) * g * g
        root = (v[at] / (1 - rule.beta2**number)).sqrt() + rule.eps
        self.bag.weight.data[at] -= lr * (m[at] / (1 - rule.beta1**number)) / root


def train_reference(scenario: Scenario) -> Trained:
    """Runs a job as one torch process on the whole global batch."""
    kinds = {"dense": ReferenceTable, "tiered": ReferenceTable, "tensor_train": ReferenceCores}
    tables = {table.name: kinds[table.storage](table, scenario.seed, scenario.dtype) for table in scenario.tables}
    head, trained = Head(scenario), Trained(transport="reference")
    dense_optimizer, known = torch.optim.SGD(head.parameters(), lr=HEAD_LR), KnownIds(scenario, tables)
    for step in range(scenario.num_steps):
        dense_optimizer.zero_grad()
        for part in range(scenario.accumulate):
            known.open(step, part)
            vectors = _look_up_reference(tables, head, scenario, step, part)
            labels = torch.cat([scenario.local_batch(step, part, r).labels for r in range(scenario.world_size)])
            losses = F.binary_cross_entropy_with_logits(head(vectors), labels, reduction="sum")
            (losses / scenario.global_batch).backward()
            trained.outputs.append(vectors.detach().clone())
            trained.losses.append(float(losses.detach()) / scenario.global_batch)
        if scenario.max_norm is not None:
            known.forget_unknown()  # whose gradients do not count
            of_tables = [parameter for table in tables.values() for parameter in table.parameters]
            torch.nn.utils.clip_grad_norm_([*head.parameters(), *of_tables], scenario.max_norm)
        dense_optimizer.step()
        for table in tables.values():
            table.step(scenario.decay**step, step + 1)
        if scenario.evaluates:
            known.forget_unknown()
            with torch.no_grad():
                trained.outputs.append(_look_up_reference(tables, head, scenario, step + 1, 0))
    known.forget_unknown()
    for name, table in tables.items():
        trained.rows[name], trained.state[name] = table.values, table.state
    trained.head = [parameter.detach().clone() for parameter in head.parameters()]
    return trained


def _look_up_reference(
    tables: dict[str, ReferenceTable | ReferenceCores], head: Head, scenario: Scenario, step: int, part: int
) -> Tensor:
    """The vectors of the global batch: the samples of rank 0, then those of rank 1, …"""
    batches = [scenario.local_batch(step, part, rank).sparse for rank in range(scenario.world_size)]
    vectors = []
    for place, (name, spec) in enumerate(scenario.features):
        ids, lengths, weights = [], [torch.zeros(1, dtype=torch.int64)], []
        for batch in batches:
            begin, end = batch.feature_range(place)
            ids.append(batch.ids[begin:end])
            bags = batch.offsets[place * batch.batch_size : (place + 1) * batch.batch_size + 1]
            lengths.append(bags.diff())
            if batch.weights is not None:
                weights.append(batch.weights[begin:end])
        offsets = torch.cat(lengths).cumsum(0)
        given = torch.cat(weights) if weights else None
        if head.positions is not None:
            positions = [torch.arange(int(length)) for length in offsets.diff()]
            learned = head.positions.of(name)[torch.cat([*positions, offsets[:0]])]
            given = learned if given is None else learned * given
        vectors.append(tables[spec.name].look_up(torch.cat(ids), offsets, given))
    return torch.cat(vectors, 1)
