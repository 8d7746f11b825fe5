"""Windows of several items, and tables that decide about the ids of each: what a plain loop knows that accumulates."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

import rowmesh
from rowmesh import EmbeddingOptimizer, SparseBatch
from rowmesh.data import Batch
from rowmesh.errors import RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.pipeline import Pipeline
from rowmesh.tables import Dynamic
from tests.exchange.resolve.test_resolver import RULES
from tests.pipeline.test_ends import BAD, NUM_BATCHES, batches, same, values
from tests.pipeline.test_ends import make as make_of_kind
from tests.pipeline.test_ends import train as train_window
from tests.support.dynamic import (
    IDS,
    Seen,
    Stream,
    Vectors,
    _at_the_end,
    _bits,
    _detached,
    _evaluate,
    _listen,
    _loss,
    known_of,
    make,
    vectors_of,
)
from tests.support.dynamic_streams import LOOKED_AT, streams
from tests.support.ranks import RankPool
from tests.tables.dynamic.test_demoted import RULES as DEMOTED

SCALE = 4.0
# Gradients are whole numbers, whose sums are exact: a plain loop adds them up in another order.
EXACT = {"rule": st.just("exact"), "is_linear": st.just(True), "pooling": st.sampled_from(["sum", "none"])}
SMALL = {"small": Dynamic(capacity=24, shards=1), "small, lfu": Dynamic(capacity=24, shards=2, eviction="lfu")}
STREAMS = streams(RULES | SMALL | DEMOTED, **(LOOKED_AT | EXACT | {"num_steps": st.integers(1, 8)}))


@dataclass(frozen=True)
class Job:
    """A loop over the batches of a stream.

    Attributes:
        stream: gives them.
        accumulate: A.
        overflowing: steps whose gradients are infinite.
        left: steps amid which the loop is left.
        paused: steps after which a pipeline pauses.
        saves: whether the tables are saved after every step.
        is_scaled: whether a GradScaler takes the steps.
        replicas, transport: of the tables.
        pipeline: options of a pipeline; None for a plain loop.
    """

    stream: Stream
    accumulate: int
    overflowing: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    paused: frozenset[int] = frozenset()
    saves: bool = False
    is_scaled: bool = True
    replicas: int = 1
    transport: str = "auto"
    pipeline: dict[str, Any] | None = None


class Loop:
    """A job under way on one rank."""

    def __init__(self, mesh: Mesh, job: Job, folder: Path) -> None:
        self.job, self._mesh, self._folder = job, mesh, folder
        self.embeddings = make(mesh, job.stream, job.transport, job.replicas)
        self._optimizer = EmbeddingOptimizer(self.embeddings)
        self._scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        self.seen, self.frames = Seen([], [], [], {}, self.embeddings.transport), list[Any]()
        _listen(self.embeddings, job.stream, self.seen)

    def windows(self, first: int = 0) -> Iterator[tuple[int, Sequence[SparseBatch]]]:
        """Each step and its items, from one on."""
        stream, size = self.job.stream, self.job.accumulate
        for number in range(first, -(-stream.num_steps // size)):
            steps = range(number * size, min(stream.num_steps, (number + 1) * size))
            yield number, [stream.batch(step, self._mesh.rank, is_dynamic=True) for step in steps]

    def plain(self) -> None:
        """The whole job, batch after batch."""
        for number, items in self.windows():
            self._optimizer.zero_grad()
            for item in items:
                vectors = vectors_of(self.embeddings(item), self.job.stream)
                self.seen.vectors.append(_detached(vectors))
                if number not in self.job.left:
                    self._backward(vectors, number)
                del vectors
            if number not in self.job.left:
                self._step(number)

    def pipelined(self) -> None:
        """The whole job through a pipeline."""
        parts = (self.job.pipeline or {}).get("micro_batches", 1)
        pipeline = Pipeline(self.embeddings, accumulate=self.job.accumulate, **(self.job.pipeline or {}))
        rest = [*self.windows()]
        with pipeline:
            while rest:
                for window in pipeline.windows(self._items(rest)):
                    (number, _), *rest = rest
                    self._optimizer.zero_grad()
                    vectors = list[Vectors]()
                    for part in window:
                        vectors.append(vectors_of(part.embeddings, self.job.stream))
                        self._backward(vectors[-1], number)
                    for first in range(0, len(window.items) * parts, parts):
                        joined = [torch.cat(each) for each in zip(*vectors[first : first + parts], strict=True)]
                        self.seen.vectors.append(_detached(joined))
                    if number in self.job.left:
                        break
                    self._step(number)
                    if number in self.job.paused:
                        pipeline.pause()

    def _items(self, windows: Sequence[tuple[int, Sequence[SparseBatch]]]) -> Iterator[Batch]:
        for _, items in windows:
            for item in items:
                yield Batch(torch.zeros(item.batch_size, 0), item, torch.zeros(item.batch_size))

    def _backward(self, vectors: Vectors, number: int) -> None:
        if number in self.job.overflowing:
            vectors[0].register_hook(lambda gradient: gradient * float("inf"))
        loss = _loss(vectors, self.job.stream)
        (self._scaler.scale(loss) if self.job.is_scaled else loss).backward()

    def _step(self, number: int) -> None:
        if self.job.is_scaled:
            self._scaler.step(self._optimizer)
            self._scaler.update(SCALE)
        else:
            self._optimizer.step()
        _evaluate(self._mesh, self.job.stream, self.embeddings, self.seen)
        if self.job.saves:
            rowmesh.save(self._folder / f"{number}", {"tables": self.embeddings})

    def frames_of(self, name: str) -> list[int]:
        """The frame of every id that this rank has; −1 of unknown ones."""
        assert self.embeddings.engine.resolver is not None
        owned = self.embeddings.engine.resolver.tables[name].owned
        assert owned is not None
        return owned.shards.find(IDS).tolist()

    def end(self) -> dict[str, Any]:
        """What was seen, and what is known, also of all that was saved."""
        names, seen = [name for name, _ in self.job.stream.rules], self.seen
        seen.known.append({name: known_of(self.embeddings, name) for name in names})
        found = asdict(_at_the_end(self.embeddings, self.job.stream, seen))
        found["steps"] = self.embeddings.step_count
        for kind in ("vectors", "evaluated"):
            found[kind] = [_bits(each) for each in found[kind]]
        found["saved"] = [self._loaded(folder, names) for folder in sorted(self._folder.iterdir())]
        return found

    def _loaded(self, folder: Path, names: Sequence[str]) -> dict[str, dict[int, tuple]]:
        embeddings = make(self._mesh, self.job.stream, self.job.transport, self.job.replicas)
        rowmesh.load(folder, {"tables": embeddings})
        known = {name: known_of(embeddings, name) for name in names}
        embeddings.close()
        return known


def train(mesh: Mesh, job: Job, folder: str) -> dict[str, Any]:
    """What comes of a job on this rank."""
    loop = Loop(mesh, job, Path(folder))
    (loop.plain if job.pipeline is None else loop.pipelined)()
    return loop.end()


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Random ones through a pipeline."""
    stream, accumulate = draw(STREAMS), draw(st.integers(1, 3))
    numbers = range(-(-stream.num_steps // accumulate))
    some, is_scaled = st.frozensets(st.sampled_from(numbers), max_size=2), draw(st.booleans())
    pipeline = {"depth": draw(st.integers(0, 2)), "micro_batches": draw(st.integers(1, 3))}
    return Job(
        stream,
        accumulate,
        overflowing=draw(some) if is_scaled else frozenset(),
        left=draw(some),
        paused=draw(some),
        saves=draw(st.booleans()),
        is_scaled=is_scaled,
        pipeline=pipeline | {"overlap": draw(st.booleans())},
    )


DRAWN = Job(
    Stream(
        (("user", replace(SMALL["small"], ttl_seconds=12)), ("item", replace(DEMOTED["one shard"], capacity=12))),
        num_steps=16,
        rule="exact",
        is_linear=True,
        is_hooked=True,
        evaluates=True,
    ),
    accumulate=3,
    overflowing=frozenset({1}),
    left=frozenset({2}),
    paused=frozenset({3}),
    pipeline={"depth": 2, "micro_batches": 2},
)


def compare(ranks: RankPool | None, job: Job, world_size: int) -> None:
    """A pipeline and a plain loop: vectors, rows, facts, decisions, counters and all that was saved, to the bit."""
    found = []
    for each in (job, replace(job, pipeline=None)):
        with tempfile.TemporaryDirectory() as folder:
            if ranks is None:
                found.append([train(Mesh(), each, folder)])
            else:
                found.append(ranks.run(train, each, folder, world_size=world_size))
    assert found[0] == found[1]


def test_one_rank_does_as_a_plain_loop():
    compare(None, replace(DRAWN, accumulate=2), 1)


def test_two_ranks_do_as_a_plain_loop(ranks):
    compare(ranks, replace(DRAWN, stream=replace(DRAWN.stream, batch_size=1), saves=True), 2)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(job=jobs())
def test_one_rank_does_as_any_plain_loop(job):
    assume(job.stream.fits(1))
    compare(None, job, 1)


@pytest.mark.slow
@pytest.mark.parametrize("world_size, examples", [(2, 12), (4, 20)])
def test_ranks_do_as_any_plain_loop(ranks, world_size, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        job=jobs(),
        transport=st.sampled_from(["collective", "one_sided"]),
        replicas=st.sampled_from([1, 2]),
    )
    def check(job, transport, replicas):
        assume(job.stream.fits(world_size))
        job = replace(job, transport=transport, replicas=replicas)
        compare(ranks, job, world_size)

    check()


@pytest.mark.parametrize(
    "world_size, examples", [(2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 12), (4, 12)))]
)
def test_replicas_that_are_averaged_do_as_in_a_plain_loop(ranks, world_size, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(job=jobs(), every=st.integers(1, 2))
    def check(job, every):
        assume(job.stream.fits(world_size))
        stream = replace(job.stream, synchronization=Synchronization("average", every=every))
        nothing = frozenset[int]()
        how = {"overflowing": nothing, "left": nothing, "paused": nothing, "saves": False, "is_scaled": False}
        job = replace(job, stream=stream, replicas=2, **how)
        compare(ranks, job, world_size)

    check()


def test_ids_are_in_the_frames_of_the_plain_loop():
    """Where nothing is opened ahead, so that no frame is kept for longer."""
    frames = []
    for pipeline in (None, {"depth": 0, "micro_batches": 2}):
        job = Job(replace(DRAWN.stream, is_hooked=False), 3, pipeline=pipeline)
        with tempfile.TemporaryDirectory() as folder:
            loop = Loop(Mesh(), job, Path(folder))
            (loop.plain if pipeline is None else loop.pipelined)()
        frames.append([loop.frames_of(name) for name in ("user", "item")])
        counters = loop.embeddings.dynamic_counters
        assert counters["user"].evicted > 3
        assert counters["item"].promoted > 3
        loop.embeddings.close()
    assert frames[0] == frames[1]


# Windows that some ranks do not have, or not all of

WINDOWS = [*range(0, NUM_BATCHES, 2)]


def train_windows(mesh, kind, firsts):
    """The rows after windows of two items each, one window after the other."""
    collection, optimizer = make_of_kind(mesh, kind)
    items = [*batches(mesh.rank, kind)]
    for first in firsts:
        with Pipeline(collection, depth=0, accumulate=2, overlap=False) as pipeline:
            for window in pipeline.windows(items[first : first + 2]):
                train_window(window, optimizer)
    rows = values(collection)
    collection.close()
    return rows


def meet_an_error(mesh, kind, how, depth, culprits):
    """Trains until the error, which is in the second item of a window, then goes on with the windows behind it."""
    collection, optimizer = make_of_kind(mesh, kind)
    pipeline, error, given = Pipeline(collection, depth=depth, accumulate=2), "", 0
    spoil = (BAD, how) if mesh.rank in culprits else None
    try:
        for window in pipeline.windows(batches(mesh.rank, kind, spoil=spoil)):
            train_window(window, optimizer)
            given += 1
    except RowmeshError as caught:
        error = f"{type(caught).__name__}: {caught}"
    rows = values(collection)
    for window in pipeline.windows([*batches(mesh.rank, kind)][BAD + 1 :]):
        train_window(window, optimizer)
    after = values(collection)
    pipeline.close()
    collection.close()
    return given, error, rows, after


def meet_errors(mesh, kind, how, cases):
    before = [first for first in WINDOWS if first + 1 < BAD]
    plain = [train_windows(mesh, kind, each) for each in (before, [each for each in WINDOWS if each != BAD - 1])]
    return [(*meet_an_error(mesh, kind, how, *each), *plain) for each in cases]


@pytest.mark.parametrize(
    "how, kind", [("no room", "dynamic"), ("ends", "dynamic"), ("raises", "dynamic"), ("bad id", "dynamic, one-sided")]
)
def test_a_window_whose_second_item_fails_decides_nothing(ranks, how, kind):
    cases = [(depth, each) for depth in (0, 2) for each in ({1}, {0, 1})]
    for rank, found in enumerate(ranks.run(meet_errors, kind, how, cases, world_size=2)):
        for (_, culprits), (num_given, error, rows, after, before, behind) in zip(cases, found, strict=True):
            ends_alike = how == "ends" and len(culprits) == 2
            assert num_given == BAD // 2 + ends_alike
            if ends_alike:
                assert error == ""
                continue
            assert same(rows, before)
            assert same(after, behind)
            if how == "ends":
                assert f"rank {rank}: ranks are out of step: rank 1 has no batch {BAD // 2}" in error
            elif how == "no room":
                assert error.startswith("NoRoomError")
            else:
                own = "IdRangeError" if how == "bad id" else "DataError"
                assert error.startswith(own if rank in culprits else "PeerError")
