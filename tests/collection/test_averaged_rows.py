"""However a block with averages in the place of rows ends, rows come back, on every rank and to the bit."""

import errno
import random
from dataclasses import replace
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
    Tiers,
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


# Rows of ids, and tiered ones

RULES = (
    {"capacity": 6, "eviction": "lru"},
    {"capacity": 16, "eviction": "ttl", "ttl_steps": 2},
    {"capacity": 6, "admit_after": 2, "missing": "zero"},
)


def dynamic(**rules: Any) -> TableSpec:
    return TableSpec(
        name="id",
        dim=4,
        storage="dynamic",
        dynamic=Dynamic(shards=1, **rules),
        initializer=Uniform(bound=0.1),
        optimizer=AdaGrad(lr=0.1),
        dtype=torch.float64,
    )


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("every", [1, 2])
def test_an_id_in_the_place_of_another_begins_with_its_own_row(rules, every):
    draw = random.Random(0)
    embeddings = EmbeddingCollection([dynamic(**rules)])
    optimizer, averages = EmbeddingOptimizer(embeddings), AveragedRows(embeddings, decay=0.75)
    expected, num_left = dict[int, torch.Tensor](), 0
    for number in range(30):
        ids = [draw.randrange(20) for _ in range(5)]
        embeddings(SparseBatch.from_bags({"id": [[each] for each in ids]})).values.square().sum().backward()
        optimizer.step()
        if not number or number % every:  # at first nothing may be known
            continue
        averages.update()
        known = embeddings.known_rows("id")
        now = dict(zip(known.ids.tolist(), known.values, strict=True))
        num_left += len(expected.keys() - now.keys())
        before, expected = expected, {}
        for each, row in now.items():
            expected[each] = before[each].lerp(row, 0.25) if each in before else row
        with torch.no_grad(), averages.applied():
            asked = [*expected]
            found = embeddings(SparseBatch.from_bags({"id": [[each] for each in asked]})).values
        assert found.equal(torch.stack([expected[each] for each in asked]))
        again = embeddings.known_rows("id")
        assert again.ids.equal(known.ids)
        assert again.values.equal(known.values)
        assert again.state["sum"].equal(known.state["sum"])
    assert num_left > 5


def test_ids_that_came_since_the_last_update_have_their_rows():
    embeddings = EmbeddingCollection([dynamic(capacity=6)])
    optimizer, averages = EmbeddingOptimizer(embeddings), AveragedRows(embeddings)
    batch = SparseBatch.from_bags({"id": [[1], [2]]})
    embeddings(batch).values.sum().backward()
    optimizer.step()
    with torch.no_grad():
        rows = embeddings(batch).values.clone()
        with averages.applied():
            assert embeddings(batch).values.equal(rows)


def test_ids_cannot_come_where_averages_stand():
    embeddings = EmbeddingCollection([dynamic(capacity=6)])
    averages = AveragedRows(embeddings)
    with averages.applied(), pytest.raises(RowmeshError, match=r"averages stand in the place.*admits and evicts ids"):
        embeddings(SparseBatch.from_bags({"id": [[1]]}))
    assert not len(embeddings.known_rows("id").ids)


def test_tables_that_demote_have_no_averages():
    with pytest.raises(ConfigurationError, match=r"dynamic tables \['id'\] have no moving average.*demoted ids"):
        AveragedRows(EmbeddingCollection([dynamic(capacity=10, mode="demote", store="memory")]))


def tiered(folder):
    """Tiered tables that have many times the rows that fit, and their averages in files."""
    tables = [replace(table, storage="tiered") for table in TABLES[:2]]
    return EmbeddingCollection([*tables, TABLES[2]], tiers=Tiers(fast_share=0.01, fast_rows=4, folder=folder))


@pytest.mark.parametrize("in_file", [False, True])
def test_averages_of_tiered_rows_are_those_of_dense_ones(tmp_path, in_file):
    found = []
    for embeddings in (tiered(tmp_path if in_file else None), EmbeddingCollection(TABLES)):
        optimizer, averages = EmbeddingOptimizer(embeddings), AveragedRows(embeddings, decay=0.5)
        for _ in range(3):
            step(embeddings, optimizer)
            averages.update()
        found.append([*ends_of(embeddings, averages), values_of(embeddings)])
        assert not [*tmp_path.iterdir()]
        embeddings.close()
    for mine, theirs in zip(*found, strict=True):
        assert equal(mine, theirs)
    assert not equal(*found[0][:2])


def test_a_full_disk_has_no_averages(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        AveragedRows(tiered(tmp_path))
    assert not [*tmp_path.iterdir()]
