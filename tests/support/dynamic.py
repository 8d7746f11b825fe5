"""Dynamic tables beside an oracle: the rules in plain Python, and a dense table whose rows begin anew where they say.

The dense table has a row for every id that occurs, and the same seed, so the row of an id starts from the same values.
Where the rules give an id a new row, admitted or not, its dense row is set back before the look-up. All else must be
equal to the bit, on the same ranks: vectors, rows, optimizer states, counts, last steps and scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.data import Batch
from rowmesh.dynamic.reference import ReferenceShards
from rowmesh.mesh import Mesh
from rowmesh.ops.initialize import initialize
from rowmesh.pipeline import Pipeline
from rowmesh.tables import Dynamic, Uniform
from rowmesh.tables.initializer import table_key
from tests.support.tables import OPTIMIZERS

BOUND, MOST_ID = 0.5, 64


@dataclass(frozen=True)
class Stream:
    """Random batches, the same wherever they are drawn.

    Attributes:
        rules: of the tables, by name.
        seed: of the ids.
        num_steps: batches.
        batch_size: samples a rank.
        rule: name of the update rule.
        evaluates: whether the last batch is looked up without gradients after each step.
    """

    rules: tuple[tuple[str, Dynamic], ...]
    seed: int = 0
    num_steps: int = 8
    batch_size: int = 3
    rule: str = "row_wise_adagrad"
    evaluates: bool = False

    def specs(self, *, is_dynamic: bool) -> list[TableSpec]:
        """The dynamic tables, or dense ones in their place; and a dense one beside."""
        options = {"optimizer": OPTIMIZERS[self.rule], "initializer": Uniform(bound=BOUND)}
        specs = []
        for number, (name, rules) in enumerate(self.rules):
            features = (name, f"{name}_too") if number == 0 else (name,)
            shape = {"dim": 3 if number == 0 else 4, "features": features, **options}
            if is_dynamic:
                specs.append(TableSpec(name=name, storage="dynamic", dynamic=rules, **shape))
            else:
                specs.append(TableSpec(name=name, num_rows=MOST_ID, **shape))
        return [*specs, TableSpec(name="plain", num_rows=7, dim=3, **options)]

    def batch(self, step: int, rank: int) -> SparseBatch:
        """One rank's part of a step's batch; some ids are much more frequent than others."""
        drawn = np.random.default_rng([self.seed, step, rank])
        bags = {}
        for spec in self.specs(is_dynamic=False):
            for name in spec.features:
                sizes = drawn.integers(0, 4, self.batch_size)
                bags[name] = [(spec.num_rows * drawn.random(size) ** 3).astype(int).tolist() for size in sizes]
        return SparseBatch.from_bags(bags)


@dataclass
class Seen:
    """What one rank saw: the vectors of each step, and after the last (or each) step what is known."""

    vectors: list[torch.Tensor]
    evaluated: list[torch.Tensor]
    known: list[dict[str, dict[int, tuple]]]
    counters: dict[str, tuple[int, ...]]
    transport: str = ""


def ids_of(batch: SparseBatch, spec: TableSpec) -> np.ndarray:
    parts = [batch.ids[slice(*batch.feature_range(batch.features.index(name)))] for name in spec.features]
    return torch.cat(parts).numpy()


def initial_row(spec: TableSpec, i: int) -> torch.Tensor:
    row = torch.empty(1, spec.dim)
    initialize(row, table_key(0, spec.name), first=i, stride=1, distribution="uniform", a=-BOUND, b=BOUND)
    return row[0]


def _loss(vectors: torch.Tensor) -> torch.Tensor:
    return (vectors * vectors).sum() + vectors.sum()


def run_oracle(mesh: Mesh, stream: Stream, replicas: int = 1, *, every_step: bool = True) -> Seen:
    """What must come out, by dense tables and the rules as written."""
    specs = stream.specs(is_dynamic=False)
    embeddings = EmbeddingCollection(specs, mesh=mesh, transport="collective", replicas=replicas)
    optimizer = EmbeddingOptimizer(embeddings)
    rules = {
        name: ReferenceShards(name, rules, range(rules.num_shards), rules.capacity + 1000)
        for name, rules in stream.rules
    }
    seen, counters = Seen([], [], [], {}), {name: np.zeros(4, int) for name in rules}
    for step in range(stream.num_steps):
        batches = [stream.batch(step, rank) for rank in range(mesh.world_size)]
        for spec in specs[: len(rules)]:
            everyone = np.concatenate([ids_of(batch, spec) for batch in batches])
            ids, counts = np.unique(everyone, return_counts=True)
            opened = rules[spec.name].open(ids, counts, step + 1)
            rules[spec.name].release(np.concatenate([opened.evicted_frames, opened.frames[opened.guest]]))
            _begin_anew(embeddings, spec, ids[opened.fresh])
            counters[spec.name] += [opened.num_hits, opened.num_admitted, opened.num_evicted, opened.num_dropped]
        vectors = embeddings(batches[mesh.rank]).values
        seen.vectors.append(vectors.detach().clone())
        _loss(vectors).backward()
        optimizer.step()
        if stream.evaluates:
            batch = stream.batch(stream.num_steps, mesh.rank)
            for spec in specs[: len(rules)]:
                ids = np.arange(MOST_ID)
                _begin_anew(embeddings, spec, ids[rules[spec.name].find(ids) < 0])
            with torch.no_grad():
                seen.evaluated.append(embeddings(batch).values.clone())
        if every_step or step + 1 == stream.num_steps:
            seen.known.append({spec.name: _known_of_dense(embeddings, spec, rules) for spec in specs[: len(rules)]})
    seen.counters = {name: tuple(numbers.tolist()) for name, numbers in counters.items()}
    return seen


def _begin_anew(embeddings: EmbeddingCollection, spec: TableSpec, ids: np.ndarray) -> None:
    """Sets dense rows to what they start from."""
    embeddings.forget_differences()
    embeddings.barrier()
    for piece in embeddings.held_rows(spec.name):
        for i in ids.tolist():
            if i in piece.rows:
                place = piece.rows.index(i)
                piece.values[place] = initial_row(spec, i)
                for name, state in piece.state.items():
                    state[place] = spec.optimizer.initial_state[name]
    embeddings.barrier()


def _known_of_dense(embeddings: EmbeddingCollection, spec: TableSpec, rules: dict) -> dict[int, tuple]:
    """By id, of those that this rank holds: row, states, count, last step, score."""
    known, shards = {}, rules[spec.name]
    states = [shards.state_of(shard) for shard in shards.shards]
    facts = {
        i: numbers
        for state in states
        for i, *numbers in zip(
            *(getattr(state, name).tolist() for name in ("ids", "counts", "last_steps", "scores")), strict=True
        )
    }
    for piece in embeddings.local_rows(spec.name):
        for place, i in enumerate(piece.rows):
            if i in facts:
                tensors = [piece.values[place], *(state[place] for state in piece.state.values())]
                known[i] = (*(tensor.numpy().tobytes() for tensor in tensors), *facts[i])
    embeddings.barrier()
    return known


def known_of(embeddings: EmbeddingCollection, name: str) -> dict[int, tuple]:
    """The same of a dynamic table."""
    rows = embeddings.known_rows(name)
    known = {}
    for place, i in enumerate(rows.ids.tolist()):
        tensors = [rows.values[place], *(state[place] for state in rows.state.values())]
        facts = [int(column[place]) for column in (rows.counts, rows.last_steps, rows.scores)]
        known[i] = (*(tensor.numpy().tobytes() for tensor in tensors), *facts)
    return known


def make(mesh: Mesh, stream: Stream, transport: str = "auto", replicas: int = 1) -> EmbeddingCollection:
    return EmbeddingCollection(stream.specs(is_dynamic=True), mesh=mesh, transport=transport, replicas=replicas)


def run_dynamic(mesh: Mesh, stream: Stream, transport: str = "auto", replicas: int = 1) -> Seen:
    """A plain loop."""
    embeddings = make(mesh, stream, transport, replicas)
    optimizer, seen = EmbeddingOptimizer(embeddings), Seen([], [], [], {}, embeddings.transport)
    for step in range(stream.num_steps):
        vectors = embeddings(stream.batch(step, mesh.rank)).values
        seen.vectors.append(vectors.detach().clone())
        _loss(vectors).backward()
        optimizer.step()
        _evaluate(mesh, stream, embeddings, seen)
        seen.known.append({name: known_of(embeddings, name) for name, _ in stream.rules})
    seen.counters = _counters(embeddings)
    return seen


def run_pipeline(mesh: Mesh, stream: Stream, transport: str, depth: int, parts: int = 1, replicas: int = 1) -> Seen:
    """A pipeline, which knows the end alone."""
    embeddings = make(mesh, stream, transport, replicas)
    optimizer, seen = EmbeddingOptimizer(embeddings), Seen([], [], [], {}, embeddings.transport)
    size = stream.batch_size
    batches = [
        Batch(torch.zeros(size, 0), stream.batch(step, mesh.rank), torch.zeros(size))
        for step in range(stream.num_steps)
    ]
    with Pipeline(embeddings, depth=depth, micro_batches=parts) as pipeline:
        for window in pipeline.windows(batches):
            vectors = []
            for part in window:
                vectors.append(part.embeddings.values.detach().clone())
                _loss(part.embeddings.values).backward()
            seen.vectors.append(torch.cat(vectors))
            optimizer.step()
            _evaluate(mesh, stream, embeddings, seen)
    seen.known.append({name: known_of(embeddings, name) for name, _ in stream.rules})
    seen.counters = _counters(embeddings)
    return seen


def _evaluate(mesh: Mesh, stream: Stream, embeddings: EmbeddingCollection, seen: Seen) -> None:
    if stream.evaluates:
        with torch.no_grad():
            seen.evaluated.append(embeddings(stream.batch(stream.num_steps, mesh.rank)).values.clone())


def _counters(embeddings: EmbeddingCollection) -> dict[str, tuple[int, ...]]:
    return {
        name: (each.hits, each.admitted, each.evicted, each.guests)
        for name, each in embeddings.dynamic_counters.items()
    }


def assert_same(mine: list[Seen], expected: list[Seen], replicas: int = 1) -> None:
    """To the bit: what each rank looked up, and what all ranks together know. Counters add up."""
    for one, other in zip(mine, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.vectors, other.vectors, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(one.evaluated, other.evaluated, strict=True))
    for name in expected[0].counters:
        total = np.sum([seen.counters[name] for seen in mine if name in seen.counters], axis=0)
        assert tuple(total) == tuple(replicas * number for number in expected[0].counters[name])
        for of_mine, of_expected in zip(
            zip(*(seen.known for seen in mine), strict=True),
            zip(*(seen.known for seen in expected), strict=True),
            strict=True,
        ):
            assert _joined([each[name] for each in of_mine], replicas) == _joined([each[name] for each in of_expected])


def _joined(parts: list[dict[int, tuple]], replicas: int = 1) -> dict[int, tuple]:
    """Those of all ranks; each id stands on as many ranks as there are replicas, alike."""
    joined: dict[int, tuple] = {}
    for part in parts:
        for i, facts in part.items():
            assert joined.setdefault(i, facts) == facts
    assert sum(map(len, parts)) == replicas * len(joined)
    return joined
