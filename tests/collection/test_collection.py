"""EmbeddingCollection: what it keeps, refuses, and gives back."""

import gc

import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, RowmeshError, SparseBatch, TableSpec
from rowmesh.errors import ConfigurationError, DataError, IdRangeError
from rowmesh.placement import Plan, TablePlan, TableShape
from rowmesh.tables import Constant
from rowmesh.tables.spec import MAX_DIM
from rowmesh.tables.update_rules import SGD, AdaGrad, Adam, RowWiseAdaGrad
from tests.support import behaviour
from tests.support.scenario import Scenario
from tests.support.training import merged, train, train_reference

TRANSPORTS = ["one_sided", "collective"]


def on_ranks(ranks, function, transport, *args, world_size=2):
    if world_size == 1:
        return [function(Mesh(), "auto", *args)]
    return ranks.run(function, transport, *args, world_size=world_size)


# The largest rows


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        (torch.float32, 1e-5),
        pytest.param(torch.float64, 1e-12, marks=pytest.mark.slow),  # its kernels take the longest to compile
        (torch.bfloat16, 2**-7),
    ],
)
def test_the_largest_dim_trains_like_the_reference(ranks, world_size, dtype, tolerance):
    rules = (SGD(lr=0.3), AdaGrad(lr=0.1, eps=0.1), RowWiseAdaGrad(lr=0.1, eps=0.1), Adam(lr=0.05, eps=0.1))
    tables = tuple(
        TableSpec(name=f"t{i}", num_rows=30, dim=MAX_DIM - (i == 2), pooling=pooling, optimizer=rule, dtype=dtype)
        for i, (rule, pooling) in enumerate(zip(rules, ("sum", "mean", "sum", "none"), strict=True))
    )
    scenario = Scenario(tables=tables, batch_sizes=(5,) * world_size, bag_sizes=(0, 3))
    if world_size == 1:
        parts = [train(Mesh(), scenario)]
    else:
        parts = ranks.run(train, scenario, "collective", world_size=world_size)
    mine, theirs = merged(scenario, parts), train_reference(scenario)
    for name in mine.rows:
        torch.testing.assert_close(
            mine.rows[name].double(), theirs.rows[name].double(), rtol=tolerance, atol=0.1 * tolerance
        )
        for state, tensor in mine.state[name].items():
            torch.testing.assert_close(tensor, theirs.state[name][state], rtol=tolerance, atol=0.1 * tolerance)


# What stays, what goes


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_vectors_that_a_user_keeps_are_not_overwritten(ranks, transport, world_size):
    assert all(on_ranks(ranks, behaviour.keep_outputs, transport, world_size=world_size))


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_does_not_grow_over_500_steps(ranks, transport):
    for before, after in on_ranks(ranks, behaviour.footprints, transport, 500, 500):
        assert after["files"] == before["files"]
        assert after["mapped"] == before["mapped"]
        assert after["resident"] - before["resident"] < 2**20


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collections_give_everything_back(ranks, transport):
    for first, last in on_ranks(ranks, behaviour.make_and_drop, transport):
        assert first["files"] == last["files"]
        assert first["mapped"] == last["mapped"]


# The same training in other words


def same_rows(mine, theirs):
    return all(torch.equal(a[key], b[key]) for a, b in zip(mine, theirs, strict=True) for key in a)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "function", [behaviour.refuse_in_the_second_group, behaviour.look_up_before_the_step, behaviour.drive_by_verbs]
)
def test_trains_the_same(ranks, function, transport, world_size):
    """Refused batches, look-ups before the step, and routes made early leave no trace."""
    plain = on_ranks(ranks, function, transport, False, world_size=world_size)
    other = on_ranks(ranks, function, transport, True, world_size=world_size)
    assert same_rows(plain, other)


def test_collections_of_different_transports_side_by_side(ranks):
    for one_sided, collective in ranks.run(behaviour.mix_transports, world_size=2):
        assert same_rows([one_sided], [collective])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_default_device_does_not_matter(ranks, transport, world_size):
    """Every tensor that rowmesh makes says where it is."""
    plain, other = (
        on_ranks(ranks, behaviour.train_under_default_device, transport, device, world_size=world_size)
        for device in ("cpu", "meta")
    )
    assert same_rows(plain, other)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_need_not_use_every_look_up(ranks, world_size):
    """A look-up without a backward on some ranks, or on all, adds nothing; ranks agree about what is sent."""
    unused = ((1,), (), (0, 1, 2), (0,), (0, 2), ())
    zeros = on_ranks(ranks, behaviour.use_some_look_ups, "one_sided", unused, False, world_size=world_size)
    for transport in TRANSPORTS:
        parts = on_ranks(ranks, behaviour.use_some_look_ups, transport, unused, True, world_size=world_size)
        for (rows, pushes), (expected, _) in zip(parts, zeros, strict=True):
            assert same_rows([rows], [expected])
            assert pushes == [len(unused)] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_under_distributed_data_parallel(ranks, transport):
    """The model wrapped as a whole on two ranks is the model trained alone on the samples of both."""
    ((expected, weight),) = on_ranks(ranks, behaviour.train_wrapped, transport, 2, world_size=1)
    parts = on_ranks(ranks, behaviour.train_wrapped, transport, 2)
    for rows, own_weight in parts:
        torch.testing.assert_close(own_weight, weight, rtol=1e-6, atol=1e-6)
        for table, by_number in rows.items():
            for number, row in by_number.items():
                torch.testing.assert_close(row, expected[table][number], rtol=1e-6, atol=1e-6)
    assert sum(len(rows["a"]) for rows, _ in parts) == 300


def a_table(**options):
    options = {"name": "item", "num_rows": 10, "dim": 4, "optimizer": SGD(lr=1.0), "initializer": Constant()} | options
    return TableSpec(**options)


def test_a_plan_may_send_sums_of_dense_pooled_tables_alone():
    def plan_of(table):
        return Plan((TablePlan.of_sums(TableShape.of(table), 0),), 1, 1)

    sequence, tiered = a_table(pooling="none"), a_table(storage="tiered")
    for table, why in ((sequence, "it has pooling='none'"), (tiered, "the table is tiered")):
        with pytest.raises(
            ConfigurationError, match=f"table 'item' sends sums by its plan, but {why}.*; plan it again"
        ):
            EmbeddingCollection([table], plan=plan_of(table))
    with pytest.raises(ConfigurationError, match=r"table 'item' sends sums by its plan, but it has pooling='none'"):
        EmbeddingCollection([sequence]).migrate(plan_of(sequence))
    embeddings = EmbeddingCollection([a_table()])
    embeddings.migrate(plan_of(a_table()))
    assert embeddings.plan.tables[0].send == "sums"
    embeddings.migrate(Plan.cyclic([TableShape.of(a_table())], 1))
    assert embeddings.plan.tables[0].send == "rows"


def test_zero_grad_forgets_gradients():
    embeddings = EmbeddingCollection([a_table()])
    optimizer = EmbeddingOptimizer(embeddings)
    embeddings(SparseBatch.from_bags({"item": [[1]]})).values.sum().backward()
    optimizer.zero_grad()
    embeddings(SparseBatch.from_bags({"item": [[2]]})).values.sum().backward()
    optimizer.step()
    rows = embeddings.local_rows("item")[0].values
    assert rows[2].tolist() == [-1.0] * 4
    assert not rows[1].any()


def test_a_step_without_gradients_changes_nothing():
    embeddings = EmbeddingCollection([a_table()])
    EmbeddingOptimizer(embeddings).step()
    assert not embeddings.local_rows("item")[0].values.any()


def test_features_that_the_loss_does_not_use_get_no_gradient():
    embeddings = EmbeddingCollection([a_table(), a_table(name="user")])
    out = embeddings(SparseBatch.from_bags({"item": [[1]], "user": [[2]]}))
    out["user"].sum().backward()
    EmbeddingOptimizer(embeddings).step()
    assert not embeddings.local_rows("item")[0].values.any()
    assert embeddings.local_rows("user")[0].values[2].tolist() == [-1.0] * 4


def test_backward_runs_once():
    embeddings = EmbeddingCollection([a_table()])
    loss = embeddings(SparseBatch.from_bags({"item": [[1]]})).values.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RowmeshError, match="backward ran twice"):
        loss.backward()


def test_buffers_may_change_before_the_backward():
    """Kernels read neither the user's offsets nor the ids again."""
    embeddings = EmbeddingCollection([a_table()])
    offsets, ids = torch.tensor([0, 1, 3]), torch.tensor([1, 2, 3])
    rows = embeddings.fetch(embeddings.route(SparseBatch(("item",), ids, 2, jagged_offsets=offsets)))
    offsets.copy_(torch.tensor([0, 3, 3]))
    ids.zero_()
    values = embeddings.pool(rows).values
    offsets.zero_()
    (values * torch.tensor([[1.0], [2.0]])).sum().backward()
    EmbeddingOptimizer(embeddings).step()
    assert embeddings.local_rows("item")[0].values[:4, 0].tolist() == [0.0, -1.0, -2.0, -2.0]


def test_offsets_made_under_inference_mode():
    with torch.inference_mode():
        batch = SparseBatch.from_bags({"item": [[1], [2, 3]]})
        assert EmbeddingCollection([a_table()])(batch).values.shape == (2, 4)


def test_second_derivatives_are_refused_and_penalties_on_gradients_work():
    embeddings = EmbeddingCollection([a_table(initializer=Constant(value=0.5))])
    batch = SparseBatch.from_bags({"item": [[1]]})
    with pytest.raises(RowmeshError, match=r"backward\(create_graph=True\) cannot go through an EmbeddingCollection"):
        embeddings(batch).values.square().sum().backward(create_graph=True)
    values = embeddings(batch).values
    (gradient,) = torch.autograd.grad(values.square().sum(), values, create_graph=True)
    gradient.square().sum().backward()  # 4 w², whose derivative is 8 w
    EmbeddingOptimizer(embeddings).step()
    assert embeddings.local_rows("item")[0].values[1].tolist() == [0.5 - 4.0] * 4


@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_graph_exactly_where_gradients_are_enabled(has_gradients):
    """As nn.EmbeddingBag: eval() alone does not freeze it."""
    embeddings = EmbeddingCollection([a_table()]).eval()
    with torch.set_grad_enabled(has_gradients):
        assert embeddings(SparseBatch.from_bags({"item": [[1]]})).values.requires_grad == has_gradients


def routed(embeddings):
    route = embeddings.route(SparseBatch.from_bags({"item": [[1]]}))
    return route, embeddings.fetch(route)


def test_the_verb_push_pushes_once():
    embeddings = EmbeddingCollection([a_table()])
    before = embeddings.local_rows("item")[0].values[1].clone()
    route, rows = routed(embeddings)
    embeddings.pool(rows).values.sum().backward()
    embeddings.push([route], [0.5])
    after = embeddings.local_rows("item")[0].values[1].clone()
    assert torch.equal(after, before - 0.5)
    EmbeddingOptimizer(embeddings).step()
    assert torch.equal(embeddings.local_rows("item")[0].values[1], after), "nothing is left to push"
    with pytest.raises(RowmeshError, match="pushed before"):
        embeddings.push([route], [0.5])


def test_push_refuses_what_has_no_gradients():
    embeddings = EmbeddingCollection([a_table()])
    route, _ = routed(embeddings)
    with pytest.raises(RowmeshError, match="after its backward"):
        embeddings.push([route], [0.5])
    with pytest.raises(RowmeshError, match="1 groups need as many learning rates, got 2"):
        embeddings.push([], [0.5, 0.5])
    assert embeddings.step_count == 0


def test_rows_fetched_before_a_push_are_stale():
    embeddings = EmbeddingCollection([a_table()])
    (_, first), (_, second) = routed(embeddings), routed(embeddings)
    embeddings.pool(first).values.sum().backward()
    EmbeddingOptimizer(embeddings).step()
    with pytest.raises(RowmeshError, match="stale"):
        embeddings.pool(second)


def test_a_kept_loss_keeps_no_buffers():
    embeddings = EmbeddingCollection([a_table()])
    optimizer = EmbeddingOptimizer(embeddings)
    losses = []
    for _ in range(5):
        losses.append(embeddings(SparseBatch.from_bags({"item": [[1]]})).values.sum())
        losses[-1].backward()
        optimizer.step()
    assert len(embeddings.engine.exchanges[0].look_ups.idle) == 1


def test_expanded_and_transposed_gradients():
    """Gradients come in any memory layout: here one that is expanded, and one that is transposed."""
    embeddings = EmbeddingCollection([a_table(), a_table(name="user")])
    out = embeddings(SparseBatch.from_bags({"item": [[1], [2]], "user": [[1], [2]]}))
    factors = torch.arange(16.0).view(8, 2)
    (out.values.t() * factors).sum().backward()
    EmbeddingOptimizer(embeddings).step()
    assert torch.equal(embeddings.local_rows("item")[0].values[1:3], -factors.t()[:, :4])
    assert torch.equal(embeddings.local_rows("user")[0].values[1:3], -factors.t()[:, 4:])


def test_a_gradient_may_change_before_the_step():
    """Backward has summed it; what happens to it afterwards does not matter."""
    embeddings = EmbeddingCollection([a_table()])
    optimizer = EmbeddingOptimizer(embeddings)
    out = embeddings(SparseBatch.from_bags({"item": [[1], [2]]}))
    gradient = torch.ones(2, 4)
    out.values.backward(gradient)
    gradient.zero_()
    optimizer.step()
    assert torch.equal(embeddings.local_rows("item")[0].values[1:3], -torch.ones(2, 4))


def test_gradients_of_others_may_change_before_the_step():
    """A parameter beside the rows, and a retained gradient, share nothing with what the step uses."""
    embeddings = EmbeddingCollection([a_table()])
    optimizer = EmbeddingOptimizer(embeddings)
    out = embeddings(SparseBatch.from_bags({"item": [[1], [2]]}))
    out.values.retain_grad()
    beside = torch.zeros(2, 4, requires_grad=True)
    ((out.values + beside) * torch.ones(2, 4)).sum().backward()
    beside.grad.zero_()
    out.values.grad.zero_()
    optimizer.step()
    assert torch.equal(embeddings.local_rows("item")[0].values[1:3], -torch.ones(2, 4))


# What it hands out


def test_embeddings_by_feature():
    tables = [a_table(), a_table(name="history", pooling="none"), a_table(name="wide", dim=6)]
    batch = SparseBatch.from_bags({"wide": [[1], []], "history": [[3, 3], [5]], "item": [[0, 1], [2]]})
    out = EmbeddingCollection(tables)(batch)
    assert out.features == ("item", "wide")
    assert out.dims == (4, 6)
    assert out.values.shape == (2, 10)
    assert out["wide"].shape == (2, 6)
    assert out["history"].values.shape == (3, 4)
    assert out["history"].offsets.tolist() == [0, 2, 3]
    assert list(out) == ["item", "wide", "history"]
    with pytest.raises(KeyError, match="no feature 'itm'"):
        out["itm"]
    with pytest.raises(ConfigurationError, match=r"different dims.*'wide': 6"):
        out.stacked()


def test_local_rows_are_views_and_reports_are_filled():
    embeddings = EmbeddingCollection([a_table(optimizer=Adam())])
    embeddings.local_rows("item")[0].values[3] = 7.0
    found = embeddings(SparseBatch.from_bags({"item": [[3]]}))
    assert found.values.tolist() == [[7.0] * 4]
    assert set(embeddings.local_rows("item")[0].state) == {"m", "v"}
    assert embeddings.transport == "local"
    assert embeddings.transport_reason == "there is one rank"
    assert "dim4_adam: 1 tables" in repr(embeddings)
    assert embeddings.memory_bytes["rows"] >= 160
    assert embeddings.memory_bytes["optimizer state"] >= 320
    with pytest.raises(KeyError, match="no table 'itm'"):
        embeddings.local_rows("itm")


def test_memory_counts_buffers_that_are_in_use():
    embeddings = EmbeddingCollection([a_table(num_rows=50_000)])
    ids = torch.arange(20_000).view(1, -1)
    before = embeddings.memory_bytes["buffers"]
    out = embeddings(SparseBatch.from_dense(["item"], ids)).values
    in_use = embeddings.memory_bytes["buffers"]
    # At the least: slots, addresses, the way back, and the output.
    assert in_use - before > 20_000 * (4 + 8 + 4 + 16)
    out.sum().backward()
    EmbeddingOptimizer(embeddings).step()
    del out
    gc.collect()
    idle = embeddings.memory_bytes["buffers"]
    assert idle >= in_use
    for _ in range(3):
        embeddings(SparseBatch.from_dense(["item"], ids)).values.sum().backward()
        EmbeddingOptimizer(embeddings).step()
    assert embeddings.memory_bytes["buffers"] == idle


# What it refuses


@pytest.mark.parametrize("ids, bad", [([[3], [-1]], -1), ([[10], [11]], 10), ([[2**40], [0]], 2**40)])
def test_ids_outside_their_table(ids, bad):
    """The message names feature, table, how many, and the first; the batch is not used, the next one is."""
    embeddings = EmbeddingCollection([a_table(features=("item", "seen"))])
    with pytest.raises(IdRangeError) as caught:
        embeddings(SparseBatch.from_bags({"seen": ids, "item": [[1], [2]]}))
    num_bad = sum(not 0 <= i < 10 for bag in ids for i in bag)
    for text in ("feature 'seen'", f"{num_bad} of 2 ids", "table 'item' (0 to 9)", f"the first is {bad};"):
        assert text in str(caught.value)
    assert embeddings.counters[0].out_of_range == {"seen": num_bad}
    assert embeddings(SparseBatch.from_bags({"seen": [[1]], "item": [[1]]})).values.shape == (1, 8)


def test_all_features_with_ids_outside_their_table_are_named():
    tables = [a_table(features=("item", "seen")), a_table(name="wide", dim=6), a_table(name="mapped", out_of_range=0)]
    embeddings = EmbeddingCollection(tables)
    bags = {"seen": [[10]], "item": [[11]], "wide": [[-1]], "mapped": [[99]]}
    with pytest.raises(IdRangeError) as caught:
        embeddings(SparseBatch.from_bags(bags))
    outside = "1 of 1 ids are outside table"
    assert str(caught.value) == (
        f"rank 0, look-up 1 (after 0 steps): feature 'item': {outside} 'item' (0 to 9), the first is 11; "
        f"feature 'seen': {outside} 'item' (0 to 9), the first is 10; "
        f"feature 'wide': {outside} 'wide' (0 to 9), the first is -1; "
        "correct the data, raise num_rows, or set out_of_range to the row such ids should read"
    )


def test_ids_outside_their_table_can_read_a_row():
    embeddings = EmbeddingCollection([a_table(features=("item", "seen"), out_of_range=9), a_table(name="user")])
    embeddings.local_rows("item")[0].values[9] = 5.0
    out = embeddings(SparseBatch.from_bags({"seen": [[1], [-7]], "item": [[12, 10], [9]], "user": [[0], [0]]}))
    assert out["item"][:, 0].tolist() == [10.0, 5.0]
    assert out["seen"][:, 0].tolist() == [0.0, 5.0]
    assert embeddings.counters[0].out_of_range == {"item": 2, "seen": 1}
    out.values.sum().backward()
    EmbeddingOptimizer(embeddings).step()
    assert embeddings.local_rows("item")[0].values[9].tolist() == [5.0 - 4.0] * 4


def test_features_must_match():
    embeddings = EmbeddingCollection([a_table(), a_table(name="user")])
    with pytest.raises(DataError, match=r"lacks features \['item'\] \(did you mean 'itme' in the batch\?\)"):
        embeddings(SparseBatch.from_bags({"user": [[1]], "itme": [[1]]}))
    with pytest.raises(DataError, match=r"features \['extra'\] of the batch belong to no table"):
        embeddings(SparseBatch.from_bags({"user": [[1]], "item": [[1]], "extra": [[1]]}))


@pytest.mark.parametrize(
    "tables, message",
    [
        ([], "no tables"),
        ([a_table(), a_table()], "two tables are named 'item'"),
        ([a_table(), a_table(name="b", features=("item",))], r"feature 'item' is looked up in tables 'item' and 'b'"),
        ([a_table(), a_table(name="b", dtype=torch.float64)], "float64 tables do not mix"),
        (
            [a_table(num_rows=2**33), a_table(name="b")],
            r"group dim4_sgd of tables 'item' \(8,589,934,592 rows\), 'b' \(10 rows\): the fullest.*4,294,967,295",
        ),
    ],
)
def test_tables_that_cannot_work(tables, message):
    with pytest.raises(ConfigurationError, match=message):
        EmbeddingCollection(tables)


def test_a_dropped_collection_frees_its_memory():
    before = behaviour.footprint()["resident"]
    embeddings = EmbeddingCollection([a_table(num_rows=500_000, dim=16)])
    assert behaviour.footprint()["resident"] - before > 25 * 2**20
    del embeddings
    gc.collect()
    assert behaviour.footprint()["resident"] - before < 8 * 2**20


@pytest.mark.parametrize("transport", ["one_sided", "collective"])
def test_ranks_with_other_tables_are_told_apart(ranks, transport):
    """Their slots would mean other rows, or none, at the owner."""
    for message in ranks.run(behaviour.with_tables_of_its_own, transport, world_size=2):
        assert "rank 0 has TableSpec(name='item', num_rows=10" in message
        assert "rank 1 has TableSpec(name='item', num_rows=11" in message


def test_a_batch_on_another_device_is_refused():
    with pytest.raises(DataError, match=r"ids of a SparseBatch are on meta.*\.cpu\(\)"):
        SparseBatch.from_dense(["item"], torch.zeros(1, 2, dtype=torch.int64, device="meta"))


def test_an_error_about_ids_names_the_look_up_and_the_step():
    embeddings = EmbeddingCollection([a_table()])
    optimizer = EmbeddingOptimizer(embeddings)
    for step in range(3):
        embeddings(SparseBatch.from_bags({"item": [[step]]})).values.sum().backward()
        optimizer.step()
    with torch.no_grad():
        embeddings(SparseBatch.from_bags({"item": [[0]]}))
    with pytest.raises(IdRangeError, match=r"rank 0, look-up 5 \(after 3 steps\): feature 'item': 1 of 1 ids"):
        embeddings(SparseBatch.from_bags({"item": [[10]]}))
