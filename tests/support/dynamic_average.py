"""Averaged replicas of dynamic tables in plain Python: dictionaries of what each group knows, and a dense table each.

A group is a collection of one rank, whose batch is that of all its ranks; so gradients must be whole numbers where it
has several. Every so many steps the rule of averages, as `rowmesh.exchange.resolve.merging` states it, is applied to
all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.errors import NoRoomError
from rowmesh.tables.dynamic.hashing import shard_of
from rowmesh.tables.dynamic.reference import _Entry
from rowmesh.tables.dynamic.state import MAX
from rowmesh.tables.spec import with_moment_scale
from tests.support.dynamic import IDS, Seen, Stream, Vectors, _detached, _loss, _Oracle, _plain, initial_row, vectors_of

Facts = dict[int, tuple[int, int, int]]


class _Group:
    """One replica group."""

    def __init__(self, stream: Stream, ranks: range, num_groups: int) -> None:
        with patch("rowmesh.collection.module.with_moment_scale", lambda spec, _: with_moment_scale(spec, num_groups)):
            self.embeddings = EmbeddingCollection(stream.specs(is_dynamic=False))
        self.stream, self.ranks = stream, ranks
        self.optimizer = EmbeddingOptimizer(self.embeddings)
        self.oracle = _Oracle(self.embeddings, stream)
        # Since the last average: what was known then and was not forgotten; what was seen, left or was forgotten.
        self.kept: dict[str, set[int]] = {name: set() for name, _ in stream.rules}
        self.changed: dict[str, set[int]] = {name: set() for name, _ in stream.rules}

    def step(self, step: int) -> Vectors:
        batch = self._batch(step)
        before = {name: (set(entries_of(rules)), set(held_by(rules))) for name, rules in self.oracle.rules.items()}
        self.oracle.open([self.stream.batch(step, rank, is_dynamic=True) for rank in self.ranks], step + 1)
        for name, rules in self.oracle.rules.items():
            known, held = before[name]
            gone = held - set(held_by(rules))
            self.kept[name] -= gone
            self.changed[name] |= gone | known - set(entries_of(rules))
            self.changed[name] |= {i for i, entry in entries_of(rules).items() if entry.last == step + 1}
        vectors = vectors_of(self.embeddings(batch), self.stream)
        seen = _detached(vectors)
        (_loss(vectors, self.stream) / len(self.ranks)).backward()
        self.optimizer.step()
        return seen

    def _batch(self, step: int) -> SparseBatch:
        parts = [self.stream.bags(step, rank, is_dynamic=False) for rank in self.ranks]
        return SparseBatch.from_bags({name: [bag for part in parts for bag in part[name]] for name in parts[0]})


def entries_of(rules) -> dict[int, _Entry]:
    return {i: entry for shard in rules._shards.values() for i, entry in shard.entries.items()}


def demoted_of(rules) -> dict[int, _Entry]:
    """In the order of their demotion, shard by shard."""
    return {i: entry for shard in rules._shards.values() for i, entry in shard.demoted.items()}


def held_by(rules) -> dict[int, _Entry]:
    """What has a row of its own."""
    return demoted_of(rules) | entries_of(rules)


def run_average_oracle(stream: Stream, world_size: int, num_groups: int, *, at_the_end: bool = False) -> list[Seen]:
    """What each group must see and know."""
    size = world_size // num_groups
    groups = [_Group(stream, range(m * size, (m + 1) * size), num_groups) for m in range(num_groups)]
    seen = [Seen([], [], [], {}) for _ in groups]
    base = {name: ({}, {}, {}, 0) for name, _ in stream.rules}
    clocks: dict[str, dict[int, int]] = {name: {} for name, _ in stream.rules}  # latest events of all groups, by step
    assert stream.synchronization is not None
    for step in range(stream.num_steps):
        for group, of_group in zip(groups, seen, strict=True):
            of_group.vectors.append(group.step(step))
        for name, clock in clocks.items():
            clock[step + 1] = max(group.oracle.rules[name]._now for group in groups)
        is_last = step + 1 == stream.num_steps
        if (step + 1) % stream.synchronization.every == 0 or (is_last and at_the_end):
            base = {
                spec.name: _average(groups, spec, base[spec.name], clocks[spec.name]) for spec in groups[0].oracle.specs
            }
            _average_plain(groups)
        for group, of_group in zip(groups, seen, strict=True):
            of_group.known.append(group.oracle.known())
    for group, of_group in zip(groups, seen, strict=True):
        for spec in group.oracle.specs:
            rules = group.oracle.rules[spec.name]
            of_group.statistics[spec.name] = _plain(rules.statistics(IDS))
            if rules.rules.mode == "demote":
                of_group.demoted[spec.name] = _records_of(group, spec)
    return seen


def _records_of(group: _Group, spec: TableSpec) -> list[tuple]:
    """What `demoted_of` of the support of dynamic tables gives, of all shards."""
    (piece,), rules = group.embeddings.held_rows(spec.name), group.oracle.rules[spec.name]
    tensors, records = [piece.values, *(piece.state[kind] for kind in sorted(piece.state))], []
    for i, entry in demoted_of(rules).items():
        place = piece.rows.index(int(np.searchsorted(IDS, i)))
        records.append((i, *(tensor[place].numpy().tobytes() for tensor in tensors), *rules._facts_of(entry)))
    return records


def _average(groups: list[_Group], spec: TableSpec, base: tuple[Facts, Facts, dict, int], clock: dict[int, int]):
    name = spec.name
    rules = [group.oracle.rules[name] for group in groups]
    held = [held_by(each) for each in rules]
    decay, step, window = rules[0].rules.decay_steps, rules[0]._step, rules[0]._window
    changed = set().union(*(group.changed[name] for group in groups))
    merged: Facts = {}
    for i in sorted(set().union(*held)):
        merged[i] = _facts(i, groups, held, name, base[0], decay)
    entries = {i: _Entry(0, count, last, score, clock[last]) for i, (last, count, score) in merged.items()}
    known = set().union(*map(entries_of, rules))
    in_time = {i: entries[i] for i in known if not rules[0]._has_expired(entries[i], step, clock[step])}
    kept = set(_without_surplus(in_time, rules[0], step))
    demoted = []
    if rules[0].rules.mode == "demote":
        demoted = [i for i in demoted_of(rules[0]) if i not in changed]
        demoted += [i for i in sorted(merged) if i not in kept and i not in demoted]
    _average_rows(groups, spec, held, sorted(changed & (kept | set(demoted))))
    is_same = window == base[3]
    candidates = _added([_joined_candidates(each) for each in rules], base[1] if is_same else {})
    candidates = {i: count for i, count in candidates.items() if i not in changed}
    sketches = [
        {(s, *cell): n for s, shard in each._shards.items() for cell, n in shard.sketch.items()} for each in rules
    ]
    sketch = _added(sketches, base[2] if is_same else {})
    for group, each in zip(groups, rules, strict=True):
        mine = entries_of(each)
        for shard, state in each._shards.items():
            state.candidates = {i: n for i, n in candidates.items() if _shard(each, i) == shard}
            state.sketch = {cell[1:]: n for cell, n in sketch.items() if cell[0] == shard}
            each._free |= {entry.frame for i, entry in state.entries.items() if i not in kept}
            state.entries = {}
            state.demoted = {i: replace(entries[i]) for i in demoted if _shard(each, i) == shard}
            for i in [*state.demoted][: max(0, len(state.demoted) - (each.rules.stored_in(shard) or len(merged)))]:
                del state.demoted[i]
                each.num_forgotten += 1
        for i in sorted(kept):
            frame = mine[i].frame if i in mine else min(each._free)
            each._free -= {frame}
            each._shards[_shard(each, i)].entries[i] = replace(entries[i], frame=frame)
        each._now = clock[step]
        group.kept[name], group.changed[name] = set(held_by(each)), set()
    return {i: merged[i] for i in held_by(rules[0])}, candidates, sketch, window


def _facts(i: int, groups: list[_Group], held: list[dict[int, _Entry]], name: str, base: Facts, decay: int):
    """Last step, count, score."""
    holders = [(entries[i], i in group.kept[name]) for group, entries in zip(groups, held, strict=True) if i in entries]
    last = max(entry.last for entry, _ in holders)
    given = max(entry.score for entry, _ in holders if entry.last == last)
    if groups[0].oracle.rules[name].rules.eviction in ("lru", "ttl"):
        decayed, score = (lambda score, seen: 0), last
    else:
        decayed, score = (lambda score, seen: score >> (last // decay - seen // decay if decay else 0)), 0
    base_count = base_score = 0
    if any(is_kept for _, is_kept in holders):
        base_count, base_score = base[i][1], decayed(base[i][2], base[i][0])
    count = base_count
    total = base_score
    for entry, is_kept in holders:
        count += entry.count - (base_count if is_kept else 0)
        total += decayed(entry.score, entry.last) - (base_score if is_kept else 0)
    if groups[0].oracle.rules[name].rules.eviction == "score":
        return last, min(MAX, count), given
    return last, min(MAX, count), score or min(MAX, total)


def _without_surplus(entries: dict[int, _Entry], rules, step: int) -> list[int]:
    kept = []
    for shard in rules.shards:
        mine = [i for i in entries if _shard(rules, i) == shard]
        mine.sort(key=lambda i: (*rules._score(entries[i], step), i))
        surplus = max(0, len(mine) - rules.rules.shard_capacity(shard))
        if surplus and rules.rules.eviction == "ttl":
            raise NoRoomError(f"{rules.table}: what groups know together does not fit")
        kept += mine[surplus:]
    return kept


def _shard(rules, i: int) -> int:
    return int(shard_of(rules.table, np.array([i]), rules.rules.num_shards)[0])


def _joined_candidates(rules) -> dict[int, int]:
    return {i: n for shard in rules._shards.values() for i, n in shard.candidates.items()}


def _added(counted: list[dict], base: dict) -> dict:
    """What was counted in common, and by how much each count is above it."""
    keys = set(base).union(*counted)
    return {
        key: base.get(key, 0) + sum(max(0, each.get(key, 0) - base.get(key, 0)) for each in counted) for key in keys
    }


def _average_rows(groups: list[_Group], spec: TableSpec, held: list[dict[int, _Entry]], ids: list[int]) -> None:
    """Means over all groups; a group that lacks an id has its initial row, and a fresh state."""
    pieces = [group.embeddings.held_rows(spec.name)[0] for group in groups]
    for i in ids:
        place = pieces[0].rows.index(int(np.searchsorted(IDS, i)))
        is_here = [i in entries for entries in held]
        rows = [p.values[place].clone() if h else initial_row(spec, i) for p, h in zip(pieces, is_here, strict=True)]
        mean = mean_of(rows)
        for piece in pieces:
            piece.values[place] = mean
        for state, fresh in spec.optimizer.initial_state.items():
            tensors = [piece.state[state] for piece in pieces]
            values = [
                tensor[place].clone() if h else torch.full_like(tensor[place], fresh)
                for tensor, h in zip(tensors, is_here, strict=True)
            ]
            mean = mean_of(values)
            for tensor in tensors:
                tensor[place] = mean


def _average_plain(groups: list[_Group]) -> None:
    pieces = [group.embeddings.held_rows("plain")[0] for group in groups]
    for name in ("values", *pieces[0].state):
        tensors = [piece.values if name == "values" else piece.state[name] for piece in pieces]
        mean = mean_of([tensor.clone() for tensor in tensors])
        for tensor in tensors:
            tensor.copy_(mean)


def mean_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """w₀ + Σ (wₘ − w₀) / M."""
    first, *others = values
    total = torch.zeros_like(first)
    for other in others:
        total += other - first
    return first + total * (1.0 / len(values))
