"""Pipelines over rows on a device train the model of the plain loop there; on the GPU where there is one, else
interpreted, where streams that are late stand in for those of a GPU."""

import threading
from dataclasses import replace
from typing import ClassVar
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.data import Batch
from rowmesh.errors import ConfigurationError, IdRangeError, PeerError
from rowmesh.exchange.device_micro_batch import OnDevice
from rowmesh.mesh import Mesh
from rowmesh.ops.window import FINAL, DeviceWindow
from rowmesh.pipeline import Pipeline
from rowmesh.pipeline import pipeline as pipelines
from rowmesh.pipeline.streams import DeviceStreams
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec
from tests.collection.test_equivalence import assert_close, assert_same_bits
from tests.support.devices import assert_same_counts
from tests.support.jobs import pipelined_jobs
from tests.support.plans import with_copies
from tests.support.scenario import Scenario
from tests.support.streams import LateDeviceStreams
from tests.support.tables import table
from tests.support.training import train
from tests.support.triton import find_device, kernels_of, refusing_waits

pytestmark = pytest.mark.triton
kernels_of("pool")  # or all are skipped

TABLES = (
    table("user", 20, 3, "adam", features=("user", "friend")),
    table("item", 40, 8, "row_wise_adagrad", pooling="mean"),
    table("word", 9, 8, "row_wise_adagrad", pooling="none"),
)
JOB = Scenario(tables=TABLES, batch_sizes=(4, 3), num_steps=4, decay=0.9, sharing="hot")
IN_TURN = {"depth": 0, "overlap": False}


def on_device(mesh, scenario, pipeline):
    return train(mesh, replace(scenario, pipeline=pipeline), device="cuda")


def compare(mesh, scenario, *pipelines):
    """Whole batches are the plain loop to the bit; micro-batches are it to rounding, and each other's to the bit."""
    plain, in_parts = on_device(mesh, scenario, None), None
    for options in pipelines:
        found = on_device(mesh, scenario, options)
        assert_same_counts(found, plain)
        if options.get("micro_batches", 1) == 1:
            assert_same_bits(found, plain)
            continue
        in_parts = in_parts or on_device(mesh, scenario, IN_TURN | {"micro_batches": options["micro_batches"]})
        assert_close(scenario, found, plain)
        assert_same_bits(found, in_parts)


@pytest.mark.slow
def test_one_rank():
    scenario = replace(JOB, batch_sizes=(4,), is_weighted=True, evaluates=True, num_steps=3)
    compare(Mesh(), scenario, {"depth": 1}, {"depth": 2, "micro_batches": 3})


@pytest.mark.slow
def test_two_ranks(ranks):
    ranks.run(compare, JOB, {"depth": 1}, {"depth": 2, "micro_batches": 3}, world_size=2)


def test_copied_rows(ranks):
    """Read in place, after the update before; the others travel by micro-batch."""
    scenario = replace(JOB, plan=with_copies(TABLES, world_size=2), num_steps=2)
    ranks.run(compare, scenario, {"depth": 1, "micro_batches": 2}, world_size=2)


def clip(mesh, scenario, options):
    plain, found = (on_device(mesh, scenario, each) for each in (None, options))
    assert_close(scenario, found, plain)
    assert_same_bits(found, on_device(mesh, scenario, IN_TURN | {"micro_batches": options["micro_batches"]}))


@pytest.mark.slow
def test_clipped_gradients(ranks):
    """Rows that travel by micro-batch, whose owners sum their gradients, and copied ones; whole on one rank."""
    scenario = replace(JOB, max_norm=0.02, num_steps=2)
    copied = replace(scenario, plan=with_copies(TABLES, world_size=2))
    ranks.run(clip, copied, {"depth": 1, "micro_batches": 2}, world_size=2)
    clip(Mesh(), replace(scenario, batch_sizes=(4,)), {"depth": 1, "micro_batches": 2})


MORE = [
    {"depth": 0},
    {"depth": 3},
    {"depth": 1, "final_rows": False},
    {"depth": 1, "micro_batches": 3, "exchange": "unsplit"},
    {"depth": 0, "micro_batches": 3},
    {"depth": 2, "micro_batches": 3, "final_rows": False},
]
JOBS = {
    "rows that batches do not share": replace(JOB, sharing="none", evaluates=True),
    "weights": replace(JOB, is_weighted=True),
    "an empty rank": replace(JOB, batch_sizes=(0, 5)),
    "fixed bags, one sample more than micro-batches": replace(JOB, bag_sizes=(2, 2), batch_sizes=(4, 2)),
    "copied rows": replace(JOB, plan=with_copies(TABLES, world_size=2)),
    "loops that are left": replace(JOB, breaks=(1,), plain=(2,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_more_of_two_ranks(ranks, name):
    ranks.run(compare, JOBS[name], *MORE, world_size=2)


@pytest.mark.slow
def test_more_of_one_rank():
    for name, scenario in JOBS.items():
        if name not in ("an empty rank", "copied rows"):
            compare(Mesh(), replace(scenario, batch_sizes=(4,)), *MORE)


@pytest.mark.slow
def test_nodes(ranks):
    scenario = replace(JOB, batch_sizes=(3, 2, 4, 0), ranks_per_node=2)
    ranks.run(compare, scenario, {"depth": 1}, {"depth": 1, "micro_batches": 2}, world_size=4)


@pytest.mark.slow
def test_clusters(ranks):
    options = {"micro_batches": 2, "clustering": "light_ends", "sizes": "light_ends"}
    scenario = replace(JOB, batch_sizes=(6, 5))
    ranks.run(train_clustered, scenario, options, world_size=2)


def train_clustered(mesh, scenario, options):
    in_turn = on_device(mesh, scenario, IN_TURN | options)
    assert_same_bits(on_device(mesh, scenario, {"depth": 1} | options), in_turn)
    assert_close(scenario, in_turn, train(mesh, replace(scenario, pipeline=IN_TURN | options), "collective"))


def in_turn_and_not(mesh, scenario):
    """To the bit as in turn, rows and gradients whole; to rounding as on a CPU."""
    options = scenario.pipeline
    mine = on_device(mesh, scenario, options)
    assert_same_bits(mine, on_device(mesh, scenario, options | IN_TURN | {"exchange": "unsplit"}))
    if scenario.dtype == torch.float64:
        assert_close(scenario, mine, train(mesh, scenario, "auto" if mesh.world_size == 1 else "collective"))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_options(ranks, world_size):
    @settings(max_examples=10)
    @given(data=st.data())
    def check(data):
        form = data.draw(st.sampled_from(["delta", "delta", "unsplit"]))
        scenario = data.draw(pipelined_jobs(world_size, exchange=form, verify=False))
        nodes = 2 if world_size == 4 and data.draw(st.booleans()) else None
        ranks.run(in_turn_and_not, replace(scenario, ranks_per_node=nodes), world_size=world_size)

    check()


# What a GPU does later


def train_late(mesh, scenario, options, seeds):
    """As in turn, however late the stream that communicates, and although what is dropped is spoilt."""
    in_turn = on_device(mesh, scenario, options | IN_TURN)
    for seed in seeds:
        late = LateDeviceStreams.with_seed(seed)
        with mock.patch.object(pipelines, "DeviceStreams", late):
            assert_same_bits(on_device(mesh, scenario, options | {"overlap": True}), in_turn)
        assert late.num_late > 0


LATE = {"depth": 2, "micro_batches": 2}


@pytest.mark.slow
def test_streams_may_be_late(ranks):
    ranks.run(train_late, replace(JOB, num_steps=4), LATE, range(1), world_size=2)


def test_streams_may_be_late_where_the_update_sums_gradients():
    """As it does on one rank, without micro-batches."""
    left = []

    def noted(window, *args, **options):
        add(window, *args, **options)
        left.append(window._left is not None)

    add = DeviceWindow.add_gradients
    with mock.patch.object(DeviceWindow, "add_gradients", noted):
        train_late(Mesh(), replace(JOB, num_steps=4, batch_sizes=(4,)), {"depth": 2}, range(2))
    assert left
    assert all(left)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_streams_may_be_late_often(ranks, depth, world_size):
    scenario = replace(JOB, num_steps=6, batch_sizes=(4, 3)[:world_size])
    if depth == 1 and world_size == 2:
        scenario = replace(scenario, plan=with_copies(TABLES, world_size=2))
    ranks.run(train_late, scenario, {"depth": depth, "micro_batches": 2}, range(8), world_size=world_size)


class NotedStreams(DeviceStreams):
    """Note what they are asked for."""

    noted: ClassVar[list[str]] = []

    def run(self, action, task):
        self.noted.append(task.stage)
        super().run(action, task)

    def meet(self):
        self.noted.append("meet")
        super().meet()


def test_streams_meet_before_the_program_looks_rows_up_and_after():
    """What it does then, on its own stream, may update rows that replicas sent, and ends their use of memory."""
    collection = EmbeddingCollection([TableSpec(name="a", num_rows=9, dim=3)], device="cuda")
    optimizer, noted = EmbeddingOptimizer(collection), NotedStreams.noted
    noted.clear()
    with mock.patch.object(pipelines, "DeviceStreams", NotedStreams):
        for window in Pipeline(collection, depth=1).windows(items([[1]], [[2]], [[3]])):
            for part in window:
                part.embeddings.values.sum().backward()
            optimizer.step()
            if window.number == 1:
                collection(SparseBatch.from_bags({"a": [[4]]}))
                noted.append("look-up")
    assert noted.count("meet") == 2 + 1 + 1  # at both ends; before the look-up, and after
    place = noted.index("look-up")
    assert noted[place - 1] == noted[place + 1] == "meet"


def test_a_stream_that_does_not_wait_is_found():
    """By lateness: computation reads rows that are not there yet."""
    late = LateDeviceStreams.with_seed(0, waits=False)
    with mock.patch.object(pipelines, "DeviceStreams", late), pytest.raises(AttributeError, match="source"):
        on_device(Mesh(), replace(JOB, batch_sizes=(4,), num_steps=3), LATE)


# What travels when


def count_final(mesh, scenario):
    """Rows that came before their window opened, and all that came, of this rank."""
    found = []
    post = OnDevice.post_rows

    def noted(self, window, phase):
        found.append((phase, sum(window.memory.rows_in.sizes[phase])))
        return post(self, window, phase)

    with mock.patch.object(OnDevice, "post_rows", noted):
        on_device(mesh, scenario, {"depth": 1, "micro_batches": 2})
    return sum(count for phase, count in found if phase == FINAL), sum(count for _, count in found)


def test_rows_that_the_batch_before_leaves_alone_come_during_it(ranks):
    """Of one table and batches that share no rows, all; of rows that are in every batch, those of the first one."""
    scenario = Scenario(tables=(table("a", 60, 3),), batch_sizes=(3, 2), bag_sizes=(2, 2), num_steps=3, sharing="none")
    for final, rows in ranks.run(count_final, scenario, world_size=2):
        assert 0 < final == rows
    one_row = Scenario(tables=(table("a", 1, 3),), batch_sizes=(3, 2), bag_sizes=(1, 1), num_steps=3)
    for final, rows in ranks.run(count_final, one_row, world_size=2):
        assert (final, rows) == (1, 3)


# What goes wrong


def items(*ids):
    for each in ids:
        sparse = SparseBatch.from_bags({"a": each})
        yield Batch(torch.zeros(len(each), 0), sparse, torch.zeros(len(each)))


def run_all(pipeline, optimizer, loader):
    for window in pipeline.windows(loader):
        for part in window:
            part.embeddings.values.square().sum().backward()
        optimizer.step()


def refuse(mesh):
    """The third batch of rank 1 has an id that is no row; what each rank says, and what it had learnt by then."""
    collection = EmbeddingCollection([TableSpec(name="a", num_rows=9, dim=3)], mesh=mesh, device="cuda")
    optimizer, bad = EmbeddingOptimizer(collection), 99 if mesh.rank == mesh.world_size - 1 else 1
    with pytest.raises((IdRangeError, PeerError)) as caught, Pipeline(collection, depth=1) as pipeline:
        run_all(pipeline, optimizer, items([[1]], [[2]], [[bad]], [[3]]))
    run_all(Pipeline(collection, depth=1), optimizer, items([[4]], [[5]]))  # goes on
    assert not [each for each in threading.enumerate() if each.name.startswith("rowmesh ")]
    return str(caught.value)


def test_ids_that_are_no_rows(ranks):
    first, second = ranks.run(refuse, world_size=2)
    assert first.startswith("rank 0 in stage 'open' of batch 2: rank 0: rank 1 refused a batch")
    assert second.startswith("rank 1 in stage 'open' of batch 2: rank 1: feature 'a': 1 of 1 ids are outside table 'a'")
    assert refuse(Mesh()).startswith("rank 0 in stage 'update' of batch 2: rank 0: feature 'a': 1 of 1 ids are outside")


def bring_more(mesh):
    """Rank 0 has a batch more than the others."""
    collection = EmbeddingCollection([TableSpec(name="a", num_rows=9, dim=3)], mesh=mesh, device="cuda")
    loader = items(*[[[1]]] * (3 - mesh.rank))
    with pytest.raises(PeerError) as caught, Pipeline(collection, depth=1) as pipeline:
        run_all(pipeline, EmbeddingOptimizer(collection), loader)
    return str(caught.value)


def test_a_rank_that_brings_more_batches(ranks):
    for rank, message in enumerate(ranks.run(bring_more, world_size=2)):
        where = f"rank {rank}: ranks are out of step: rank 1 has no batch 2 and rank 0 has; "
        assert message.startswith(f"{where}every rank must bring equally many batches")


def refused(mesh):
    collection = EmbeddingCollection([TableSpec(name="a", num_rows=9, dim=3)], mesh=mesh, device="cuda")
    for options, what in (({"exchange": "naive"}, "exchange 'naive'"), ({"verify": True}, "verify")):
        with pytest.raises(ConfigurationError, match=f"a pipeline on device 'cuda' cannot do this yet: {what}"):
            Pipeline(collection, **options)


def test_what_is_refused(ranks):
    ranks.run(refused, world_size=2)


def test_the_host_waits_for_sizes_alone():
    if find_device().type != "cuda":
        pytest.skip("needs a GPU: only torch's sync debug mode sees waits")
    collection = EmbeddingCollection([TableSpec(name="a", num_rows=9, dim=3)], device="cuda")
    optimizer = EmbeddingOptimizer(collection)
    run_all(Pipeline(collection, depth=1, micro_batches=2), optimizer, items([[1]], [[2]]))  # kernels are compiled
    with refusing_waits():
        run_all(Pipeline(collection, depth=1, micro_batches=2), optimizer, items(*[[[1], [2]]] * 4))
