"""SequenceTask: the item that follows each event of a user, ranked among all items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from rowmesh.collection.outputs import Embeddings
from rowmesh.data.events import SequenceLoader
from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.mesh.together import summed
from rowmesh.models.sequence import Kind, SequenceEncoder
from rowmesh.models.sequence.losses import binary_cross_entropy, cosine, sampled_softmax, score_shape
from rowmesh.ops.linear import Shape
from rowmesh.placement.plan import TableShape
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.run.config import Config, chosen
from rowmesh.run.evaluation import Evaluation
from rowmesh.run.fingerprint import Fingerprint, digest_values
from rowmesh.run.graphs import Network
from rowmesh.run.job import Job
from rowmesh.run.own_model import OwnModel
from rowmesh.run.report import steps_of_splits
from rowmesh.run.section import shared
from rowmesh.run.sequence.batches import Draws, SequencePart, SequenceStep, StepLoader
from rowmesh.run.sequence.data import ITEM, SCORED, SequenceData
from rowmesh.run.sequence.evaluation import USERS, RankingEvaluation, evaluate_ranking, ranking_table
from rowmesh.run.sequence.options import SequenceOptions
from rowmesh.run.sequence.profile import profile_events
from rowmesh.run.sequence.sharded_softmax import item_range, sharded_softmax
from rowmesh.run.stopping import EarlyStopping
from rowmesh.run.table_config import TableConfig
from rowmesh.run.tables import table_specs
from rowmesh.run.targets import Target
from rowmesh.run.task import Computed, StepBatch, TrainingLoader
from rowmesh.tables import TableSpec

_COPIES = 8  # of parameters on a rank: gradients, state and what averaging takes


@dataclass(frozen=True, eq=False)
class SequenceTask:
    """The task of SASRec, HSTU and FuXi.

    Attributes:
        config: of the run.
        data: its events.
    """

    config: Config
    data: SequenceData

    @property
    def targets(self) -> tuple[Target, ...]:
        """No label."""
        return ()

    @property
    def is_relative(self) -> bool:
        """1 − NDCG@10 is compared as it is."""
        return False

    @cached_property
    def options(self) -> SequenceOptions:
        """`model.options`."""
        return self.config.model.sequence

    def check(self) -> None:
        """Refuses splits that are not there, and keys that mean nothing for sequences."""
        self.data.split("data.train", self.config.data.train)
        if self.config.data.train != "train":
            raise ConfigurationError(f"data.train={self.config.data.train!r}: a sequence model trains on 'train'")
        for key in ("validation", "test"):
            name = getattr(self.config.data, key)
            if name in self.data.splits or name != key:  # those of the default names may be absent
                self.data.split(f"data.{key}", name)
        for name in self.data.side:
            if (own := self.config.tables.of(name).dim) != (dim := self.config.tables.of(ITEM).dim):
                raise ConfigurationError(
                    f"tables.{name}.dim={own}, and tables.{ITEM}.dim={dim}: the vectors of a side column are added to "
                    "those of items; give one dim to all tables"
                )
        for problem in _problems(self.config):
            raise ConfigurationError(f"{problem} with model.name = {self.config.model.name!r}")

    def profile(
        self, shapes: Sequence[TableShape], request: Request, world_size: int, *, count_batches: bool = False
    ) -> Profile:
        """By the events that steps read, and the items that they score; see `rowmesh.run.sequence.profile`."""
        return profile_events(self.config, self.data, shapes, request, world_size, count_batches=count_batches)

    def make_network(self, tables: Sequence[TableSpec]) -> tuple[nn.Module, OwnModel | None]:
        """The encoder."""
        kind = cast(Kind, self.config.model.name)
        return SequenceEncoder(kind, dim=tables[0].dim, **shared(self.options, SequenceEncoder)), None

    def network_bytes(self, world_size: int, *, trains: bool) -> int:
        """Parameters, gradients and state; what a batch leaves in it is not known."""
        network, _ = self.make_network(table_specs(self.config.tables, self.data))
        return sum(parameter.nbytes for parameter in network.parameters()) * (_COPIES if trains else 1)

    @property
    def has_times(self) -> bool:
        """Users come in any order, and their events with them."""
        return False

    @property
    def has_scores(self) -> bool:
        """Events have none."""
        return False

    def linear_rows(self) -> int:
        """About one an event."""
        counts = self.data.sequences.counts
        mean = min(counts.num_events // max(counts.num_users, 1), self.options.max_length)
        return chosen(self.config.data.batch_size) * max(mean, 1)

    @property
    def linear_rows_vary(self) -> bool:
        """Users have another number of events in every step."""
        return True

    def score_shapes(self) -> list[Shape]:
        """That of the full softmax."""
        is_full = self.options.loss == "full_softmax"
        return [score_shape(chosen(self.config.tables.of(ITEM).dim))] if is_full else []

    def fingerprint(self) -> Fingerprint:
        """Digests of the vocabularies of items and side columns; raw ids have no vocabulary."""
        sequences = self.data.sequences
        side = {f"vocabulary of {name}": digest_values(sequences.side_values(name)) for name in self.data.side}
        if sequences.raw is not None:
            return {f"ids of {ITEM}": "raw", **side}
        return {f"vocabulary of {ITEM}": digest_values(sequences.item_values()), **side}

    def check_split(self, key: str, split: str) -> str:
        """The split, which predicts the last event of each user."""
        if self.data.split(key, split) == "train":
            raise ConfigurationError(f"{key}: the items of 'train' are known to the model; give validation or test")
        return split

    @property
    def tested(self) -> str:
        """The split for it, where there is one."""
        return self.config.data.test if self.config.data.test in self.data.splits else ""

    def loader(self, job: Job, *, validates: bool, is_asked: Callable[[], bool]) -> TrainingLoader:
        """Steps of the training split; held-out events are none of it, whether they are validated on or not."""
        loader = SequenceLoader(
            self.data.sequences,
            "train",
            batch_size=chosen(self.config.data.batch_size),
            max_length=self.options.max_length,
            rank=job.mesh.rank,
            world_size=job.mesh.world_size,
            shuffle=self.config.data.shuffle,
            seed=self.config.train.seed,
        )
        num_parts = self.config.pipeline.micro_batches
        assert num_parts != "auto", "refused before the run"
        if self.options.samples:
            return StepLoader(loader, self._draws, num_parts, self.data.side)
        mesh = scoring_mesh(job)
        mine = item_range(self.data.sequences.num_items, mesh.rank, mesh.world_size)
        return StepLoader(loader, mine, num_parts, self.data.side)

    def check_batch(self, batch: StepBatch, where: str) -> None:
        """Events were checked when they were opened."""

    def global_weight(self, job: Job, batch: StepBatch, step: int) -> float:
        """Positions of all ranks."""
        return summed(job.mesh, batch.weight, "counting the positions of all ranks")

    def compute(
        self, job: Job, batch: StepBatch, embeddings: Embeddings, network: Network | None, samples: slice | None = None
    ) -> Computed:
        """The losses of all positions."""
        assert isinstance(batch, SequenceStep)
        parts = batch.parts[samples or slice(None)]
        lengths = [part.events.num_ids for part in parts]
        vectors = zip(*(embeddings[name].values.split(lengths) for name in (ITEM, *self.data.side)), strict=True)
        scored = embeddings[SCORED].values.split([len(part.scored) for part in parts])
        totals = [self._total(job, *each) for each in zip(parts, vectors, scored, strict=True)]
        return Computed(totals[0] if len(totals) == 1 else torch.stack(totals).sum())

    def evaluate(self, job: Job, split: str, on_batch: Callable[[int], None]) -> Evaluation:
        """Beside popularity."""
        name = self.data.split("--split", split)
        return evaluate_ranking(job, self.data.sequences, name, self.options, on_batch, with_floor=True)

    def validate(self, job: Job) -> Evaluation:
        """On the validation split."""
        name = self.data.split("data.validation", self.config.data.validation)
        return evaluate_ranking(job, self.data.sequences, name, self.options)

    def num_evaluation_batches(self, split: str) -> int:
        """Batches that hold all users of the split."""
        return -(-self.data.splits[split].samples // USERS)

    def chosen_by(self, loss: float | None) -> dict[str, float | None]:
        """The NDCG@10 of the validation."""
        return {"validation_ndcg@10": None if loss is None else 1.0 - loss}

    def describe(self, job: Job) -> list[tuple[str, str]]:
        """Users, items and events, and what is cut off."""
        counts, options = self.data.sequences.counts, self.options
        splits = ", ".join(f"{name} {split.samples:,}" for name, split in self.data.splits.items())
        unverified = f"; {self.data.verification}" if self.data.verification else ""
        lines = [
            f"{self.data.folder}: {counts.num_users:,} users, {counts.num_items:,} items, {counts.num_events:,} "
            f"events; {splits} users predict something{unverified}"
        ]
        if self.data.side:
            sizes = ", ".join(f"{name} ({self.data.table(name).num_rows:,} values)" for name in self.data.side)
            lines.append(f"side columns are added to the items: {sizes}")
        loader = SequenceLoader(self.data.sequences, "train", batch_size=1, max_length=options.max_length, prefetch=0)
        if loader.num_cut_events:
            share = loader.num_cut_events / counts.num_events
            lines.append(
                f"{loader.num_cut_events:,} events ({share:.1%}) are not read in training: users have more than "
                f"model.options.max_length={options.max_length}"
            )
        return [("data", line) for line in lines]

    def describe_steps(self, total_steps: int | None) -> list[tuple[str, str]]:
        """Epochs over the users."""
        return steps_of_splits(self.config, self.data, total_steps)

    def describe_loss(self, job: Job) -> str:
        """The loss, and what it compares with."""
        options = self.options
        parts = [options.loss.replace("_", " ")]
        if options.samples:
            whose = "shared by all positions" if options.shares else "a position"
            parts.append(f"{options.num_negatives} items drawn {_DRAWN[options.draw]}, {whose}")
        if options.log_q:
            parts.append("corrected for how they are drawn")
        parts.append(f"cosine, temperature {options.temperature:g}" if options.is_cosine else "inner product")
        return ", ".join(parts)

    def results(self, split: str, evaluation: Evaluation) -> list[str]:
        """Beside popularity, and the planted model where there is one."""
        assert isinstance(evaluation, RankingEvaluation)
        seen = "those that the user has seen are not" if self.options.seen == "remove" else "those seen, too"
        title = f"{split}: {evaluation.users:,} users, {evaluation.candidates:,} items are ranked, {seen}"
        rows: list[tuple[str, Mapping[str, float]]] = [
            ("trained", {name: mean.value for name, mean in evaluation.means.items()})
        ]
        if (best := self.optimum(split)) is not None:
            rows.append(("planted optimum", best))
        if evaluation.floor:
            rows.append(("popularity", {name: mean.value for name, mean in evaluation.floor.items()}))
        low, high = evaluation.means["ndcg@10"].interval
        return [
            *ranking_table(title, rows),
            f"  NDCG@10 within {low:.5f} and {high:.5f} (95 % over users); {evaluation.means['tied'].value:.1%} of the "
            f"targets tie, at {self.options.ties}",
        ]

    def optimum(self, split: str) -> Mapping[str, float] | None:
        """Scores of the model that the events were drawn from."""
        return self.data.sequences.optimum.get(split)

    def advice(self, job: Job, stopping: EarlyStopping, trained_steps: int, evaluation: Evaluation | None) -> list[str]:
        """Where popularity ranks better, or the end came too early."""
        return [f"warning   {line}" for line in _advice(self.config, stopping, evaluation)]

    def _total(self, job: Job, part: SequencePart, vectors: Sequence[Tensor], scored: Tensor) -> Tensor:
        """The sum of the losses of a micro-batch."""
        events = part.events
        with job.linear():
            queries = job.network(vectors[0], events.offsets, events.times, events.request_times, vectors[1:])
            return self._losses(job, part, queries, scored).sum()

    def _losses(self, job: Job, batch: SequencePart, queries: Tensor, scored: Tensor) -> Tensor:
        """`[P]`."""
        options, targets = self.options, batch.events.targets
        if options.is_cosine:
            queries, scored = cosine(queries, scored, options.temperature)
        if batch.negative_ids is None:
            mesh = scoring_mesh(job)
            part = item_range(self.data.sequences.num_items, mesh.rank, mesh.world_size)
            return sharded_softmax(mesh, queries, targets, scored, part.start)
        positives, negatives = scored.split([len(targets), batch.negative_ids.numel()])
        negatives = negatives.unflatten(0, batch.negative_ids.shape)
        if options.loss == "binary_cross_entropy":
            return binary_cross_entropy(queries, positives, negatives, targets, batch.negative_ids)
        log_q = self._draws.log_q(batch.negative_ids).to(queries.dtype) if options.log_q else None
        return sampled_softmax(queries, positives, negatives, targets, batch.negative_ids, log_q)

    @cached_property
    def _draws(self) -> Draws:
        sequences = self.data.sequences
        return Draws(self.options, sequences.popularity("validation"), self.config.train.seed, sequences.raw)


def scoring_mesh(job: Job) -> Mesh:
    """The ranks that score one table together: all, or those of a replica group, where groups have rows of their own.

    Collective the first time.
    """
    embeddings = job.embeddings
    if embeddings.synchronization.mode == "exact" or (count := embeddings.plan.replicas.get(ITEM, 1)) == 1:
        return job.mesh
    # Rows travel by the group's own connections meanwhile, in other threads.
    return job.mesh.part(embeddings.plan.grid(count).groups).with_process_group("scoring items")


_DRAWN = {"uniform": "uniformly", "popularity": "by popularity"}


def _problems(config: Config) -> Iterator[str]:
    """Keys that mean nothing for sequences, or that cannot be yet."""
    defaults = type(config.train)()
    yield from _problems_of_dynamic(config.model.sequence, config.tables.of(ITEM))
    if config.pipeline.micro_batches == "auto":
        yield "pipeline.micro_batches='auto' cannot be: batches are cut when they are read; give a number"
    for key, default in (("sizes", "even"), ("clustering", "off")):
        if (given := getattr(config.pipeline, key)) != default:
            yield f"pipeline.{key}={given!r} cannot be: micro-batches are balanced by ids; leave it out"
    if config.train.device != "cpu":
        yield f"train.device={config.train.device!r} cannot be yet; leave it out"
    if config.train.precision != "float32":
        yield f"train.precision={config.train.precision!r} cannot be; leave it out"
    for key in ("loss", "loss_weights", "progressive_every", "cuda_graphs"):
        if getattr(config.train, key) != getattr(defaults, key):
            yield f"train.{key} is of clicks and cannot be given"


def _problems_of_dynamic(options: SequenceOptions, table: TableConfig) -> Iterator[str]:
    if not table.takes_any_id:
        if options.item_ids == "raw":
            yield (
                f"model.options.item_ids='raw' with tables.storage={table.storage!r} cannot be: its rows have numbers, "
                "and raw ids are any of 64 bits; give tables.storage=dynamic"
            )
        return
    if not options.samples:
        yield (
            "model.options.loss='full_softmax' with tables.storage='dynamic' cannot be: it is over all items, and "
            "those that such a table knows change in the step; give sampled_softmax or binary_cross_entropy"
        )
    rules = table.dynamic
    if rules.mode == "demote":
        yield (
            "tables.dynamic.mode='demote' cannot be: all known items are ranked at an evaluation, which would bring "
            "every record of the store back; give drop"
        )
    counted = {"admit_after": (rules.admit_after or 1) > 1, "eviction": rules.eviction in ("lfu", "lru_lfu")}
    if options.shares and (keys := [f"tables.dynamic.{key}" for key, counts in counted.items() if counts]):
        yield (
            f"model.options.shared_negatives with {' and '.join(keys)} cannot be: every rank and micro-batch looks "
            "shared negatives up, so that how often ids occur would depend on their number; give "
            "model.options.shared_negatives=false"
        )


def _advice(config: Config, stopping: EarlyStopping, evaluation: Evaluation | None) -> Iterator[str]:
    if isinstance(evaluation, RankingEvaluation) and evaluation.floor:
        reached, floor = evaluation.means["ndcg@10"].value, evaluation.floor["ndcg@10"].value
        if reached < floor:
            yield (
                f"the model ranks worse than popularity (NDCG@10 {reached:.5f} and {floor:.5f}); train longer "
                f"(train.epochs={config.train.epochs}), or at another optimizer.lr ({chosen(config.optimizer.lr):g}) "
                f"and tables.optimizer.lr ({chosen(config.tables.optimizer.lr):g})"
            )
    if len(stopping.losses) > 1 and stopping.best_step == max(stopping.losses):
        yield "the last evaluation was the best: more train.epochs may be better"
