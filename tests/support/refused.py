"""Streams of batches some of which are refused, and all that dynamic tables know before and after."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh._support.faults import arm
from rowmesh.errors import RowmeshError, StoreError
from rowmesh.mesh import Mesh
from rowmesh.tables import Dynamic, Uniform
from rowmesh.tables.dynamic.hashing import shard_of

RULES = {
    "item": Dynamic(capacity=6, shards=2),
    "seen": Dynamic(capacity=40, shards=2, admit_after=2, window_steps=3),
    "user": Dynamic(
        capacity=40,
        shards=3,
        admit_after=3,
        sketch_width=5,
        sketch_depth=2,
        window_steps=3,
        eviction="lfu",
        decay_steps=2,
    ),
    "old": Dynamic(capacity=40, shards=2, ttl_seconds=12),
    "away": Dynamic(capacity=6, shards=2, mode="demote", store="memory", store_capacity=4),
    "worth": Dynamic(capacity=6, shards=2, eviction="score"),
}
NEW = np.arange(100, 400)
SHARDS = {name: shard_of(name, NEW, 2) for name in ("item", "worth")}
FULL = {name: [*NEW[shards == 0][:4].tolist(), *NEW[shards == 1][:3].tolist()] for name, shards in SHARDS.items()}
"""More ids of shard 0 than it holds, and so many of shard 1 that all others would have to leave."""
NUM_PARTS, NUM_IDS = 4, 12
KINDS = ["range", "feature", "room", "room of the last table", "scores", "time", "store", "hook", "fetched"]
Known = dict[str, Any]


def make(mesh: Mesh, transport: str) -> EmbeddingCollection:
    """One table for each kind of rules, and a dense one beside them."""
    start = {"initializer": Uniform(bound=0.5)}
    tables = [TableSpec(name=name, dim=3, storage="dynamic", dynamic=rules, **start) for name, rules in RULES.items()]
    return EmbeddingCollection(
        [*tables, TableSpec(name="plain", num_rows=7, dim=3, **start)], mesh=mesh, transport=transport
    )


def batch_of(mesh: Mesh, seed: int, number: int, also: dict[str, list[int]] | None = None) -> SparseBatch:
    """A rank's part of a batch that is the same on any number of ranks, with some ids more in its last samples."""
    drawn = np.random.default_rng([seed, number])
    bags = {}
    for name in [*RULES, "plain"]:
        ids = drawn.integers(0, 7 if name == "plain" else NUM_IDS, (NUM_PARTS, 2))
        ids[1:] = ids[0]  # fewer than a shard holds
        more = [[] for _ in range(NUM_PARTS)]
        for place, each in enumerate((also or {}).get(name, [])):
            more[-1 - place % NUM_PARTS].append(each)
        bags[name] = [(*one, *other) for one, other in zip(ids.tolist(), more, strict=True)][
            mesh.rank :: mesh.world_size
        ]
    batch = SparseBatch.from_bags({name: [list(bag) for bag in each] for name, each in bags.items()})
    return replace(batch, time=1000 + 5 * number, scores=batch.ids * 3 % 7)


def known_of(embeddings: EmbeddingCollection) -> Known:
    """All that a rank knows of dynamic tables, without frames, and what it has counted."""
    resolver = embeddings.engine.resolver
    assert resolver is not None
    known: Known = {"step": resolver.step}
    for name, table in resolver.tables.items():
        if table.owned is None:
            continue
        for shard in table.owned.shards.shards:
            state = asdict(table.owned.shards.state_of(shard))
            del state["frames"]
            known[f"{name} {shard}"] = {key: np.asarray(each).tolist() for key, each in state.items()}
        known[f"{name} counters"] = asdict(table.owned.counters)
    return known


def statistics_of(embeddings: EmbeddingCollection) -> dict[str, list[list[int]]]:
    """Of all ids, demoted ones too."""
    found = {name: embeddings.statistics(name, np.arange(NUM_IDS)) for name in RULES}
    return {name: [each.known.tolist(), each.count.tolist(), each.score.tolist()] for name, each in found.items()}


def rows_of(embeddings: EmbeddingCollection) -> dict[str, Any]:
    """By id, of this rank."""
    rows = {}
    for name in RULES:
        known = embeddings.known_rows(name)
        order = known.ids.argsort()
        rows[name] = known.ids[order].tolist(), known.values[order].tolist()
    return rows


def refuse(mesh: Mesh, embeddings: EmbeddingCollection, kind: str, seed: int, number: int) -> str:
    """Looks up a batch that is refused, on the last rank or by an owner; returns the error, or none."""
    is_last = mesh.rank == mesh.world_size - 1
    also, around = {}, contextlib.ExitStack()
    if kind == "range":
        also = {"plain": [7]}
    elif kind == "room":
        also = {"item": FULL["item"]}
    elif kind == "room of the last table":
        also = {"worth": FULL["worth"]}
    elif kind == "store":
        also = {"away": [100, 101, 102, 103]}
    batch = batch_of(mesh, seed, number, also)
    if kind == "scores" and is_last:
        batch = replace(batch, scores=None)
    elif kind == "time":
        batch = replace(batch, time=None)
    elif kind == "feature" and is_last:
        batch = batch.select([name for name in batch.features if name != "plain"])
    with around:
        if kind == "store" and is_last:
            around.enter_context(_failing_store(embeddings))
        elif kind == "hook":
            handle = embeddings.register_decision_hook("seen", partial(_fail, is_last))
            around.callback(handle.remove)
        elif kind == "fetched" and is_last:
            around.enter_context(arm(point="engine.fetched", action=partial(_fail, True, None)))
        try:
            embeddings(batch)
        except (RowmeshError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def _fail(fails: bool, _) -> None:
    if fails:
        raise KeyError("refused")


@contextlib.contextmanager
def _failing_store(embeddings: EmbeddingCollection):
    owned = embeddings.engine.resolver.tables["away"].owned

    def away(*_):
        raise StoreError("store is away")

    owned._demoted._store.get, before = away, owned._demoted._store.get
    try:
        yield
    finally:
        owned._demoted._store.get = before


def train(embeddings: EmbeddingCollection, optimizer: EmbeddingOptimizer, batch: SparseBatch) -> None:
    """A step."""
    (embeddings(batch).values ** 2).sum().backward()
    optimizer.step()


def run(mesh: Mesh, transport: str, refused: dict[int, str], seed: int, num_steps: int) -> tuple:
    """Trains; before some steps batches are refused.

    Returns:
        The errors; whether nothing had changed after each of them; what is known at the end; all rows of this rank;
        what hooks were told: of each step once, but where a hook has refused it, or a rank after it: then what they
        were told last.
    """
    embeddings = make(mesh, transport)
    told: dict[tuple[str, int], tuple] = {}
    may_repeat = {"hook", "fetched"} & set(refused.values())

    def note(each):
        key = each.table, each.step
        assert may_repeat or key not in told
        told[key] = each.ids.tolist(), each.evicted_ids.tolist()

    for name in RULES:
        embeddings.register_decision_hook(name, note)
    optimizer, errors, is_same = EmbeddingOptimizer(embeddings), [], []
    for step in range(num_steps):
        if step in refused:
            before = known_of(embeddings)
            errors.append(refuse(mesh, embeddings, refused[step], seed, 100 + step))
            is_same.append(known_of(embeddings) == before)
        train(embeddings, optimizer, batch_of(mesh, seed, step))
    found = known_of(embeddings), statistics_of(embeddings)
    rows = rows_of(embeddings)
    embeddings.barrier()
    embeddings.close()
    return errors, is_same, found, rows, told


def joined(parts: list[tuple[Known, dict]]) -> tuple[Known, dict]:
    """What all ranks know together: equal on any number of them."""
    together: Known = {}
    for known, _ in parts:
        for key, each in known.items():
            if key.endswith("counters") and key in together:
                added = {name: number + each[name] for name, number in together[key].items() if name != "table"}
                steps = each["steps"]  # which every owner counts
                together[key] = {**each, **added, "steps": steps}
            else:
                assert key != "step" or together.get(key, each) == each
                together[key] = each
    return together, parts[0][1]
