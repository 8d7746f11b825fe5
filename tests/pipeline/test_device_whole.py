"""Pipelines on a device over tables whose rows travel whole, and over replicas: the model of the plain loop there."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from rowmesh.collection.module import EmbeddingCollection
from rowmesh.data import Batch
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.pipeline import Pipeline
from rowmesh.pipeline import pipeline as pipelines
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec, Tiers
from tests.collection.test_equivalence import assert_close, assert_same_bits
from tests.pipeline.test_device import IN_TURN
from tests.support.devices import READ, assert_same_counts, device_of
from tests.support.plans import in_groups, make_plan, with_copies
from tests.support.scenario import Scenario
from tests.support.streams import LateDeviceStreams
from tests.support.tables import table
from tests.support.training import train
from tests.support.triton import kernels_of
from tests.test_tensor_train_tables import cored

pytestmark = pytest.mark.triton
kernels_of("tensor_train")  # or all are skipped

TABLES = (table("tag", 7, 3, "adam"), table("item", 20, 3, "adam", pooling="mean"))
JOB = Scenario(tables=TABLES, batch_sizes=(3, 2), num_steps=3, decay=0.9, sharing="hot")
CORED = (cored("place", 30, 3, "adagrad", rank=2), table("user", 20, 3, "adagrad"))
TIERED = tuple(replace(each, storage="tiered") for each in TABLES)
GROUPS = in_groups(replace(JOB, batch_sizes=(2, 1, 0, 2)), 2)
ONE_COPY_A_NODE = make_plan(TABLES, 2, 1, lambda number: (("node", "cyclic", "replicated")[number % 3], 0, 0, False))
JOBS = {
    "tensor-train tables beside dense ones": replace(JOB, tables=CORED),
    "one copy a node": replace(JOB, plan=ONE_COPY_A_NODE, ranks_per_node=1),
    "replicas of two ranks, averaged": in_groups(GROUPS, 2, mode="average"),
}
ONE_SIDED = {
    "copied rows, evaluations": replace(JOB, plan=with_copies(TABLES, 2), evaluates=True),
    "replicas": GROUPS,
    "replicas, averaged": in_groups(GROUPS, 2, mode="average"),
}
SLOW = {
    "tensor-train tables, one rank": replace(JOB, tables=CORED, batch_sizes=(3,), is_weighted=True),
    "tiered tables": replace(JOB, tables=TIERED, tiers=Tiers(fast_share=0.001, fast_rows=25, verify=True, poison=True)),
    "replicas of one rank": in_groups(JOB, 2),
    "tensor-train tables alone, one rank": replace(JOB, tables=CORED[:1], batch_sizes=(3,)),
    "replicas of two ranks": GROUPS,
    "replicas of one rank, averaged": in_groups(JOB, 2, mode="average"),
    "replicas of one rank, whole tables averaged": replace(
        in_groups(JOB, 2), synchronization=Synchronization("average", every=2, dense=True)
    ),
    "replicas of some tables": in_groups(GROUPS, {"tag": 2, "item": 1}, together="replicas"),
    "tensor-train tables alone": replace(JOB, tables=CORED[:1], plain=(1,), breaks=(2,)),
}


def on_device(mesh, scenario, options, transport="auto"):
    device = device_of(mesh) if transport == "one_sided" else "cuda"
    return train(mesh, replace(scenario, pipeline=options), transport, device)


def compare(mesh, scenario, transport="auto"):
    """To the bit as in turn, and to rounding as the plain loop; whole batches as that to the bit."""
    plain = on_device(mesh, scenario, None, transport)
    assert_same_bits(on_device(mesh, scenario, {"depth": 1}, transport), plain)
    options = {"depth": 2, "micro_batches": 2}
    in_turn = on_device(mesh, scenario, options | IN_TURN, transport)
    found = on_device(mesh, scenario, options, transport)
    assert_same_bits(found, in_turn)
    assert_same_counts(found, plain)
    assert_close(scenario, in_turn, plain)


@pytest.mark.parametrize("name", JOBS)
def test_the_model_of_the_plain_loop(ranks, name):
    ranks.run(compare, JOBS[name], world_size=JOBS[name].world_size)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_of_it(ranks, name):
    ranks.run(compare, SLOW[name], world_size=SLOW[name].world_size)


@pytest.mark.slow
@READ
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "replicas" in name else ()) for name in ONE_SIDED]
)
def test_ranks_that_read_each_other(ranks, name):
    ranks.run(compare, ONE_SIDED[name], "one_sided", world_size=ONE_SIDED[name].world_size)


def train_late(mesh, scenario):
    """As in turn, however late the stream that communicates, and although what is dropped is spoilt."""
    options = {"depth": 2, "micro_batches": 2}
    in_turn = on_device(mesh, scenario, options | IN_TURN)
    late = LateDeviceStreams.with_seed(1)
    with mock.patch.object(pipelines, "DeviceStreams", late):
        assert_same_bits(on_device(mesh, scenario, options), in_turn)
    assert late.num_late > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tensor-train tables beside dense ones", pytest.param("one copy a node", marks=pytest.mark.slow)]
)
def test_streams_may_be_late(ranks, name):
    ranks.run(train_late, replace(JOBS[name], num_steps=5), world_size=2)


def leave(mesh):
    """Leaves a loop amid a batch, which is kept, where half of all fast memory has its rows; then looks others up."""
    tables, most = [TableSpec(name="a", num_rows=60, dim=3, storage="tiered")], 2 * 6
    tiers = Tiers(fast_share=0.001, fast_rows=most // 2 + 3)
    collection = EmbeddingCollection(tables, mesh=mesh, tiers=tiers, device="cuda")
    first, second = (SparseBatch.from_bags({"a": [[row] for row in range(n, n + most)]}) for n in (0, 20))
    loader = [Batch(torch.zeros(most, 0), first, torch.zeros(most))]
    with Pipeline(collection, depth=0) as pipeline:
        for window in pipeline.windows(loader):
            assert len(next(iter(window)).embeddings.values) == most
            break
    with torch.no_grad():
        return collection(second).values.shape, window.number


def test_a_loop_that_is_left_gives_tiered_rows_up(ranks):
    assert ranks.run(leave, world_size=2) == [((12, 3), 0)] * 2


def describe(mesh):
    """The exchanges of tables of several kinds, as printed."""
    tables = [TableSpec(name="a", num_rows=9, dim=3), cored("b", 9, 3)]
    collection = EmbeddingCollection(tables, mesh=mesh, device="cuda")
    return Pipeline(collection).reasons


def test_reasons(ranks):
    alone = describe(Mesh())
    assert [reason.split(": ")[0] for reason in alone] == ["rows and gradients travel whole"] * 2
    dense, cores = ranks.run(describe, world_size=2)[1]
    assert dense.startswith("rows and gradients travel by micro-batch (delta), over ")
    assert cores == "rows and gradients travel whole: tensor-train rows are computed where they are looked up"
