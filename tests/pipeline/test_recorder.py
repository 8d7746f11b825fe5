"""Recorder: what the tasks of a pipeline took, each counted once."""

from collections import Counter

import pytest
import torch

from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.data import Batch
from rowmesh.pipeline import Pipeline
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec

BATCH = Batch(torch.zeros(2, 0), SparseBatch.from_bags({"a": [[1], [2]]}), torch.zeros(2))


@pytest.mark.parametrize("overlap", [False, True])
def test_every_task_is_noted_once(overlap):
    """Also where the program waits amid a turn, to look rows up."""
    embeddings = EmbeddingCollection([TableSpec(name="a", num_rows=9, dim=3)])
    optimizer = EmbeddingOptimizer(embeddings)
    with Pipeline(embeddings, micro_batches=2, overlap=overlap) as pipeline:
        for window in pipeline.windows([BATCH] * 3):
            for part in window:
                part.embeddings.values.sum().backward()
            optimizer.step()
            with torch.no_grad():
                embeddings(BATCH.sparse)
        noted = Counter(span.task for span in pipeline.recorder.spans())
    assert set(noted.values()) == {1}
    of_driver = {"wait": 6, "compute": 6, "dense": 3}
    assert {name: sum(task.stage == name for task in noted) for name in of_driver} == of_driver
