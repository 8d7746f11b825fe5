"""Checkpoints of tensor-train tables: cores as they are, read by any number of ranks."""

from dataclasses import replace

import pytest
import torch

from rowmesh import Adam, EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.checkpoint import CheckpointError, load, read_manifest, save
from rowmesh.tables import TensorTrain

CORED = TableSpec(
    name="item/id", num_rows=300, dim=4, optimizer=Adam(), storage="tensor_train", tensor_train=TensorTrain(rank=(2, 3))
)
DENSE = TableSpec(name="user", num_rows=50, dim=4)


def trained(mesh=None, tables=(CORED, DENSE)):
    collection = EmbeddingCollection(tables, mesh=mesh, seed=3)
    ids = torch.arange(12).view(2, 6) * 4
    collection(SparseBatch.from_dense(["item/id", "user"], ids.unsqueeze(-1))).values.sum().backward()
    EmbeddingOptimizer(collection).step()
    return collection


def tensors(collection):
    return {name: tensor.clone() for name, tensor in collection.cores("item/id").tensors.items()}


def save_on(mesh, folder):
    collection = trained(mesh)
    save(folder, collection, {}, peers=mesh.peers)
    return tensors(collection)


def load_on(mesh, folder, optimizer_state):
    collection = EmbeddingCollection((CORED, DENSE), mesh=mesh, seed=4)
    load(folder, collection, optimizer_state=optimizer_state)
    collection.barrier()
    vectors = collection(SparseBatch.from_bags({"item/id": [[299]], "user": [[0]]}))["item/id"].detach()
    torch.testing.assert_close(vectors, collection.cores("item/id").rows(torch.tensor([299])))
    return tensors(collection)


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 2), (2, 1), (4, 3)])
def test_any_number_of_ranks_reads_them(ranks, tmp_path, saved_on, loaded_on):
    saved = ranks.run(save_on, tmp_path, world_size=saved_on)[0]
    assert sorted(saved) == sorted(f"core{k}{state}" for k in (1, 2, 3) for state in ("", ".m", ".v"))
    entry = read_manifest(tmp_path).tables["item/id"]
    assert (entry.parts, entry.cores.ranks, len(entry.cores.files)) == ((), (2, 3), 9)
    for found in ranks.run(load_on, tmp_path, True, world_size=loaded_on):
        assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_cores_without_their_state(tmp_path):
    collection = trained()
    save(tmp_path, collection, {})
    other = EmbeddingCollection((replace(CORED, optimizer=replace(CORED.optimizer, lr=1.0)), DENSE), seed=5)
    load(tmp_path, other, optimizer_state=False)
    for name, tensor in tensors(collection).items():
        assert torch.equal(other.cores("item/id").tensors[name], tensor) == ("." not in name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensor_train": TensorTrain(rank=2)},
            r"ranks is \(2, 3\) in the checkpoint and \(2, 2\) here; use the configuration",
        ),
        (
            {"tensor_train": TensorTrain(rank=(2, 3), row_factors=(6, 7, 8))},
            r"row_factors is \(6, 7, 8\) in the checkpoint and \(6, 7, 8\) here|row_factors is .* here",
        ),
        ({"storage": "dense", "tensor_train": None}, r"is tensor-train cores of ranks \(2, 3\) in the checkpoint and "),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, message):
    save(tmp_path, trained(), {})
    other = EmbeddingCollection((replace(CORED, **changes), DENSE))
    with pytest.raises(CheckpointError, match=f"table 'item/id'.*{message}"):
        load(tmp_path, other)


def test_dense_rows_do_not_become_cores(tmp_path):
    dense = replace(CORED, storage="dense", tensor_train=None)
    save(tmp_path, EmbeddingCollection((dense, DENSE)), {})
    with pytest.raises(CheckpointError, match=r"'item/id' is dense in the checkpoint .* rowmesh.tensor_train.tt_svd"):
        load(tmp_path, EmbeddingCollection((CORED, DENSE)))
