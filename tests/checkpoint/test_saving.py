"""State dictionaries, `rowmesh.save` and torch.distributed.checkpoint: what one layout writes, any other reads."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.nn.parallel import DistributedDataParallel

import rowmesh
from rowmesh import (
    SGD,
    AdaGrad,
    Adam,
    EmbeddingCollection,
    EmbeddingOptimizer,
    JointOptimizer,
    Mesh,
    RowWiseAdaGrad,
    ShardedState,
    SparseBatch,
    Synchronization,
    TableSpec,
    checkpoint,
)
from rowmesh._support.faults import arm
from rowmesh.checkpoint import read_manifest
from rowmesh.errors import CheckpointError, ConfigurationError
from rowmesh.placement import Plan, RowRange, TablePlan
from rowmesh.tables import TensorTrain
from tests.support.ranks import RankPool

CORES = {"storage": "tensor_train", "tensor_train": TensorTrain(rank=2)}
TABLES = (
    TableSpec(name="user.id", num_rows=37, dim=3, optimizer=RowWiseAdaGrad(lr=0.1)),
    TableSpec(name="item", num_rows=64, dim=16, optimizer=Adam(lr=0.1)),
    TableSpec(name="day", num_rows=7, dim=3, optimizer=SGD(lr=0.1), dtype=torch.bfloat16),
    TableSpec(name="one", num_rows=1, dim=3, optimizer=AdaGrad(lr=0.1)),
    TableSpec(name="cores", num_rows=50, dim=4, optimizer=AdaGrad(lr=0.1), **CORES),
)
STORED = [table for table in TABLES if table.storage == "dense"]


class Model(torch.nn.Module):
    """Tables inside a model."""

    def __init__(self, mesh: Mesh, tables=TABLES, seed: int = 0, **options) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(tables, mesh=mesh, seed=seed, **options)
        torch.manual_seed(seed)
        self.dense = torch.nn.Linear(sum(table.dim for table in tables), 1)

    def forward(self, batch: SparseBatch) -> torch.Tensor:
        return self.dense(torch.tanh(self.embeddings(batch).values))


class Job:
    """A model with its optimizers, at some step."""

    def __init__(self, mesh: Mesh, seed: int = 0, wrapped: bool = True, **options) -> None:
        self.mesh, self.tables = mesh, options.get("tables", TABLES)
        self.network = Model(mesh, seed=seed, **options)
        self.model: torch.nn.Module = self.network
        if mesh.group is not None and wrapped:
            self.model = DistributedDataParallel(self.network, process_group=mesh.group)
        self.dense_optimizer = torch.optim.Adam(self.network.dense.parameters(), lr=0.01)
        self.sparse_optimizer = EmbeddingOptimizer(self.network.embeddings)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.sparse_optimizer, 0.9)
        self.step = 0

    @property
    def state(self):
        return {
            "model": self.model,
            "dense": self.dense_optimizer,
            "sparse": self.sparse_optimizer,
            "schedule": self.schedule,
            "step": self.step,
        }

    def train(self, num_steps: int) -> Job:
        for _ in range(num_steps):
            generator = torch.Generator().manual_seed(self.step)
            ids = torch.stack([torch.randint(table.num_rows, (8,), generator=generator) for table in self.tables])
            own = ids[:, self.mesh.rank :: self.mesh.world_size]
            self.dense_optimizer.zero_grad()
            self.model(SparseBatch.from_dense([table.name for table in self.tables], own)).square().mean().backward()
            self.dense_optimizer.step()
            self.sparse_optimizer.step()
            self.schedule.step()
            self.step += 1
        return self

    def everything(self):
        """What this rank has: rows and states by number, cores, the network and all optimizers."""
        embeddings, found = self.network.embeddings, {}
        embeddings.synchronize()
        for table in self.tables:
            if table.storage == "tensor_train":
                found[table.name] = {name: each.clone() for name, each in embeddings.cores(table.name).tensors.items()}
                continue
            for piece in embeddings.held_rows(table.name):
                for at, row in enumerate(piece.rows):
                    states = [piece.values[at].clone(), *(each[at].clone() for each in piece.state.values())]
                    found[f"{table.name}:{row}"] = dict(enumerate(states))
        found["network"] = {name: each.clone() for name, each in self.network.dense.state_dict().items()}
        moments = self.dense_optimizer.state_dict()["state"]
        found["moments"] = {
            f"{number}.{name}": each.clone() for number, of in moments.items() for name, each in of.items()
        }
        rates = [group["lr"] for group in self.sparse_optimizer.param_groups]
        found["numbers"] = {"all": torch.tensor([*rates, embeddings.step_count, self.schedule.last_epoch, self.step])}
        return found

    def close(self) -> None:
        self.network.embeddings.close()


def assert_same(found, expected):
    for name, values in found.items():
        assert values.keys() == expected[name].keys()
        for key, value in values.items():
            assert value.equal(expected[name][key]), (name, key)


def alone(num_steps=3):
    return Job(Mesh()).train(num_steps)


# State dictionaries of torch on one rank


def reread(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_dictionaries_have_rows_and_their_optimizer_states():
    job = alone()
    saved = reread([job.model.state_dict(), job.sparse_optimizer.state_dict(), job.dense_optimizer.state_dict()])
    assert saved[0]["embeddings.item.weight"].shape == (64, 16)
    assert saved[1]["rows"].keys() >= {"user.id.sum", "item.m", "item.v", "one.sum", "cores.core1.sum"}
    expected = job.everything()
    job.train(1)  # what was saved is a copy
    other = Job(Mesh(), seed=5)
    other.model.load_state_dict(saved[0])
    other.sparse_optimizer.load_state_dict(saved[1])
    other.dense_optimizer.load_state_dict(saved[2])
    other.schedule.last_epoch, other.step = 3, 3
    assert_same(other.everything(), expected)
    assert_same(other.train(1).everything(), job.everything())


def test_a_state_dictionary_that_does_not_fit_is_refused():
    model = Model(Mesh())
    good = model.state_dict()
    lacks = {name: value for name, value in good.items() if name != "embeddings.item.weight"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"embeddings.item.weight"'):
        model.load_state_dict(lacks)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\).*"embeddings.other"'):
        model.load_state_dict(good | {"embeddings.other": torch.zeros(1)})
    assert model.load_state_dict(lacks, strict=False).missing_keys == ["embeddings.item.weight"]
    for other in (torch.zeros(63, 16), torch.zeros(64, 16, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match=r"size mismatch for item.weight: copying .* expected .*\(64, 16\)"):
            model.load_state_dict(good | {"embeddings.item.weight": other})
    with pytest.raises(RuntimeError, match=r"item.weight must be a tensor, got list"):
        model.load_state_dict(good | {"embeddings.item.weight": [1.0]})


def test_optimizer_states_that_do_not_fit_are_refused():
    optimizer = alone().sparse_optimizer
    state = optimizer.state_dict()
    state["rows"].pop("item.m")
    with pytest.raises(CheckpointError, match=r"lacks \['item.m'\] and has nothing besides"):
        optimizer.load_state_dict(state)
    del state["rows"]
    with pytest.raises(CheckpointError, match=r"no optimizer states of rows.*rowmesh.load"):
        optimizer.load_state_dict(state)


def test_a_joint_optimizer_has_the_states_of_rows():
    job = alone()
    joint = JointOptimizer(job.dense_optimizer, job.sparse_optimizer)
    state, expected = reread(joint.state_dict()), job.everything()
    job.train(1)
    joint.load_state_dict(state)
    assert_same({"moments": job.everything()["moments"]}, expected)
    states = [values for name, values in expected.items() if name.startswith("item:")]
    found = [values for name, values in job.everything().items() if name.startswith("item:")]
    assert all(a[1].equal(b[1]) and a[2].equal(b[2]) for a, b in zip(found, states, strict=True))


def test_tiered_tables_are_not_copied_into_memory(tmp_path: Path):
    tables = (TableSpec(name="item", num_rows=64, dim=3, storage="tiered"),)
    options = {"tables": tables, "tiers": rowmesh.Tiers(fast_share=0.5, folder=tmp_path)}
    job = Job(Mesh(), **options).train(2)
    with pytest.raises(CheckpointError, match=r"tiered tables \['item'\] into memory; rowmesh.save"):
        job.model.state_dict()
    rowmesh.save(tmp_path / "model", job.state)
    other = Job(Mesh(), seed=1, **options)
    rowmesh.load(tmp_path / "model", other.state)
    other.step = job.step
    assert_same(other.everything(), job.everything())


# State dictionaries of torch on several ranks


def refuse_whole(mesh):
    job = Job(mesh)
    for call in (job.model.state_dict, job.sparse_optimizer.state_dict):
        with pytest.raises(CheckpointError, match=r"spread over 2 ranks. rowmesh.save.*rowmesh.ShardedState"):
            call()
    job.close()


def test_on_several_ranks_state_dict_says_what_to_do(ranks: RankPool):
    ranks.run(refuse_whole)


def load_whole(mesh, model, optimizer):
    job = Job(mesh, seed=7)
    job.network.load_state_dict(model)
    job.sparse_optimizer.load_state_dict(optimizer)
    found = job.everything()
    job.close()
    return found


def load_misfit(mesh, model):
    job = Job(mesh)
    if mesh.rank == 1:
        model["embeddings.item.weight"] = torch.zeros(3, 16)
    with pytest.raises(RuntimeError, match=r"size mismatch for item.weight"):
        job.network.load_state_dict(model)
    job.close()


def test_every_rank_takes_its_rows_of_a_whole_state_dictionary(ranks: RankPool):
    job = alone()
    expected = job.everything()
    for found in ranks.run(load_whole, job.model.state_dict(), job.sparse_optimizer.state_dict()):
        assert_same({name: found[name] for name in found if name not in ("moments", "numbers")}, expected)
    ranks.run(load_misfit, job.model.state_dict())


# rowmesh.save and rowmesh.load


def copied_plan(world_size):
    """Every table with copied, cyclic and fixed rows."""
    shapes = Plan.cyclic([rowmesh.placement.TableShape.of(table) for table in STORED], world_size, world_size).tables
    tables = []
    for each in shapes:
        n = each.shape.num_rows
        parts = (RowRange(0, n // 4, "replicated"), RowRange(n // 4, n // 2), RowRange(n // 2, n, "fixed", rank=1))
        tables.append(TablePlan(each.shape, tuple(part for part in parts if len(part))))
    return Plan(tuple(tables), world_size=world_size, ranks_per_node=world_size)


def options_of(layout, mesh):
    if layout == "copies" and mesh.world_size > 1:
        return {"plan": copied_plan(mesh.world_size), "transport": "collective"}
    if layout == "replicas" and mesh.world_size > 1:
        return {"replicas": 2, "synchronization": Synchronization(mode="exact")}
    if layout == "wrapped":
        return {}
    return {"wrapped": False}


def load_and_save(mesh, first, second, layout, num_steps=0):
    """Loads, perhaps trains, saves; returns what this rank has."""
    job = Job(mesh, seed=3, **options_of(layout, mesh))
    if first:
        job.step = rowmesh.load(str(first), job.state)["step"]
    job.train(num_steps)
    if second:
        rowmesh.save(second, job.state)
    found = job.everything()
    job.close()
    return found


@pytest.mark.parametrize("world_size, layout", [(2, "copies"), (4, "replicas"), (2, "wrapped")])
def test_any_layout_loads_what_another_saved(ranks: RankPool, tmp_path: Path, world_size, layout):
    job = alone()
    rowmesh.save(tmp_path / "first", job.state)
    paths = (tmp_path / "first", tmp_path / "second")
    for found in ranks.run(load_and_save, *paths, layout, world_size=world_size):
        assert_same(found, job.everything())
    other = Job(Mesh(), seed=5)
    other.step = rowmesh.load(tmp_path / "second", other.state)["step"]
    assert_same(other.everything(), job.everything())
    assert_same(other.train(2).everything(), job.train(2).everything())


def check_two_and_four(ranks: RankPool, folder: Path, load_and_save, layout: str):
    """Two ranks save, four load that and save, and two load that."""
    first, second = folder / "first", folder / "second"
    parts = ranks.run(load_and_save, None, first, "copies", 3)
    merged = {name: values for part in parts for name, values in part.items()}
    for found in ranks.run(load_and_save, first, second, layout, world_size=4):
        assert_same(found, merged)
    for found, part in zip(ranks.run(load_and_save, second, None, "copies"), parts, strict=True):
        assert_same(found, part)


def test_two_ranks_save_and_four_load(ranks: RankPool, tmp_path: Path):
    check_two_and_four(ranks, tmp_path, load_and_save, "plain")


def test_a_model_is_replaced_only_where_that_is_asked_for(tmp_path: Path):
    job = alone(1)
    rowmesh.save(str(tmp_path), job.state, metadata={"name": "first"})
    expected = job.everything()
    job.train(1)
    with pytest.raises(CheckpointError, match=r"a model in .* already; .*overwrite=True"):
        rowmesh.save(tmp_path, job.state)
    assert read_manifest(tmp_path).metadata == {"name": "first"}
    other = Job(Mesh(), seed=4)
    other.step = rowmesh.load(tmp_path, other.state)["step"]
    assert_same(other.everything(), expected)
    rowmesh.save(tmp_path, job.state, overwrite=True)
    rowmesh.load(tmp_path, other.state)
    other.step = 2
    assert_same(other.everything(), job.everything())


def test_a_model_without_its_optimizers_is_loaded_into_any_optimizer(tmp_path: Path):
    job = alone(1)
    rowmesh.save(tmp_path, job.state)
    tables = [TableSpec(name=t.name, num_rows=t.num_rows, dim=t.dim, dtype=t.dtype, optimizer=SGD()) for t in STORED]
    tables.append(TableSpec(name="cores", num_rows=50, dim=4, optimizer=SGD(), **CORES))
    model = Model(Mesh(), tables=tables, seed=8)
    rest = rowmesh.load(tmp_path, {"model": model})
    assert sorted(rest) == ["dense", "schedule", "sparse", "step"]
    assert model.state_dict()["embeddings.item.weight"].equal(job.model.state_dict()["embeddings.item.weight"])
    with pytest.raises(CheckpointError, match=r"'user.id': optimizer is row_wise_adagrad in the checkpoint and sgd"):
        rowmesh.load(tmp_path, {"model": model, "sparse": EmbeddingOptimizer(model.embeddings)})


def test_what_cannot_be_saved_or_loaded_is_named(tmp_path: Path):
    job = alone(1)
    with pytest.raises(ConfigurationError, match="no EmbeddingCollection is in what is saved"):
        rowmesh.save(tmp_path / "a", {"dense": job.network.dense})
    with pytest.raises(ConfigurationError, match="'sparse' updates tables that no module here has"):
        rowmesh.save(tmp_path / "a", {"other": Model(Mesh()), "sparse": job.sparse_optimizer})
    with pytest.raises(ConfigurationError, match=r"two EmbeddingCollections have a table 'user.id'.*rename one"):
        rowmesh.save(tmp_path / "a", {"model": job.model, "other": Model(Mesh())})
    with pytest.raises(CheckpointError, match=r"'extra'\['f'\]\[1\] is a object, which is no plain value"):
        rowmesh.save(tmp_path / "a", {"model": job.model, "extra": {"f": [1, object()]}})
    assert not (tmp_path / "a").exists()
    rowmesh.save(tmp_path / "b", {"model": job.model})
    with pytest.raises(CheckpointError, match=r"has no \['dense'\]; it has the tables and \['model'\]"):
        rowmesh.load(tmp_path / "b", {"model": job.model, "dense": job.dense_optimizer})
    job.network.dense = torch.nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match=r"'model' does not fit what was saved:(?s:.*)size mismatch"):
        rowmesh.load(tmp_path / "b", {"model": job.model})
    with pytest.raises(CheckpointError, match="no model in"):
        rowmesh.load(tmp_path / "c", {"model": job.model})


def test_what_rowmesh_train_wrote_is_loaded(tmp_path: Path):
    job = alone(1)
    checkpoint.save(tmp_path, job.network.embeddings, {"network": job.network.dense.state_dict(), "step": 1})
    other = Model(Mesh(), seed=2)
    assert rowmesh.load(tmp_path, {"tables": other.embeddings, "network": other.dense}) == {"step": 1}
    assert_same({"all": dict(other.state_dict())}, {"all": dict(job.network.state_dict())})


def test_two_collections_are_one_model(tmp_path: Path):
    def make(seed):
        double = TableSpec(name="double", num_rows=5, dim=2, dtype=torch.float64)
        return EmbeddingCollection(TABLES, seed=seed), EmbeddingCollection([double], seed=seed)

    first, second = make(0), make(1)
    rowmesh.save(tmp_path, dict(zip("ab", first, strict=True)))
    assert rowmesh.load(tmp_path, dict(zip("ab", second, strict=True))) == {}
    for one, other in zip(first, second, strict=True):
        assert all(value.equal(other.state_dict()[name]) for name, value in one.state_dict().items())


def save_where_one_cannot(mesh, folder):
    job = Job(mesh)
    state = job.state | ({"extra": object()} if mesh.rank == 1 else {"extra": 0})
    with pytest.raises(CheckpointError, match="'extra' is a object"):
        rowmesh.save(folder, state)
    rowmesh.save(folder, job.state)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        rowmesh.save(folder, job.state)
    missing = job.state | ({"extra": job.schedule} if mesh.rank == 1 else {})
    with pytest.raises(CheckpointError, match=r"has no \['extra'\]"):
        rowmesh.load(folder, missing)
    job.close()


def test_all_ranks_fail_where_one_does(ranks: RankPool, tmp_path: Path):
    ranks.run(save_where_one_cannot, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "manifest.json").read_text())["world_size"] == 2


# torch.distributed.checkpoint


def through_dcp(mesh, first, second, layout, num_steps=0):
    """Loads, perhaps trains, saves; returns what this rank has."""
    job = Job(mesh, seed=3, **options_of(layout, mesh))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process has no process group
        warnings.simplefilter("ignore", FutureWarning)
        state = job.state
        if first:
            state_dict_loader.load(
                {"training": ShardedState(state)},
                checkpoint_id=first,
                process_group=mesh.group,
                no_dist=mesh.group is None,
            )
            job.step = state["step"]
        job.train(num_steps)
        if second:
            state = {"training": ShardedState(job.state)}
            state_dict_saver.save(state, checkpoint_id=second, process_group=mesh.group, no_dist=mesh.group is None)
    found = job.everything()
    job.close()
    return found


@pytest.mark.parametrize("layout", ["copies", "wrapped"])
def test_distributed_checkpoints_go_from_one_rank_to_two_and_back(ranks: RankPool, tmp_path: Path, layout):
    first, second = tmp_path / "first", tmp_path / "second"
    expected = through_dcp(Mesh(), None, first, layout, 3)
    for found in ranks.run(through_dcp, first, second, layout):
        assert_same(found, expected)
    assert_same(through_dcp(Mesh(), second, None, layout), expected)


def test_distributed_checkpoints_go_from_two_ranks_to_four(ranks: RankPool, tmp_path: Path):
    check_two_and_four(ranks, tmp_path, through_dcp, "replicas")


# Beside training


def save_beside_training(mesh, folder):
    """Saves at once, and in a thread that ends only after more steps."""
    job = Job(mesh, tables=STORED).train(2)
    rowmesh.save(folder / "at_once", job.state)
    saving = rowmesh.async_save(folder / "beside", job.state)
    job.train(3)
    assert saving.wait()
    second = rowmesh.async_save(folder / "second", job.state, copy_bytes=0)
    third = rowmesh.async_save(folder / "third", job.state)
    assert second.is_done
    third.wait()
    job.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_saved_beside_training_is_that_of_the_moment(ranks: RankPool, tmp_path: Path, world_size: int):
    ranks.run(save_beside_training, tmp_path, world_size=world_size)
    found = {}
    for name in ("at_once", "beside", "second", "third"):
        (folder,) = [path for path in (tmp_path / name).iterdir() if path.is_dir()]
        found[name] = {path.name: path.read_bytes() for path in folder.glob("*.npy")}
    assert found["beside"] == found["at_once"]
    assert found["second"] == found["third"] != found["beside"]


def fail_beside_training(mesh, folder):
    job = Job(mesh, tables=STORED).train(1)
    rowmesh.save(folder / "before", job.state)

    def fail(name):
        with arm("checkpoint.write_rows=ENOSPC" if mesh.rank == 1 else ""):
            saving = rowmesh.async_save(folder / name, job.state)
            job.train(1)
            while not saving.is_done:
                time.sleep(0.01)
        return saving

    saving = fail("model")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"rank 1 cannot write the checkpoint .*No space left"):
            saving.wait()
    rowmesh.load(folder / "before", job.state)  # it was said
    fail("model")
    with pytest.raises(CheckpointError, match=r"rank 1 cannot write the checkpoint"):  # whoever did not wait learns it
        rowmesh.async_save(folder / "next", job.state)
    rowmesh.async_save(folder / "next", job.state).wait()
    job.close()


def test_what_went_wrong_beside_training_is_raised_on_every_rank(ranks: RankPool, tmp_path: Path):
    ranks.run(fail_beside_training, tmp_path)


def test_a_save_waits_for_what_is_written_beside_training(tmp_path):
    """Each removes what others left in the folder."""
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=50, dim=4)])
    with arm(point="snapshot.read", action=lambda: time.sleep(0.3)):
        saving = rowmesh.async_save(tmp_path / "model", {"embeddings": embeddings, "step": 1})
        rowmesh.save(tmp_path / "model", {"embeddings": embeddings, "step": 2}, overwrite=True)
    assert saving.is_done
    assert rowmesh.load(tmp_path / "model", {"embeddings": embeddings}) == {"step": 2}


@pytest.mark.parametrize(
    "value, said",
    [
        (np.float64(1.0), r"float64, .*\.item\(\) makes a plain number of it"),
        ({"best": [np.str_("a")]}, "'best'"),
        (defaultdict(int), "defaultdict"),
        (namedtuple("Pair", "a b")(1, 2), "Pair"),
        (signal.SIGTERM, "Signals"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(tmp_path, value, said):
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=50, dim=4)])
    with pytest.raises(CheckpointError, match=said):
        rowmesh.save(tmp_path / "model", {"embeddings": embeddings, "value": value})
    assert not (tmp_path / "model").exists()


def test_what_is_written_can_be_read(tmp_path):
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=50, dim=4)])
    values = {"counter": Counter("ab"), "ordered": OrderedDict(a=1), "set": {1}, "tuple": (1, "a", None, b"b", True)}
    values |= {"size": torch.Size([2]), "dtype": torch.float32, "device": torch.device("cpu")}
    rowmesh.save(tmp_path / "model", {"embeddings": embeddings, **values})
    assert rowmesh.load(tmp_path / "model", {"embeddings": embeddings}) == values


def test_learning_rates_are_those_of_their_tables_in_any_order(tmp_path):
    def made(names):
        rules = {"a": SGD(lr=1.0), "b": SGD(lr=0.001)}
        tables = [TableSpec(name=n, num_rows=4, dim=4 if n == "a" else 8, optimizer=rules[n]) for n in names]
        embeddings = EmbeddingCollection(tables)
        return embeddings, EmbeddingOptimizer(embeddings)

    embeddings, optimizer = made("ab")
    rowmesh.save(tmp_path / "model", {"tables": embeddings, "optimizer": optimizer})
    others, optimizer = made("ba")
    rowmesh.load(tmp_path / "model", {"tables": others, "optimizer": optimizer})
    assert {group["tables"][0]: group["lr"] for group in optimizer_tables(optimizer, others)} == {"a": 1.0, "b": 0.001}


def optimizer_tables(optimizer, embeddings):
    groups = zip(embeddings.groups, optimizer.param_groups, strict=True)
    return [{"tables": [table.name for table in group.tables], "lr": each["lr"]} for group, each in groups]


@pytest.mark.parametrize("name", [".hidden", "../up", "a/b", "%2E"])
def test_any_name_of_a_table_is_written_and_read(tmp_path, name):
    embeddings = EmbeddingCollection([TableSpec(name=name, num_rows=4, dim=4)])
    rowmesh.save(tmp_path / "model", {"tables": embeddings})
    rowmesh.load(tmp_path / "model", {"tables": embeddings})


UNAWAITED = """
import rowmesh
embeddings = rowmesh.EmbeddingCollection([rowmesh.TableSpec(name="item", num_rows=200_000, dim=8)])
rowmesh.async_save({folder!r}, {{"embeddings": embeddings}})
"""


@pytest.mark.parametrize("faults", ["", "checkpoint.sync=ENOSPC"])
def test_a_program_that_ends_waits_for_what_it_began_to_save(tmp_path, faults):
    folder = tmp_path / "model"
    script = UNAWAITED.format(folder=str(folder))
    variables = os.environ | {"ROWMESH_FAULTS": faults, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True)
    if faults:
        assert f"the checkpoint in {folder} is not written: " in done.stderr
        return
    others = EmbeddingCollection([TableSpec(name="item", num_rows=200_000, dim=8)])
    rowmesh.load(folder, {"embeddings": others})
    assert done.stderr == ""
