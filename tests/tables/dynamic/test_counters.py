"""What is counted of dynamic tables, by table and step, over all ranks."""

import json

import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh._support.json_lines import JsonLines
from rowmesh.observe.counters import CounterLog
from rowmesh.observe.progress import Progress
from rowmesh.run.run_log import _hit_rate, _sources
from rowmesh.tables import Dynamic, Uniform


def item(**rules):
    return TableSpec(name="item", dim=4, storage="dynamic", dynamic=Dynamic(**rules), initializer=Uniform(bound=0.1))


def count_steps(mesh, path, replicas):
    """Two steps, an evaluation that is left out, and a third; ids 1, 2, 2 are on every rank."""
    embeddings = EmbeddingCollection([item(capacity=4, shards=2, admit_after=5)], mesh=mesh, replicas=replicas)
    optimizer = EmbeddingOptimizer(embeddings)
    with JsonLines(path if mesh.rank == 0 else None) as lines:
        log = CounterLog(_sources(embeddings), lines, mesh.group)
        for step in range(1, 4):
            embeddings(SparseBatch.from_bags({"item": [[1], [2, 2]]})).values.sum().backward()
            optimizer.step()
            log.record(step)
            with torch.no_grad():
                embeddings(SparseBatch.from_bags({"item": [[1], [7]]}))
            log.skip()
        return _hit_rate(log.flush())


@pytest.mark.parametrize("replicas", [1, 2])
def test_decisions_are_counted_once_each(ranks, tmp_path, replicas):
    path = tmp_path / "counters.jsonl"
    rates = ranks.run(count_steps, path, replicas, world_size=2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = [
        [line[name] for name in ("hits", "admitted", "evicted", "guests", "dropped")]
        for line in lines
        if line["group"] == "item, dynamic table"
    ]
    # Each step has id 1 twice and id 2 four times: 2 is admitted in the second step, 1 in the third.
    assert found == [[0, 0, 0, 2, 6], [0, 1, 0, 1, 2], [1, 1, 0, 0, 0]]
    assert rates == [1 / 6, 1 / 6]


def test_missing_ids_are_counted_by_table():
    embeddings = EmbeddingCollection([item(capacity=4)])
    embeddings(SparseBatch.from_bags({"item": [[1, 1, -5]]}))
    with torch.no_grad():
        embeddings(SparseBatch.from_bags({"item": [[1, 8, 9, 9]]}))
    counters = embeddings.dynamic_counters["item"]
    assert (counters.found, counters.missing, counters.admitted, counters.steps) == (1, 2, 2, 1)


def test_the_progress_line_has_the_share_of_known_ids(capsys):
    with Progress(2, interval_s=0.0) as progress:
        progress.update(1, loss=0.5, samples_per_s=10.0, memory_bytes=1e9, hit_rate=0.8125)
    assert "81.2% of ids known" in capsys.readouterr().out
