"""Demoting to every kind of store, and stores that go away."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

import rowmesh
from rowmesh import EmbeddingOptimizer, TableSpec
from rowmesh.checkpoint import CheckpointError
from rowmesh.data import Batch
from rowmesh.errors import StoreError
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.pipeline import Pipeline
from rowmesh.tables import Dynamic, Uniform
from rowmesh.tables.dynamic.demoted_records import PREFIX
from rowmesh.tables.dynamic.record_layout import RecordLayout
from rowmesh.tables.dynamic.stores import open_records
from tests.exchange.resolve.test_averages import assert_as_expected
from tests.exchange.resolve.test_resolver import at_the_end
from tests.exchange.resolve.test_traps import bags, initial, made, read, train
from tests.support.dynamic import Stream, assert_same, run_dynamic, run_oracle, run_pipeline
from tests.support.dynamic_average import run_average_oracle
from tests.support.redis_server import redis_server as redis_server
from tests.support.shards import shard_of
from tests.support.slowed import held, sums_of
from tests.support.tables import OPTIMIZERS
from tests.tables.dynamic.test_demoted import RULES

MEMORY = {"mode": "demote", "store": "memory", "store_capacity": 100}


def url_of(kind, tmp_path, request):
    if kind == "redis":
        return request.getfixturevalue("redis_server").url
    if kind == "rocksdb":
        pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")
    return f"{kind}:{tmp_path / 'records'}"


def stream_to(url):
    rules = {name: replace(RULES[name], store=url) for name in ("ttl too", "forgetting")}
    return Stream(rules=(("user", rules["ttl too"]), ("item", rules["forgetting"])), seed=8, num_steps=10, rule="adam")


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [("file", 1), ("rocksdb", 1), ("redis", 1), ("file", 2), ("rocksdb", 2), ("redis", 2), ("redis", 3)],
)
def test_every_store_gives_back_what_was_demoted(ranks, tmp_path, request, kind, world_size):
    """The second table has a store with a limit. Each run finds in the store what the one before has left."""
    seed, batch_size = {1: (12, 5), 2: (8, 3), 3: (8, 2)}[world_size]
    stream = stream_to(url_of(kind, tmp_path, request))
    stream = replace(stream, evaluates=True, seed=seed, batch_size=batch_size)
    assert stream.fits(world_size)
    expected = ranks.run(run_oracle, stream, world_size=world_size)
    assert expected[0].counters["user"][4] > 5, "promoted"
    assert expected[0].counters["item"][5] > 1, "forgotten"
    seen = ranks.run(run_dynamic, stream, "collective", world_size=world_size)
    assert_same(seen, expected)
    seen = ranks.run(run_pipeline, stream, "auto", 2, world_size=world_size)
    assert_same(seen, at_the_end(expected))


def test_replicas_have_records_of_their_own(ranks, redis_server):
    stream = stream_to(redis_server.url)
    expected = ranks.run(run_oracle, stream, 2, world_size=2)
    assert_same(ranks.run(run_pipeline, stream, "auto", 1, 1, 2, world_size=2), at_the_end(expected), replicas=2)


@pytest.mark.parametrize("kind", ["file", "rocksdb", "redis"])
def test_averaged_replicas_have_the_same_records(ranks, tmp_path, request, kind):
    stream = replace(stream_to(url_of(kind, tmp_path, request)), synchronization=Synchronization("average", every=2))
    expected = run_average_oracle(stream, 2, 2)
    assert all(expected[0].demoted.values())
    assert expected[0].demoted == expected[1].demoted, "the last step averages"
    assert_as_expected(ranks.run(run_dynamic, stream, "auto", 2, world_size=2), expected)
    seen = ranks.run(run_pipeline, stream, "auto", 2, 1, 2, world_size=2)
    assert_as_expected(seen, expected, knows_the_end_alone=True)


def after(embeddings, ids, times):
    """The rows of ids that so many steps have lowered by 1."""
    rows = initial(embeddings, ids)
    for row, count in zip(rows, times, strict=True):
        for _ in range(count):
            row -= 1
    return rows


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_id_that_comes_back_at_once_has_what_earlier_batches_do_to_it(depth):
    """Each batch evicts all ids of the one before, which may not have had its step."""
    embeddings = made(capacity=2, shards=1, **MEMORY)
    optimizer = EmbeddingOptimizer(embeddings)
    ids = [[1, 2], [3, 4], [1, 2], [1, 2], [3, 1], [2, 4]]
    batches = [Batch(torch.zeros(2, 0), bags(each), torch.zeros(2)) for each in ids]
    with Pipeline(embeddings, depth=depth) as pipeline:
        for step, window in enumerate(pipeline.windows(batches)):
            for part in window:
                times = [sum(before.count(i) for before in ids[:step]) for i in ids[step]]
                assert torch.equal(part.embeddings.values, after(embeddings, ids[step], times))
                part.embeddings.values.sum().backward()
            optimizer.step()
    assert embeddings.statistics("item", [1, 2, 3, 4, 5]).count.tolist() == [4, 4, 2, 2, 0]
    assert torch.equal(read(embeddings, [3, 1, 5]), after(embeddings, [3, 1, 5], [2, 4, 0]))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_evaluation_finds_what_is_demoted_as_before_the_batches_ahead(depth):
    """The table holds an id, and the store another: what came before that is forgotten."""
    embeddings = made(capacity=1, shards=1, **{**MEMORY, "store_capacity": 1}, missing="zero")
    optimizer, ids = EmbeddingOptimizer(embeddings), list(range(1, 8))
    batches = [Batch(torch.zeros(1, 0), bags([i]), torch.zeros(1)) for i in ids]
    with Pipeline(embeddings, depth=depth) as pipeline:
        for step, window in enumerate(pipeline.windows(batches), start=1):
            for part in window:
                part.embeddings.values.sum().backward()
            optimizer.step()
            expected = torch.zeros(len(ids), 3)
            known = [i for i in (step - 1, step) if i > 0]
            expected[[i - 1 for i in known]] = after(embeddings, known, [1] * len(known))
            for _ in range(2):  # which changes nothing
                assert torch.equal(read(embeddings, ids), expected)
    counters = embeddings.dynamic_counters["item"]
    assert (counters.evicted, counters.forgotten, counters.promoted) == (6, 5, 0)


def test_a_step_that_is_refused_leaves_the_store_as_it_was():
    embeddings = made(capacity=2, shards=1, **MEMORY)
    train(embeddings, [1, 2], [3, 4])
    for _ in range(2):
        with pytest.raises(rowmesh.errors.NoRoomError, match="3 distinct ids"):
            embeddings(bags([1, 2, 3]))
    assert torch.equal(*train(embeddings, [1, 2]), initial(embeddings, [1, 2]) - 1)


def test_a_server_that_comes_back_has_lost_nothing(redis_server):
    embeddings = made(capacity=2, shards=1, mode="demote", store=redis_server.url)
    train(embeddings, [1, 2], [3, 4], [5, 6])
    redis_server.kill()
    back = threading.Thread(target=redis_server.start)
    back.start()
    seen = train(embeddings, [1, 4], [5, 3])
    back.join()
    assert torch.equal(seen[0], initial(embeddings, [1, 4]) - 1)
    assert torch.equal(seen[1], initial(embeddings, [5, 3]) - 1)
    embeddings.close()


@pytest.mark.parametrize("flushes", [False, True], ids=["what is to be written", "what is to be read"])
def test_a_server_that_stays_away_is_named_and_training_can_go_on(redis_server, flushes):
    embeddings = made(capacity=2, shards=1, mode="demote", store=redis_server.url, store_retry_s=0.1)
    train(embeddings, [1, 2], [3, 4], *([[3, 4]] if flushes else []))
    known = embeddings.statistics("item", [3, 4])
    redis_server.kill()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"Redis 127\.0\.0\.1:\d+/0 did not answer for 0\.1 s"):
            embeddings(bags([1, 3]))
    with pytest.raises(StoreError, match="Redis"):
        read(embeddings, [1])
    assert torch.equal(read_known(embeddings, 3), after(embeddings, [3], [1 + flushes])[0])
    redis_server.start()
    assert embeddings.statistics("item", [3, 4]).count.tolist() == known.count.tolist()
    assert torch.equal(*train(embeddings, [1, 3]), after(embeddings, [1, 3], [1, 1 + flushes]))
    assert torch.equal(read(embeddings, [2]), initial(embeddings, [2]) - 1)
    embeddings.close()


def read_known(embeddings, i):
    rows = embeddings.known_rows("item")
    return rows.values[rows.ids.tolist().index(i)]


def lose_server(mesh, url):
    rules = {"capacity": 4, "shards": 2, "mode": "demote", "store": url, "store_retry_s": 0.1}
    embeddings = made(mesh, **rules)
    train(embeddings, [mesh.rank, 2])
    for first in (10, 20):
        train(embeddings, [first + mesh.rank])
    embeddings.barrier()
    if mesh.rank == 0:
        import redis

        redis.Redis.from_url(url).shutdown(nosave=True)
    embeddings.barrier()
    with pytest.raises(StoreError, match=r"Redis 127\.0\.0\.1:\d+/0 did not answer"):
        train(embeddings, *[[first + mesh.rank, first + 2] for first in (30, 40)])
    embeddings.close()


def test_all_ranks_learn_of_a_server_that_is_gone(ranks, redis_server):
    ranks.run(lose_server, redis_server.url, world_size=2)


def test_a_server_that_lost_its_data_is_an_error(redis_server):
    embeddings = made(capacity=1, shards=1, mode="demote", store=redis_server.url)
    train(embeddings, [1], [2], [3])
    with redis_server.client() as client:
        client.flushall()
    with pytest.raises(StoreError, match="has lost its records"):
        embeddings(bags([1]))
    embeddings.close()


def make_or_fail(mesh, url):
    with pytest.raises(StoreError, match="did not answer"):
        made(mesh, capacity=4, shards=2, mode="demote", store=url, store_retry_s=0)


def test_a_server_that_is_not_there_is_named_at_once(ranks):
    pytest.importorskip("redis", reason="the package redis is not installed")
    ranks.run(make_or_fail, "redis://127.0.0.1:1/0", world_size=2)


def test_a_checkpoint_without_demoted_ids_is_read_and_one_with_them_is_not_where_they_are_dropped(tmp_path):
    plain = made(capacity=2, shards=1)
    train(plain, [7, 8])
    rowmesh.save(tmp_path / "model", {"embeddings": plain})
    embeddings = made(capacity=2, shards=1, **MEMORY)
    train(embeddings, [1, 2], [3, 4], [5])
    rowmesh.save(tmp_path / "other", {"embeddings": embeddings})
    with pytest.raises(CheckpointError, match="table 'item': mode is demote in the checkpoint and drop here"):
        rowmesh.load(tmp_path / "other", {"embeddings": plain})
    less = made(capacity=2, shards=1, **{**MEMORY, "store_capacity": 9})
    with pytest.raises(CheckpointError, match="table 'item': store_capacity is 100 in the checkpoint and 9 here"):
        rowmesh.load(tmp_path / "other", {"embeddings": less})
    rowmesh.load(tmp_path / "model", {"embeddings": embeddings})
    assert embeddings.statistics("item", [1, 2, 3, 4, 5, 7]).known.tolist() == [False] * 5 + [True]
    assert torch.equal(*train(embeddings, [1]), initial(embeddings, [1]))
    assert torch.equal(read(embeddings, [8, 7]), initial(embeddings, [8, 7]) - 1)


@pytest.mark.parametrize("kind", ["memory", "file", "rocksdb", "redis"])
@pytest.mark.parametrize("room", [6, 50])
def test_what_is_saved_beside_steps_is_what_was_demoted_then(tmp_path, request, kind, room):
    """Whether ids come back, leave, or are forgotten while the writer stands still."""
    store = "memory" if kind == "memory" else url_of(kind, tmp_path, request)
    embeddings = made(capacity=4, shards=2, mode="demote", store=store, store_capacity=room)
    train(embeddings, [1, 2], [3, 4], [5, 6], [7, 8], [9, 10])
    rowmesh.save(tmp_path / "sync", {"embeddings": embeddings})
    with held("checkpoint.write_rows") as has_come:
        saving = rowmesh.async_save(tmp_path / "async", {"embeddings": embeddings})
        assert has_come.wait(60)
        train(embeddings, [1, 9], [11, 2], [5, 12], [13, 14], [1, 15], [10, 16])
    assert saving.wait()
    assert sums_of(tmp_path / "async") == sums_of(tmp_path / "sync")
    rowmesh.save(tmp_path / "sync", {"embeddings": embeddings}, overwrite=True)
    assert rowmesh.async_save(tmp_path / "async", {"embeddings": embeddings}, overwrite=True).wait()
    assert sums_of(tmp_path / "async") == sums_of(tmp_path / "sync")
    embeddings.close()


@pytest.mark.parametrize("kind", ["rocksdb", "redis"])
def test_a_store_that_has_lost_a_record_is_named_when_it_is_saved(tmp_path, request, kind):
    """And what was saved before stays."""
    embeddings = made(capacity=2, shards=1, mode="demote", store=url_of(kind, tmp_path, request), store_capacity=50)
    train(embeddings, [1, 2], [3, 4], [5])
    rowmesh.save(tmp_path / "model", {"embeddings": embeddings})
    gone = shard_of(embeddings, "item").pieces[PREFIX][0].rows[:1]
    demoted = embeddings.engine.resolver.tables["item"].owned.flush()  # pyright: ignore[reportOptionalMemberAccess]
    demoted._store.delete(np.zeros(1, np.int64), gone)  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(CheckpointError, match="store of table 'item' has lost 1 of 3 records, the first of"):
        rowmesh.save(tmp_path / "model", {"embeddings": embeddings}, overwrite=True)
    other = made(capacity=2, shards=1, **{**MEMORY, "store_capacity": 50})
    rowmesh.load(tmp_path / "model", {"embeddings": other})
    assert other.statistics("item", [1, 2, 3, 4, 5, 6]).known.tolist() == [True] * 5 + [False]
    embeddings.close()
    other.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rule", sorted(OPTIMIZERS))
def test_a_record_has_all_bits(dtype, rule):
    rules, bound = Dynamic(capacity=9), Uniform(bound=0.1)
    table = TableSpec(
        name="t", dim=5, storage="dynamic", dynamic=rules, initializer=bound, dtype=dtype, optimizer=OPTIMIZERS[rule]
    )
    layout, wide = RecordLayout(table), torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.randn(3, 5).to(dtype)
    shapes = {"row": (3,), "element": (3, 5)}
    state = {name: torch.randn(shapes[extent]).to(wide) for name, extent in table.optimizer.state.items()}
    facts = torch.randint(-(2**63), 2**63 - 1, (3, 3)).numpy()
    records = layout.pack(rows, state, facts)
    assert records.shape == (3, layout.width)
    back, of_state = layout.unpack(records)
    assert torch.equal(back, rows)
    assert all(torch.equal(of_state[name], each) for name, each in state.items())
    assert (layout.facts(records) == facts).all()


def test_passwords_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("RECORDS", "memory")
    assert open_records("$RECORDS", "user", 4, max_records=1).record_bytes == 4
    embeddings = made(capacity=1, mode="demote", store="$RECORDS", store_capacity=1)
    assert embeddings.tables[0].dynamic.store == "$RECORDS"
