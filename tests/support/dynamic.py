"""Dynamic tables beside an oracle: the rules in plain Python, and a dense table whose rows begin anew where they say.

The dense table has a row for every id that occurs, and the same seed, so the row of an id starts from the same values.
Where the rules give an id a new row, admitted or not, its dense row is set back before the look-up. A demoted id's
dense row stays as it is. All else must be equal to the bit, on the same ranks: vectors, rows, optimizer states, counts,
last steps and scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from functools import partial

import numpy as np
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.collection.outputs import Embeddings
from rowmesh.data import Batch
from rowmesh.errors import DataError, NoRoomError
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.ops.initialize import initialize
from rowmesh.pipeline import Pipeline
from rowmesh.pipeline.schedule import Task
from rowmesh.tables import Dynamic, Uniform
from rowmesh.tables.dynamic.demoted_records import PREFIX
from rowmesh.tables.dynamic.event_clock import NO_TIME
from rowmesh.tables.dynamic.hooks import Decisions
from rowmesh.tables.dynamic.reference import ReferenceShards
from rowmesh.tables.dynamic.state import Statistics
from rowmesh.tables.initializer import table_key
from rowmesh.tables.update_rules import SGD
from tests.support.shards import shard_of
from tests.support.tables import OPTIMIZERS

BOUND, MOST_ID = 0.5, 64
# The ids of the dynamic tables, ascending as the rows of the dense ones in their place: small, negative, the largest.
EDGES = np.array([-(2**63), -(2**63) + 1, -(2**32), -1, 0, 1, 2**31, 2**32, 2**62, 2**63 - 1])
DRAWN = np.random.default_rng(5).integers(-(2**63), 2**63 - 1, MOST_ID - len(EDGES))
IDS = np.unique(np.concatenate([EDGES, DRAWN]))
Vectors = list[torch.Tensor]


@dataclass(frozen=True)
class Stream:
    """Random batches, the same wherever they are drawn.

    Attributes:
        rules: of the tables, by name.
        seed: of the ids.
        num_steps: batches.
        batch_size: samples a rank.
        rule: name of the update rule; "exact" rounds nowhere but in the sum, on any device.
        evaluates: whether the last batch is looked up without gradients after each step.
        pooling: of the second table.
        missing: what unknown ids of the first table read.
        is_linear: whether gradients are whole numbers, whose sums are exact in any order.
        synchronization: of replicas.
        device: where rows are.
        is_hooked: whether hooks are told of all decisions.
    """

    rules: tuple[tuple[str, Dynamic], ...]
    seed: int = 0
    num_steps: int = 8
    batch_size: int = 3
    rule: str = "row_wise_adagrad"
    evaluates: bool = False
    pooling: str = "sum"
    missing: str = "initial"
    is_linear: bool = False
    synchronization: Synchronization | None = None
    device: str = "cpu"
    is_hooked: bool = False

    def specs(self, *, is_dynamic: bool) -> list[TableSpec]:
        """The dynamic tables, or dense ones in their place; and a dense one beside."""
        options = {
            "optimizer": SGD(lr=0.25) if self.rule == "exact" else OPTIMIZERS[self.rule],
            "initializer": Uniform(bound=BOUND),
        }
        specs = []
        for number, (name, rules) in enumerate(self.rules):
            features = (name, f"{name}_too") if number == 0 else (name,)
            shape = {"dim": 3 if number == 0 else 4, "features": features, **options}
            if number == 0:
                rules = replace(rules, missing=self.missing)
            else:
                shape["pooling"] = self.pooling
            if is_dynamic:
                specs.append(TableSpec(name=name, storage="dynamic", dynamic=rules, **shape))
            else:
                specs.append(TableSpec(name=name, num_rows=MOST_ID, **shape))
        return [*specs, TableSpec(name="plain", num_rows=7, dim=3, **options)]

    def batch(self, step: int, rank: int, *, is_dynamic: bool) -> SparseBatch:
        """One rank's part of a step's batch; some ids are much more frequent than others."""
        time = 1000 + 7 * step + 3 * rank - 20 * (step % 3 == 2)  # which runs backwards now and then
        batch, scores = SparseBatch.from_bags(self.bags(step, rank, is_dynamic=is_dynamic)), None
        if is_dynamic and any(rules.eviction == "score" for _, rules in self.rules):
            drawn = np.random.default_rng([self.seed, step, rank, 1])
            scores = torch.from_numpy(drawn.integers(-20, 20, batch.ids.numel()))
        return replace(batch, time=time, scores=scores)

    def bags(self, step: int, rank: int, *, is_dynamic: bool) -> dict[str, list[list[int]]]:
        """The same by feature and sample."""
        drawn = np.random.default_rng([self.seed, step, rank])
        bags = {}
        for spec in self.specs(is_dynamic=False):
            for name in spec.features:
                sizes = drawn.integers(0, 4, self.batch_size)
                rows = [(spec.num_rows * drawn.random(size) ** 3).astype(int) for size in sizes]
                is_id = is_dynamic and spec.name != "plain"
                bags[name] = [(IDS[each] if is_id else each).tolist() for each in rows]
        return bags

    def oracles(self) -> dict[str, ReferenceShards]:
        """The rules as written, of each dynamic table."""
        return {
            name: ReferenceShards(name, rules, range(rules.num_shards), rules.capacity + 1000)
            for name, rules in self.rules
        }

    def fits(self, world_size: int) -> bool:
        """Whether every shard can hold the ids of every step."""
        oracles = self.oracles()
        try:
            for step in range(self.num_steps):
                batches = [self.batch(step, rank, is_dynamic=True) for rank in range(world_size)]
                for spec in self.specs(is_dynamic=True)[: len(oracles)]:
                    ids, counts, scores = asked_of(batches, spec)
                    opened = oracles[spec.name].open(ids, counts, step + 1, scores, latest(batches))
                    oracles[spec.name].release(np.concatenate([opened.evicted_frames, opened.frames[opened.guest]]))
        except NoRoomError:
            return False
        return True


@dataclass
class Seen:
    """What one rank saw: the vectors of each step, and after the last (or each) step what is known."""

    vectors: list[Vectors]
    evaluated: list[Vectors | None]
    known: list[dict[str, dict[int, tuple]]]
    counters: dict[str, tuple[int, ...]]
    transport: str = ""
    statistics: dict[str, list[list[int]]] = field(default_factory=dict)  # of all ids at the end
    demoted: dict[str, list[tuple]] = field(default_factory=dict)  # records at the end, as `demoted_of` has them
    # By step and table, of this rank's shards or of all: ids with counts and kinds, and those that left.
    decisions: dict[tuple[int, str], tuple[list[tuple], list[int]]] = field(default_factory=dict)


def vectors_of(embeddings: Embeddings, stream: Stream) -> Vectors:
    """Pooled ones, then those of each feature that is not pooled."""
    names = [name for name, _ in stream.rules[1:]] if stream.pooling == "none" else []
    return [embeddings.values, *(embeddings[name].values for name in names)]


def _detached(vectors: Vectors) -> Vectors:
    return [each.detach().clone() for each in vectors]


def latest(batches: list[SparseBatch]) -> int:
    """The time of the latest event of all ranks."""
    return max((batch.time for batch in batches if batch.time is not None), default=NO_TIME)


def ids_of(batch: SparseBatch, spec: TableSpec) -> np.ndarray:
    parts = [batch.ids[slice(*batch.feature_range(batch.features.index(name)))] for name in spec.features]
    return torch.cat(parts).numpy()


def asked_of(batches: list[SparseBatch], spec: TableSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The distinct ids of all ranks, how often each occurs, and its largest score where the table needs such."""
    everyone = np.concatenate([ids_of(batch, spec) for batch in batches])
    ids, inverse, counts = np.unique(everyone, return_inverse=True, return_counts=True)
    if spec.dynamic is None or spec.dynamic.eviction != "score":
        return ids, counts, None
    given = np.concatenate([ids_of(replace(batch, ids=batch.scores), spec) for batch in batches])
    scores = [
        max(score for score, place in zip(given, inverse, strict=True) if place == each) for each in range(len(ids))
    ]
    return ids, counts, np.array(scores, np.int64)


def initial_row(spec: TableSpec, i: int) -> torch.Tensor:
    row = torch.empty(1, spec.dim)
    initialize(row, table_key(0, spec.name), first=i, stride=1, distribution="uniform", a=-BOUND, b=BOUND)
    return row[0]


def _loss(vectors: Vectors, stream: Stream) -> torch.Tensor:
    if stream.is_linear:
        return torch.stack(
            [(each * (1 + torch.arange(each.shape[1], device=each.device))).sum() for each in vectors]
        ).sum()
    return torch.stack([(each * each).sum() + each.sum() for each in vectors]).sum()


def run_oracle(mesh: Mesh, stream: Stream, replicas: int = 1, *, every_step: bool = True) -> Seen:
    """What must come out, by dense tables and the rules as written."""
    specs = stream.specs(is_dynamic=False)
    embeddings = EmbeddingCollection(specs, mesh=mesh, transport="collective", replicas=replicas)
    optimizer, oracle = EmbeddingOptimizer(embeddings), _Oracle(embeddings, stream)
    seen = Seen([], [], [], {}, decisions=oracle.decisions)
    for step in range(stream.num_steps):
        oracle.open([stream.batch(step, rank, is_dynamic=True) for rank in range(mesh.world_size)], step + 1)
        vectors = vectors_of(embeddings(stream.batch(step, mesh.rank, is_dynamic=False)), stream)
        seen.vectors.append(_detached(vectors))
        _loss(vectors, stream).backward()
        optimizer.step()
        if stream.evaluates:
            seen.evaluated.append(oracle.evaluate(mesh))
        if every_step or step + 1 == stream.num_steps:
            seen.known.append(oracle.known())
    for name, numbers in oracle.counters.items():
        seen.counters[name] = (*numbers.tolist(), oracle.rules[name].num_forgotten)
        seen.statistics[name] = _plain(oracle.rules[name].statistics(IDS))
    return seen


def _plain(found: Statistics) -> list[list[int]]:
    return [column.tolist() for column in astuple(found)]


class _Oracle:
    """The rules as written, and the dense rows that begin anew where they say."""

    def __init__(self, embeddings: EmbeddingCollection, stream: Stream) -> None:
        self.embeddings, self.stream = embeddings, stream
        self.rules = stream.oracles()
        self.specs = stream.specs(is_dynamic=False)[: len(self.rules)]
        self.counters = {name: np.zeros(5, int) for name in self.rules}
        self.decisions: dict[tuple[int, str], tuple[list[tuple], list[int]]] = {}

    def open(self, batches: list[SparseBatch], step: int) -> None:
        """The step of the ids of all ranks."""
        for spec, with_rules in zip(self.specs, self.stream.specs(is_dynamic=True), strict=False):
            ids, counts, scores = asked_of(batches, with_rules)
            rows = np.searchsorted(IDS, ids)
            opened = self.rules[spec.name].open(ids, counts, step, scores, latest(batches))
            self.rules[spec.name].release(np.concatenate([opened.evicted_frames, opened.frames[opened.guest]]))
            self.begin_anew(spec, rows[opened.fresh])
            self.counters[spec.name] += [
                opened.num_hits,
                opened.num_admitted,
                opened.num_evicted,
                opened.num_dropped,
                opened.num_promoted,
            ]
            if self.stream.is_hooked:
                kinds = [
                    "guest" if guest else "admitted" if fresh else "promoted" if promoted else "known"
                    for guest, fresh, promoted in zip(opened.guest, opened.fresh, opened.promoted, strict=True)
                ]
                told = list(zip(ids.tolist(), counts.tolist(), kinds, strict=True))
                self.decisions[step, spec.name] = told, sorted(opened.evicted_ids.tolist())

    def evaluate(self, mesh: Mesh) -> Vectors | None:
        """What a look-up without gradients reads; None where it is refused."""
        stream, is_refused = self.stream, False
        batches = [stream.batch(stream.num_steps, rank, is_dynamic=False) for rank in range(mesh.world_size)]
        for number, spec in enumerate(self.specs):
            missing = stream.missing if number == 0 else "initial"
            rows = np.unique(np.concatenate([ids_of(batch, spec) for batch in batches]))
            unknown = rows[~self.rules[spec.name].statistics(IDS[rows]).known]
            is_refused |= missing == "error" and len(unknown) > 0
            self.begin_anew(spec, unknown, is_zero=missing == "zero")
        if is_refused:
            return None
        with torch.no_grad():
            return _detached(vectors_of(self.embeddings(batches[mesh.rank]), stream))

    def begin_anew(self, spec: TableSpec, rows: np.ndarray, *, is_zero: bool = False) -> None:
        """Sets dense rows to what they start from."""
        self.embeddings.forget_differences()
        self.embeddings.barrier()
        for piece in self.embeddings.held_rows(spec.name):
            for row in rows.tolist():
                if row in piece.rows:
                    place = piece.rows.index(row)
                    piece.values[place] = 0.0 if is_zero else initial_row(spec, int(IDS[row]))
                    for name, state in piece.state.items():
                        state[place] = spec.optimizer.initial_state[name]
        self.embeddings.barrier()

    def known(self) -> dict[str, dict[int, tuple]]:
        """Of each table, of those ids whose rows this rank holds."""
        return {spec.name: _known_of_dense(self.embeddings, spec, self.rules) for spec in self.specs}


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
        for place, row in enumerate(piece.rows):
            if (i := int(IDS[row])) in facts:
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


def demoted_of(embeddings: EmbeddingCollection, name: str) -> list[tuple]:
    """The demoted ids of this rank in the order of their demotion, shard by shard: id, row, states, facts."""
    found = shard_of(embeddings, name, "held")
    demoted = []
    for part in found.pieces.get(PREFIX, ()):
        state = dict(part.state)
        facts = state.pop("facts").tolist()
        tensors = [part.values, *(state[kind] for kind in sorted(state))]
        rows = zip(*([row.numpy().tobytes() for row in tensor] for tensor in tensors), strict=True)
        demoted += [(i, *row, *of) for i, row, of in zip(part.rows.tolist(), rows, facts, strict=True)]
    return demoted


def make(mesh: Mesh, stream: Stream, transport: str = "auto", replicas: int = 1) -> EmbeddingCollection:
    options = {"transport": transport, "replicas": replicas, "synchronization": stream.synchronization}
    options |= {"device": stream.device}
    return EmbeddingCollection(stream.specs(is_dynamic=True), mesh=mesh, **options)


def run_dynamic(mesh: Mesh, stream: Stream, transport: str = "auto", replicas: int = 1) -> Seen:
    """A plain loop."""
    embeddings = make(mesh, stream, transport, replicas)
    optimizer, seen = EmbeddingOptimizer(embeddings), Seen([], [], [], {}, embeddings.transport)
    _listen(embeddings, stream, seen)
    for step in range(stream.num_steps):
        vectors = vectors_of(embeddings(stream.batch(step, mesh.rank, is_dynamic=True)), stream)
        seen.vectors.append(_detached(vectors))
        _loss(vectors, stream).backward()
        optimizer.step()
        _evaluate(mesh, stream, embeddings, seen)
        seen.known.append({name: known_of(embeddings, name) for name, _ in stream.rules})
    return _at_the_end(embeddings, stream, seen)


def run_pipeline(
    mesh: Mesh,
    stream: Stream,
    transport: str,
    depth: int,
    parts: int = 1,
    replicas: int = 1,
    disturb: Callable[[int, Task], None] | None = None,
) -> Seen:
    """A pipeline, which knows the end alone.

    With `disturb`, which is called before each of its tasks, every other rank waits for a step before it evaluates.
    """
    embeddings = make(mesh, stream, transport, replicas)
    optimizer, seen = EmbeddingOptimizer(embeddings), Seen([], [], [], {}, embeddings.transport)
    _listen(embeddings, stream, seen)
    size = stream.batch_size
    batches = [
        Batch(torch.zeros(size, 0), stream.batch(step, mesh.rank, is_dynamic=True), torch.zeros(size))
        for step in range(stream.num_steps)
    ]
    disturbed = None if disturb is None else partial(disturb, mesh.rank)
    with Pipeline(embeddings, depth=depth, micro_batches=parts, disturb=disturbed) as pipeline:
        for window in pipeline.windows(batches):
            vectors = []
            for part in window:
                of_part = vectors_of(part.embeddings, stream)
                vectors.append(_detached(of_part))
                _loss(of_part, stream).backward()
            seen.vectors.append([torch.cat(each) for each in zip(*vectors, strict=True)])
            optimizer.step()
            if disturb is not None and mesh.rank % 2 == 0:
                pipeline.wait()
            _evaluate(mesh, stream, embeddings, seen)
    seen.known.append({name: known_of(embeddings, name) for name, _ in stream.rules})
    return _at_the_end(embeddings, stream, seen)


def _listen(embeddings: EmbeddingCollection, stream: Stream, seen: Seen) -> None:
    """Has hooks note what this rank decides."""

    def note(told: Decisions) -> None:
        kinds = ("known", "admitted", "promoted", "guest")
        masks = np.stack([getattr(told, kind) for kind in kinds])
        assert (masks.sum(axis=0) == 1).all()
        each = [kinds[number] for number in masks.argmax(axis=0)] if len(told.ids) else []
        facts = list(zip(told.ids.tolist(), told.counts.tolist(), each, strict=True))
        assert seen.decisions.setdefault((told.step, told.table), (facts, told.evicted_ids.tolist()))[0] is facts

    for name, _ in stream.rules if stream.is_hooked else ():
        embeddings.register_decision_hook(name, note)


def _evaluate(mesh: Mesh, stream: Stream, embeddings: EmbeddingCollection, seen: Seen) -> None:
    if not stream.evaluates:
        return
    try:
        with torch.no_grad():
            found = embeddings(stream.batch(stream.num_steps, mesh.rank, is_dynamic=True))
    except DataError as error:
        if "does not know" not in str(error):
            raise
        seen.evaluated.append(None)
    else:
        seen.evaluated.append(_detached(vectors_of(found, stream)))


def _at_the_end(embeddings: EmbeddingCollection, stream: Stream, seen: Seen) -> Seen:
    seen.counters = _counters(embeddings)
    seen.statistics = {name: _plain(embeddings.statistics(name, IDS)) for name, _ in stream.rules}
    seen.demoted = {name: demoted_of(embeddings, name) for name, rules in stream.rules if rules.mode == "demote"}
    embeddings.close()
    return seen


def _counters(embeddings: EmbeddingCollection) -> dict[str, tuple[int, ...]]:
    return {
        name: (each.hits, each.admitted, each.evicted, each.guests, each.promoted, each.forgotten)
        for name, each in embeddings.dynamic_counters.items()
    }


def assert_same(mine: list[Seen], expected: list[Seen], replicas: int = 1) -> None:
    """To the bit: what each rank looked up, and what all ranks together know. Counters add up."""
    for one, other in zip(mine, expected, strict=True):
        assert one.statistics == other.statistics
        assert [_bits(each) for each in one.vectors] == [_bits(each) for each in other.vectors]
        assert [_bits(each) for each in one.evaluated] == [_bits(each) for each in other.evaluated]
    assert _joined_decisions(mine) == expected[0].decisions
    for name in expected[0].counters:
        total = np.sum([seen.counters[name] for seen in mine if name in seen.counters], axis=0)
        assert tuple(total) == tuple(replicas * number for number in expected[0].counters[name])
        for of_mine, of_expected in zip(
            zip(*(seen.known for seen in mine), strict=True),
            zip(*(seen.known for seen in expected), strict=True),
            strict=True,
        ):
            assert _joined([each[name] for each in of_mine], replicas) == _joined([each[name] for each in of_expected])


def assert_near(mine: list[Seen], expected: list[Seen]) -> None:
    """The same ids with the same facts, and the same numbers but for rounding."""
    for one, other in zip(mine, expected, strict=True):
        assert one.counters == other.counters
        torch.testing.assert_close(one.vectors, other.vectors)
        torch.testing.assert_close(one.evaluated, other.evaluated)
        for of_one, of_other in zip(one.known, other.known, strict=True):
            for name, known in of_one.items():
                assert list(known) == list(of_other[name])
                for found, there in zip(known.values(), of_other[name].values(), strict=True):
                    assert found[-3:] == there[-3:]
                    for numbers, others in zip(found[:-3], there[:-3], strict=True):
                        np.testing.assert_allclose(
                            *(np.frombuffer(each, np.float32) for each in (numbers, others)), 1e-5
                        )


def _bits(vectors: Vectors | None) -> list[bytes] | None:
    return None if vectors is None else [each.cpu().numpy().tobytes() for each in vectors]


def _joined_decisions(parts: list[Seen]) -> dict[tuple[int, str], tuple[list[tuple], list[int]]]:
    """Those of all ranks, each told of once."""
    joined: dict[tuple[int, str], tuple[list[tuple], list[int]]] = {}
    for part in parts:
        for key, (told, left) in part.decisions.items():
            before = joined.get(key, ([], []))
            joined[key] = sorted(before[0] + told), sorted(before[1] + left)
    return joined


def _joined(parts: list[dict[int, tuple]], replicas: int = 1) -> dict[int, tuple]:
    """Those of all ranks; each id stands on as many ranks as there are replicas, alike."""
    joined: dict[int, tuple] = {}
    for part in parts:
        for i, facts in part.items():
            assert joined.setdefault(i, facts) == facts
    assert sum(map(len, parts)) == replicas * len(joined)
    return joined
