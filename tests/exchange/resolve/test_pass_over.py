"""Ranks without a further batch, or with one that cannot be routed, say so in the first message: nobody waits."""

import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.errors import DataError, RefusedError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.mesh.plain import error_to_plain
from rowmesh.tables import Tiers, Uniform
from tests.exchange.resolve.test_traps import bags, made, train
from tests.support.refused import RULES, batch_of, known_of, make

NO_LABEL = error_to_plain(DataError("no label"))


def call(embeddings, does):
    """What a rank does in the place of a batch: ids to look up, "none" or "refused"."""
    resolver = embeddings.engine.resolver
    try:
        if does == "none":
            resolver.pass_over()
        elif does == "refused":
            resolver.pass_over(NO_LABEL)
        else:
            embeddings(bags(does))
    except RefusedError as error:
        return str(error), error.without, error.refused, error.first
    return None


def run_each(mesh, transport, scripts):
    embeddings = made(mesh, transport=transport, capacity=40, shards=4)
    train(embeddings, [1, 2])
    seen = []
    for script in scripts:
        found = call(embeddings, script[mesh.rank])
        seen.append((found, embeddings.statistics("item", [1, 2, 3, 4]).count.tolist()))
    step = embeddings.engine.resolver.step
    train(embeddings, [3, 4])
    embeddings.close()
    return seen, step


@pytest.mark.parametrize("transport", ["collective", "one_sided"])
def test_all_ranks_raise_alike_or_return(ranks, transport):
    scripts = [
        ([3], "none"),
        ("none", "none"),
        ("refused", list(range(3, 300))),  # more than there is room for beside the sizes
        ("none", "refused"),
        ("refused", "refused"),
        ([3], [4]),
    ]
    expected = [((1,), (), None), None, ((), (0,), NO_LABEL), ((0,), (1,), NO_LABEL), ((), (0, 1), NO_LABEL), None]
    for seen, step in ranks.run(run_each, transport, scripts, world_size=2):
        assert [None if found is None else found[1:] for found, _ in seen] == expected
        assert [counts for _, counts in seen] == 5 * [[2, 2, 0, 0]] + [[2, 2, 1, 1]]
        assert step == 2
    texts = [found[0] for found, _ in seen if found is not None]
    assert texts[0].endswith("as ranks [1] have no further one; every rank must bring equally many batches")
    assert texts[1] == "rank 1: no rank looks up this batch, which ranks [0] cannot look up: no label"


def test_one_rank_has_nobody_to_tell():
    embeddings = made(capacity=9)
    resolver = embeddings.engine.resolver
    resolver.pass_over()
    with pytest.raises(RefusedError, match="no label"):
        resolver.pass_over(NO_LABEL)
    train(embeddings, [1])
    assert embeddings.statistics("item", [1]).last_step.tolist() == [1]


def evaluate(mesh, transport):
    embeddings = make(mesh, transport)
    embeddings(batch_of(mesh, 3, 0)).values.sum().backward()
    before, batch, errors = known_of(embeddings), batch_of(mesh, 3, 1), []
    lacking = batch.select([name for name in batch.features if name != "user"]) if mesh.rank else batch
    for features in (None, ["item", "user"]):
        try:
            with torch.no_grad():
                embeddings(lacking, features=features)
        except DataError as error:
            errors.append(str(error)[:27])
        except RefusedError as error:
            errors.append(error.refused)
    is_same = known_of(embeddings) == before
    embeddings.close()
    return errors, is_same


@pytest.mark.parametrize("transport", ["collective", "one_sided"])
def test_look_ups_without_gradients_are_refused_alike(ranks, transport):
    first, second = ranks.run(evaluate, transport, world_size=2)
    assert first == ([(1,), (1,)], True)
    assert second[1]
    assert len(second[0]) == 2
    assert all(isinstance(each, str) for each in second[0])


def overfill_tier(mesh, transport, num_rows):
    """Rows that do not fit into fast memory, beside a dynamic table whose ids they come with."""
    start = {"initializer": Uniform(bound=0.5)}
    tables = [
        TableSpec(name="item", dim=3, storage="dynamic", dynamic=RULES["item"], **start),
        TableSpec(name="tiered", num_rows=64, dim=4, storage="tiered", **start),
    ]
    tiers = Tiers(fast_share=0.01, fast_rows=8, timeout_s=2)
    embeddings = EmbeddingCollection(tables, mesh=mesh, transport=transport, tiers=tiers)
    optimizer = EmbeddingOptimizer(embeddings)

    def batch(ids, rows):
        return SparseBatch.from_bags({"item": [ids], "tiered": [rows]})

    def step():
        embeddings(batch([1, 2], [1, 2])).values.sum().backward()
        optimizer.step()

    step()
    before, error = known_of(embeddings), None
    try:
        embeddings(batch([3, 4, 5, 6], list(range(num_rows))))
    except RowmeshError as caught:
        error = type(caught).__name__
    is_same = known_of(embeddings) == before
    step()
    counts = embeddings.statistics("item", [1, 2, 3, 4]).count.tolist()
    embeddings.close()
    return error, is_same, counts


def test_rows_without_room_in_a_tier_decide_nothing():
    assert overfill_tier(Mesh(), "auto", 20) == ("NoRoomError", True, [2, 2, 0, 0])


@pytest.mark.parametrize("transport", ["collective", "one_sided"])
def test_nor_do_they_on_two_ranks(ranks, transport):
    seen = ranks.run(overfill_tier, transport, 40, world_size=2)
    assert seen == 2 * [("NoRoomError", True, [4, 4, 0, 0])]
