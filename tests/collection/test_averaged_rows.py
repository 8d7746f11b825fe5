"""However a block with averages in the place of rows ends, rows come back, on every rank and to the bit."""

from typing import Any

import pytest
import torch

import rowmesh
from rowmesh import (
    SGD,
    AdaGrad,
    AveragedRows,
    EmbeddingCollection,
    EmbeddingOptimizer,
    Mesh,
    Pipeline,
    RowmeshError,
    SparseBatch,
    TableSpec,
)
from rowmesh._support.faults import arm
from rowmesh.errors import CheckpointError, ConfigurationError
from rowmesh.tables import Dynamic, TensorTrain, Uniform
from tests.support.ranks import RankPool
from tests.support.triton import kernels_of

TABLES = (
    TableSpec(name="item", num_rows=11, dim=4, optimizer=AdaGrad(lr=0.1)),
    TableSpec(name="day", num_rows=5, dim=8, optimizer=SGD(lr=0.1)),
    TableSpec(
        name="cores",
        num_rows=30,
        dim=4,
        storage="tensor_train",
        tensor_train=TensorTrain(rank=2),
        optimizer=AdaGrad(lr=0.1),
    ),
)
NAMES = [table.name for table in TABLES]


def step(embeddings, optimizer):
    batch = SparseBatch.from_bags({"item": [[1], [2, 3]], "day": [[1], [4]], "cores": [[7], [9]]})
    embeddings(batch).values.square().sum().backward()
    optimizer.step()


def made(mesh=None, **options: Any):
    """Tables, their optimizer, and averages that differ from the rows."""
    embeddings = EmbeddingCollection(TABLES, mesh=mesh, **options)
    optimizer, averages = EmbeddingOptimizer(embeddings), AveragedRows(embeddings, decay=0.5)
    for _ in range(2):
        step(embeddings, optimizer)
        averages.update()
    return embeddings, optimizer, averages


def values_of(embeddings):
    """What this rank holds."""
    found = [piece.values.clone() for name in NAMES[:2] for piece in embeddings.held_rows(name)]
    return [*found, *(core.clone() for core in embeddings.cores("cores").cores)]


def equal(found, expected):
    return all(map(torch.equal, found, expected))


def ends_of(embeddings, averages):
    """The rows, and the averages."""
    rows = values_of(embeddings)
    with averages.applied():
        return rows, values_of(embeddings)


def check_after(embeddings, optimizer, averages, rows, means):
    """Rows stand in their places, averages are as they were, and training goes on."""
    assert equal(values_of(embeddings), rows)
    assert equal(ends_of(embeddings, averages)[1], means)
    assert not equal(rows, means)
    step(embeddings, optimizer)
    averages.update()


def check_a_failure(point, number, device):
    embeddings, optimizer, averages = made(device=device)
    rows, means = ends_of(embeddings, averages)
    with arm(f"{point}@{number}=ENOMEM"), pytest.raises(OSError, match="memory"), averages.applied():
        pass
    averages.restore()  # what could not be set the first time
    check_after(embeddings, optimizer, averages, rows, means)


@pytest.mark.parametrize("point", ["averaged_rows.put", "averaged_rows.put_back"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_rows_come_back_where_entering_or_leaving_fails(point, number):
    check_a_failure(point, number, "cpu")


@pytest.mark.triton
def test_and_so_on_a_device():
    kernels_of("gather")
    for point in ("averaged_rows.put", "averaged_rows.put_back"):
        check_a_failure(point, 2, "cuda")


def test_a_rank_that_leaves_averages_refuses_steps_until_they_are_gone():
    embeddings, optimizer, averages = made()
    rows, means = ends_of(embeddings, averages)
    with arm("averaged_rows.put_back@2=ENOMEM"), pytest.raises(OSError, match="memory"), averages.applied():
        pass
    with pytest.raises(RowmeshError, match=r"averages stand in the place of rows.*restore\(\), before rows are up"):
        step(embeddings, optimizer)
    with pytest.raises(RowmeshError, match=r"would be averaged with themselves.*restore\(\)"):
        averages.update()
    optimizer.zero_grad()
    averages.restore()
    check_after(embeddings, optimizer, averages, rows, means)


def test_rows_come_back_where_what_was_saved_within_fails(tmp_path):
    embeddings, optimizer, averages = made()
    rows, means = ends_of(embeddings, averages)
    with (
        arm("checkpoint.sync=ENOSPC"),
        pytest.raises(CheckpointError, match="No space left"),
        averages.applied(),
    ):
        rowmesh.async_save(tmp_path / "model", {"tables": embeddings})
    check_after(embeddings, optimizer, averages, rows, means)


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("point", ["averaged_rows.put", "averaged_rows.put_back"])
def test_rows_come_back_where_ctrl_c_comes(point, number, heeds_ctrl_c):
    embeddings, optimizer, averages = made()
    rows, means = ends_of(embeddings, averages)
    entered = []
    with arm(f"{point}@{number}=SIGINT"), pytest.raises(KeyboardInterrupt), averages.applied():
        entered.append(True)
    assert bool(entered) == (point == "averaged_rows.put_back")
    check_after(embeddings, optimizer, averages, rows, means)


def test_rows_come_back_where_the_block_raises():
    embeddings, optimizer, averages = made()
    rows, means = ends_of(embeddings, averages)
    with pytest.raises(KeyError), averages.applied():
        raise KeyError("a user's")
    check_after(embeddings, optimizer, averages, rows, means)


def test_what_would_change_averages_within_is_refused(tmp_path):
    embeddings, optimizer, averages = made()
    rows, means = ends_of(embeddings, averages)
    rowmesh.save(tmp_path / "model", {"tables": embeddings})
    plan = embeddings.plan

    def load():
        rowmesh.load(tmp_path / "model", {"tables": embeddings})

    def nested():
        with averages.applied():
            pass

    def pipe():
        next(iter(Pipeline(embeddings).windows([])))

    state = embeddings.state_dict()
    with averages.applied():
        for change in (
            optimizer.step,
            load,
            nested,
            pipe,
            lambda: embeddings.migrate(plan),
            lambda: embeddings.load_state_dict(state),
        ):
            with pytest.raises(RowmeshError, match=r"averages stand in the place of rows and would be changed instead"):
                change()
        with pytest.raises(RowmeshError, match="averages stand in the place of rows, and would be averaged"):
            averages.update()
        assert equal(values_of(embeddings), means)
    check_after(embeddings, optimizer, averages, rows, means)


def fail_on_rank_1(mesh: Mesh, transport, point):
    embeddings, optimizer, averages = made(mesh, transport=transport)
    rows, means = ends_of(embeddings, averages)
    error: Any = OSError if mesh.rank == 1 else RowmeshError
    said = "memory" if mesh.rank == 1 else r"failed on rank 1.*: OSError: .*memory"
    faults = f"{point}@2=ENOMEM" if mesh.rank == 1 else ""
    with arm(faults), pytest.raises(error, match=said), averages.applied():
        pass
    averages.restore()
    check_after(embeddings, optimizer, averages, rows, means)
    embeddings.close()


@pytest.mark.parametrize("transport", ["one_sided", "collective"])
def test_where_one_rank_fails_rows_come_back_on_all(ranks: RankPool, transport):
    for point in ("averaged_rows.put", "averaged_rows.put_back"):
        ranks.run(fail_on_rank_1, transport, point)


def test_dynamic_tables_have_no_averages():
    table = TableSpec(
        name="item", dim=4, storage="dynamic", dynamic=Dynamic(capacity=10), initializer=Uniform(bound=0.1)
    )
    with pytest.raises(ConfigurationError, match=r"dynamic tables \['item'\] have no moving average.*come and go"):
        AveragedRows(EmbeddingCollection([table]))
