"""Devices that read each other train the model that devices with messages train, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.errors import ConfigurationError, IdRangeError, PeerError
from rowmesh.mesh.synchronization import Synchronization
from tests.collection.test_equivalence import assert_same_bits
from tests.support.devices import READ, assert_same_counts, batch, device_of, push_on_some, train_on_own, two_tables
from tests.support.scenario import Scenario
from tests.support.tables import several, table
from tests.support.triton import kernels_of
from tests.test_tensor_train_tables import cored

pytestmark = [pytest.mark.triton, READ]
kernels_of("pool")  # or all are skipped

SCENARIOS = {
    "bags, weights, evaluations": Scenario(
        tables=several("row_wise_adagrad")[::2], batch_sizes=(3, 2), num_steps=2, is_weighted=True, evaluates=True
    ),
    "a rank without samples, accumulation, 64 bits": Scenario(
        tables=several("adam", torch.float64)[:2], batch_sizes=(0, 3), accumulate=2, num_steps=2
    ),
    "cores beside rows": Scenario(tables=(table("a", 20, 4), cored("t", 30, 4, rank=2)), num_steps=2),
    "bfloat16, three ranks, batches that grow": Scenario(
        tables=(table("b", 400, 3, "adagrad", dtype=torch.bfloat16),),
        bag_sizes=(2, 2),
        num_steps=2,
        batch_sizes=(2, 1, 4),
        last_sizes=(300, 1, 2),
        skew=1,
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_trains_the_same_bits_as_messages(ranks, name):
    scenario = SCENARIOS[name]
    runs = [
        ranks.run(train_on_own, scenario, how, world_size=scenario.world_size) for how in ("one_sided", "collective")
    ]
    for mine, theirs in zip(*runs, strict=True):
        assert mine.transport == ("one_sided+collective" if "cores" in name else "one_sided")
        assert_same_bits(mine, theirs)
        assert_same_counts(mine, theirs)
        assert mine.owned == theirs.owned
        for group, counters in mine.counters.items():
            assert counters.unique_ids == theirs.counters[group].unique_ids
            assert (counters.bytes_sent, counters.all_to_all_rounds) == (0, 0) or "cores" in name
            if not scenario.evaluates:  # whose keys owners never see
                assert counters.bytes_received == theirs.counters[group].bytes_received


def collect(mesh, transport="one_sided", **options):
    return EmbeddingCollection(two_tables(), mesh=mesh, transport=transport, device=device_of(mesh), **options)


def rows_of(embeddings):
    return torch.cat([piece.values for name in "ab" for piece in embeddings.local_rows(name)])


def push_unlike(mesh, transport):
    """Rank 0 uses both of two look-ups, rank 1 the second alone; then none any."""
    embeddings = collect(mesh, transport)
    optimizer = EmbeddingOptimizer(embeddings)
    push_on_some(embeddings, optimizer, mesh.rank)
    optimizer.step()
    assert (embeddings.memory_bytes["buffers"] > 0) == (transport == "one_sided")
    embeddings.close()
    (counters,) = embeddings.counters
    return rows_of(embeddings), embeddings.transport_reason, (counters.table_accesses, counters.table_distinct)


def test_ranks_need_not_push_the_same_routes(ranks):
    runs = [ranks.run(push_unlike, how) for how in ("one_sided", "collective")]
    for (mine, reason, *counted), (theirs, _, *expected) in zip(*runs, strict=True):
        assert torch.equal(mine, theirs)
        assert counted == expected
        assert reason.startswith("asked for; ")


def order_of_calls(mesh, replicas=1, mode="exact"):
    """Interpreted kernels are done when a call returns, and hosts wait for each other: only GPUs need the barriers."""
    embeddings, calls = collect(mesh, replicas=replicas, synchronization=Synchronization(mode)), []
    part = embeddings.engine.shard_groups.stored[0]
    (group,) = part.transport._groups
    noted = [
        (part.transport._memory, "barrier"),
        (part.transport, "_open"),
        *((group, n) for n in ("put", "update", "fetch")),
    ]
    for owner, name in [*noted, *([(part.synchronizer, "_receive")] if replicas > 1 else [])]:
        setattr(owner, name, noting(calls, name, getattr(owner, name)))
    for _ in range(2):
        embeddings(batch()).values.sum().backward()
        embeddings.push_pending([0.1])
    if replicas > 1:
        embeddings.synchronize()
    with torch.no_grad():
        embeddings(batch())
        embeddings(batch())
    embeddings.barrier()
    return calls


def noting(calls, name, call):
    return lambda *arguments, **options: (calls.append(name), call(*arguments, **options))[1]


def test_barriers_stand_where_memory_changes_hands(ranks):
    step = ["_open", "fetch", "_open", "put", "barrier", "update", "barrier"]
    assert ranks.run(order_of_calls) == [[*step, *step, "_open", "fetch", "_open", "fetch"]] * 2


@pytest.mark.parametrize(("mode", "synchronized"), [("exact", []), ("average", ["_receive"])])
def test_a_barrier_follows_when_replicas_flush(ranks, mode, synchronized):
    """It stands behind the message by which hosts know that all come."""
    step = ["fetch", "_open", "put", "barrier", "update", "barrier", "_receive"]
    after = ["_open", "barrier"]
    found = ranks.run(order_of_calls, 2, mode, world_size=4)
    assert found == [["_open", *step, *after, *step, *synchronized, *after, "fetch", "_open", "fetch"]] * 4


def refuse_on_rank_1(mesh, how):
    embeddings = collect(mesh)
    optimizer, before = EmbeddingOptimizer(embeddings), rows_of(embeddings)
    bad = batch(b=[[4], [1]]) if mesh.rank == 1 else batch()
    try:
        if how == "evaluation":
            with torch.no_grad():
                embeddings(bad)
        else:
            out = embeddings(bad)  # not checked yet
            if how == "update":
                out.values.sum().backward()
                optimizer.step()
            elif how == "look-up":
                embeddings(batch())
            else:
                embeddings.barrier()
    except (IdRangeError, PeerError) as error:
        refused = f"{type(error).__name__}: {error}"
    else:
        refused = "nothing"
    assert torch.equal(before, rows_of(embeddings))
    assert embeddings.step_count == 0
    optimizer.zero_grad()
    embeddings(batch()).values.sum().backward()
    optimizer.step()  # goes on
    assert not torch.equal(before, rows_of(embeddings))
    return refused


@pytest.mark.parametrize("how", ["update", "look-up", "evaluation", "barrier"])
def test_all_ranks_learn_of_a_refused_batch_before_anything_changes(ranks, how):
    first, second = ranks.run(refuse_on_rank_1, how)
    assert first.startswith(("PeerError: rank 0: rank 1 refused", "RefusedError: rank 0: rank 1 refused"))
    assert second.startswith(
        "IdRangeError: rank 1, look-up 1 (after 0 steps): feature 'b': 1 of 2 ids are outside table 'b'"
    )


def out_of_step(mesh):
    embeddings = collect(mesh)
    with pytest.raises(PeerError, match="rank 0 is in forward 1, rank 1 is in step 1"):
        embeddings(batch()) if mesh.rank == 0 else embeddings.push([], [0.1])


def test_ranks_that_do_different_things_are_named(ranks):
    ranks.run(out_of_step)


def no_room(mesh):
    embeddings = collect(mesh)
    embeddings(batch()).values.sum().backward()
    memory = embeddings.engine.shard_groups.stored[0].transport._memory
    if mesh.rank == 1:
        memory.allocate = fail
    with pytest.raises(MemoryError, match="rank 1 has no room for gradients, use smaller batches: none left"):
        embeddings.push_pending([0.1])
    vars(memory).pop("allocate", None)
    embeddings(batch()).values.sum().backward()
    EmbeddingOptimizer(embeddings).step()


def fail(num_bytes):
    raise MemoryError("none left")


def test_no_room_for_gradients_is_said_on_all_ranks(ranks):
    ranks.run(no_room)


def on_two_hosts(mesh, hosts, replicas):
    last = len(hosts) - 1
    pattern = f"'one_sided' cannot work between devices: ranks {last - 1} and {last} are on different hosts"
    with pytest.raises(ConfigurationError, match=pattern):
        collect(replace(mesh, hosts=hosts), replicas=replicas)


@pytest.mark.parametrize(("hosts", "replicas"), [((0, 1), 1), ((0, 0, 0, 1), 2)])
def test_devices_of_two_hosts_are_refused(ranks, hosts, replicas):
    """On all ranks, also where another replica group is on two hosts."""
    ranks.run(on_two_hosts, hosts, replicas, world_size=len(hosts))


def test_one_rank_has_nobody_to_read():
    embeddings = EmbeddingCollection(two_tables(), transport="one_sided", device="cuda")
    assert (embeddings.transport, embeddings.transport_reason) == (
        "local",
        f"there is one rank, on {embeddings.device}",
    )
    with pytest.raises(ConfigurationError, match="transport must be 'auto', 'collective' or 'one_sided', got 'nccl'"):
        EmbeddingCollection(two_tables(), transport="nccl", device="cuda")  # type: ignore[arg-type]
