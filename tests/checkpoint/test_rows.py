"""Rows of a checkpoint by their numbers, without a collection."""

from dataclasses import replace

import pytest
import torch

from rowmesh import AdaGrad, EmbeddingCollection, SparseBatch, TableSpec, checkpoint
from rowmesh.checkpoint.rows import SavedRows
from rowmesh.errors import CheckpointError
from rowmesh.tables import TensorTrain

RANGES = [range(0), range(100), range(7, 8), range(40, 95)]


@pytest.fixture(params=["dense", "tensor_train"])
def saved(request, tmp_path):
    """A checkpoint, its manifest, and the rows that were saved."""
    cores = TensorTrain(rank=3) if request.param == "tensor_train" else None
    table = TableSpec(name="item", num_rows=100, dim=6, optimizer=AdaGrad(), storage=request.param, tensor_train=cores)
    embeddings = EmbeddingCollection([table])
    checkpoint.save(tmp_path, embeddings, {})
    with torch.no_grad():
        rows = embeddings(SparseBatch.from_bags({"item": [[row] for row in range(100)]})).values
    return tmp_path, checkpoint.read_manifest(tmp_path), rows


@pytest.mark.parametrize("rows", RANGES, ids=str)
def test_rows_are_those_of_the_collection(saved, rows):
    folder, manifest, expected = saved
    assert torch.equal(SavedRows(folder, manifest, "item").read(rows), expected[rows.start : rows.stop])


def test_what_is_not_there_is_named(saved):
    folder, manifest, _ = saved
    with pytest.raises(CheckpointError, match="has no table 'itm', only: item"):
        SavedRows(folder, manifest, "itm")
    entry = manifest.tables["item"]
    if entry.cores is None:
        emptied = replace(manifest, tables={"item": replace(entry, parts=())})
        with pytest.raises(CheckpointError, match="table 'item': 5 of 5 rows are in no file"):
            SavedRows(folder, emptied, "item").read(range(5))
