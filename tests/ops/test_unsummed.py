"""Gradients that the update sums itself, on a CPU and a device: the same bits as when they are summed before."""

import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.errors import RowmeshError
from rowmesh.ops.look_up import HostLookUp
from rowmesh.ops.look_up.device import InPlaceLookUp
from rowmesh.ops.merge_update import sum_merged
from rowmesh.ops.merge_update.handles import Unsummed
from rowmesh.tables.update_rules import RULES
from tests.support.triton import kernels_of

B = 40
generator = torch.Generator().manual_seed(3)
BAGS = {
    "a": torch.randint(9, (B, 3), generator=generator).tolist(),
    "b": [torch.randint(50, (i % 4,), generator=generator).tolist() for i in range(B)],
    "s": [torch.randint(5, (i % 3,), generator=generator).tolist() for i in range(B)],
}
NUM_IDS = sum(len(bag) for bags in BAGS.values() for bag in bags)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.triton)])
def place(request):
    """Where rows are."""
    if request.param == "cuda":
        kernels_of("pool")  # or it is skipped
    return request.param


def a_collection(rule="row_wise_adagrad", dim=3, dtype=torch.float32, place="cpu", **options):
    optimizer = RULES[rule](lr=0.1, **options)
    tables = [
        TableSpec(name="a", num_rows=9, dim=dim, pooling="sum", optimizer=optimizer, dtype=dtype),
        TableSpec(name="b", num_rows=50, dim=dim, pooling="mean", optimizer=optimizer, dtype=dtype),
        TableSpec(name="s", num_rows=5, dim=dim, pooling="none", optimizer=optimizer, dtype=dtype),
    ]
    return EmbeddingCollection(tables, device=place)


def a_batch(weighted=False):
    batch = SparseBatch.from_bags(BAGS)
    if not weighted:
        return batch
    weights = torch.rand(NUM_IDS, generator=torch.Generator().manual_seed(1))
    return SparseBatch(batch.features, batch.ids, B, jagged_offsets=batch.offsets, weights=weights)


def loss(embeddings, batch, seed=1):
    out, noise = embeddings(batch), torch.Generator().manual_seed(seed)
    pooled, sequence = (
        (part * torch.randn(part.shape, generator=noise, dtype=part.dtype).to(part.device)).sum()
        for part in (out.values, out["s"].values)
    )
    return pooled + sequence


def rows_of(embeddings):
    return [embeddings.local_rows(name)[0].values.clone() for name in "abs"]


def states_of(embeddings):
    return [tensor.clone() for name in "abs" for tensor in embeddings.local_rows(name)[0].state.values()]


def are_equal(one, other):
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.fixture
def sums_first(monkeypatch):
    """Has backward make the sums."""
    return lambda: monkeypatch.setattr("rowmesh.collection.pooling.are_unshared", lambda gradients: False)


@pytest.fixture
def sums_later(monkeypatch):
    """Counts the groups whose sums are left to the update."""
    found = []

    def count(kind, name):
        real = getattr(kind, name)

        def counted(look_up):
            found.append(is_left(look_up))
            return real(look_up)

        monkeypatch.setattr(kind, name, counted)

    count(HostLookUp, "is_waiting")
    count(InPlaceLookUp, "take_gradients")
    return found


def is_left(look_up):
    """Whether sums are left to the update."""
    return look_up._left is not None if isinstance(look_up, InPlaceLookUp) else look_up.waiting is not None


CASES = [
    ("sgd", 17, torch.float32, {}),
    ("adagrad", 17, torch.bfloat16, {}),
    ("row_wise_adagrad", 64, torch.float32, {}),
    ("adam", 17, torch.float64, {"weight_decay": 0.1}),
]


@pytest.mark.parametrize(
    "place, case, weighted",
    [
        *(("cpu", case, weighted) for case in range(len(CASES)) for weighted in (False, True)),
        *(pytest.param("cuda", case, case == 3, marks=pytest.mark.triton) for case in (2, 3)),
    ],
)
def test_the_same_bits(place, case, weighted, sums_first, sums_later):
    if place == "cuda":
        kernels_of("pool")  # or it is skipped
    rule, dim, dtype, options = CASES[case]
    mine, theirs = (a_collection(rule, dim, dtype, place, **options) for _ in range(2))
    batch = a_batch(weighted)
    for embeddings in (mine, theirs):
        optimizer = EmbeddingOptimizer(embeddings)
        for step in range(3):
            loss(embeddings, batch, step).backward()
            optimizer.step()
        if embeddings is mine:
            assert sums_later == [True] * 6  # two groups, three steps
            sums_first()
    assert sums_later == [True] * 6 + [False] * 6
    assert are_equal(rows_of(mine), rows_of(theirs))
    assert are_equal(states_of(mine), states_of(theirs))
    assert [counters.table_distinct for counters in mine.counters] == [c.table_distinct for c in theirs.counters]
    assert [counters.table_accesses for counters in mine.counters] == [c.table_accesses for c in theirs.counters]


def a_step(between, place, num_look_ups=1):
    """The rows after one step, with something done before it."""
    embeddings = a_collection(place=place)
    optimizer = EmbeddingOptimizer(embeddings)
    for number in range(num_look_ups):
        loss(embeddings, a_batch(), number).backward()
    between(embeddings)
    optimizer.step()
    return rows_of(embeddings)


@pytest.mark.parametrize("num_look_ups", [1, 3])
def test_what_reads_sums_before_the_step_changes_nothing(num_look_ups, place, sums_first):
    def clip(embeddings):
        assert embeddings.engine.gradient_norm() > 0

    def check(embeddings):
        assert embeddings.engine.check_pending()

    later = [a_step(between, place, num_look_ups) for between in (lambda embeddings: None, clip, check)]
    sums_first()
    first = a_step(clip, place, num_look_ups)
    assert all(are_equal(rows, first) for rows in later)


def test_one_look_up_waits_at_most(place):
    embeddings = a_collection(place=place)
    for number in range(3):
        loss(embeddings, a_batch(), number).backward()
    waiting = [is_left(group.look_up) for route in embeddings.engine.pending.routes for group in route.groups]
    assert waiting == [True, True] + [False] * 4


def test_a_gradient_that_the_program_has_may_change_before_the_step(place, sums_later):
    rows = []
    for changes in (False, True):
        embeddings = a_collection(place=place)
        optimizer = EmbeddingOptimizer(embeddings)
        values = embeddings(a_batch()).values
        gradient = torch.ones_like(values)
        values.backward(gradient)
        if changes:
            gradient.fill_(7.0)
        optimizer.step()
        rows.append(rows_of(embeddings))
    assert are_equal(*rows)
    assert not any(sums_later)


def test_a_change_that_nothing_could_foresee_is_an_error(place, monkeypatch):
    monkeypatch.setattr("rowmesh.collection.pooling.are_unshared", lambda gradients: True)
    embeddings = a_collection(place=place)
    values = embeddings(a_batch()).values
    gradient = torch.ones_like(values)
    values.backward(gradient)
    gradient.fill_(7.0)
    with pytest.raises(RowmeshError, match="changed in place between backward and step"):
        EmbeddingOptimizer(embeddings).step()


@pytest.mark.triton
def test_nothing_is_kept_of_frozen_rows_either():
    """Of a route that the program keeps."""
    kernels_of("pool")  # or it is skipped
    tables = [TableSpec(name=name, num_rows=9, dim=3 + place, frozen=not place) for place, name in enumerate("ab")]
    embeddings = EmbeddingCollection(tables, device="cuda")
    route = embeddings.route(SparseBatch.from_bags({"a": [[1], [2, 1]], "b": [[3], [4]]}))
    (embeddings.pool(embeddings.fetch(route)).values * 2).sum().backward()
    assert [is_left(group.look_up) for group in route.groups] == [True, True]
    EmbeddingOptimizer(embeddings).step()
    for group in route.groups:
        assert (group.look_up._left, group.look_up._cells, group.look_up.gradients) == (None, None, None)


def test_gradients_are_dropped_with_their_look_up():
    embeddings = a_collection()
    loss(embeddings, a_batch()).backward()
    look_ups = [group.look_up for group in embeddings.engine.pending.routes[0].groups]
    embeddings.engine.discard_pending()
    assert [look_up.unsummed() for look_up in look_ups] == [None, None]


def test_only_a_whole_update_takes_them():
    embeddings = a_collection()
    loss(embeddings, a_batch()).backward()
    (group, _) = embeddings.engine.pending.routes[0].groups
    merged = group.look_up.unsummed()
    assert isinstance(merged, Unsummed)
    with pytest.raises(TypeError, match="sum the look-up first"):
        sum_merged(merged, torch.zeros(merged.num_merged, 3))
    with pytest.raises(ValueError, match="not the part"):
        group.exchange.arena.apply(merged, 0.1, 1.0, 1, (0, 1))
