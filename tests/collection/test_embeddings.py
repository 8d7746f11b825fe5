"""What look-ups return: padded rows, and look-ups of some features."""

import pytest
import torch

from rowmesh import SGD, Adam, EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.collection.outputs import JaggedRows
from rowmesh.errors import DataError
from rowmesh.mesh import Mesh
from rowmesh.tables import Uniform

LENGTHS = [2, 0, 5, 1]


def jagged(lengths=LENGTHS, dim=3):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.randn(sum(lengths), dim, generator=torch.Generator().manual_seed(0), requires_grad=True)
    return JaggedRows(values, offsets)


def padded_by_hand(rows, length, value, keep):
    """`[B, L, D]` and the mask, sample by sample."""
    filled = torch.full((len(rows.offsets) - 1, length, rows.values.shape[1]), value)
    mask = torch.zeros(filled.shape[:2], dtype=torch.bool)
    for sample, (begin, end) in enumerate(zip(rows.offsets[:-1].tolist(), rows.offsets[1:].tolist(), strict=True)):
        own = rows.values[begin:end]
        own = own[len(own) - min(length, len(own)) :] if keep == "last" else own[:length]
        filled[sample, : len(own)], mask[sample, : len(own)] = own, True
    return filled, mask


@pytest.mark.parametrize(
    ("length", "keep"), [(None, None), (5, None), (7, None), (3, "first"), (3, "last"), (9, "last"), (0, "first")]
)
def test_padded_rows_and_their_gradients(length, keep):
    rows = jagged()
    found, mask = rows.padded(length, value=-1.5, keep=keep)
    expected, expected_mask = padded_by_hand(rows, 5 if length is None else length, -1.5, keep)
    assert found.equal(expected)
    assert mask.equal(expected_mask)
    weights = torch.randn_like(found)
    of_rows, of_reference = (torch.autograd.grad((each * weights).sum(), rows.values)[0] for each in (found, expected))
    torch.testing.assert_close(of_rows, of_reference)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_padding_no_rows_keeps_the_graph(lengths):
    rows = jagged(lengths)
    padded, mask = rows.padded(4, value=2.0)
    assert padded.equal(torch.full((len(lengths), 4, 3), 2.0))
    assert not mask.any()
    padded.sum().backward()
    assert rows.padded()[0].shape == (len(lengths), 0, 3)


def test_longer_samples_are_not_cut_unasked():
    with pytest.raises(DataError, match=r'sample 2 has 5 rows, more than max_length=4; .* keep="first" or keep="last"'):
        jagged().padded(4)
    with pytest.raises(DataError, match="0 or more, got -1"):
        jagged().padded(-1)


def collection(mesh=None):
    """Two pooled tables of two dims, one that is not pooled."""
    tables = [
        TableSpec(name="user", num_rows=20, dim=4, optimizer=Adam(), dtype=torch.float64),
        TableSpec(name="item", num_rows=10, dim=2, optimizer=Adam(), dtype=torch.float64),
        TableSpec(name="seen", num_rows=10, dim=2, pooling="none", optimizer=Adam(), dtype=torch.float64),
    ]
    return EmbeddingCollection(tables, mesh=mesh)


BAGS = {"user": [[7], [7, 9], []], "item": [[3], [4], [3]], "seen": [[1, 1], [], [5]]}


def test_some_features_have_their_vectors_in_the_order_given():
    embeddings = collection()
    whole = embeddings(SparseBatch.from_bags(BAGS))
    part = embeddings(SparseBatch.from_bags({**BAGS, "shop": [[1], [], []]}), features=["seen", "item", "user"])
    assert (part.features, part.dims, list(part)) == (("item", "user"), (2, 4), ["item", "user", "seen"])
    assert part.values.equal(torch.cat([whole["item"], whole["user"]], dim=1))
    assert part["seen"].values.equal(whole["seen"].values)
    one = embeddings(SparseBatch.from_bags({"seen": BAGS["seen"]}), features=["seen"])
    assert one["seen"].values.equal(whole["seen"].values)
    assert one.values.shape == (3, 0)
    with pytest.raises(KeyError, match="no feature 'user'"):
        one["user"]


def test_a_batch_that_lacks_features_says_how():
    with pytest.raises(DataError, match=r"lacks features \['seen', 'user'\].* only what it has, give features="):
        collection()(SparseBatch.from_bags({"item": BAGS["item"]}))


def _train(mesh: Mesh) -> dict[str, torch.Tensor]:
    """Two steps: the second on one feature, another one on each rank of two."""
    embeddings = collection(mesh)
    optimizer = EmbeddingOptimizer(embeddings)
    names = [["item"], ["user"]]
    for features in ([["item", "user"]] * 2, names):
        chosen = [features[mesh.rank]] if mesh.world_size > 1 else features
        optimizer.zero_grad()
        for each in chosen:
            vectors = embeddings(SparseBatch.from_bags({name: BAGS[name] for name in each}), features=each)
            (vectors.values.square().sum() * mesh.world_size / 2).backward()
        optimizer.step()
    rows = {}
    for name in BAGS:
        for local in embeddings.local_rows(name):
            rows |= {(name, row): value.clone() for row, value in zip(local.rows, local.values, strict=True)}
    embeddings.close()
    return rows


def test_ranks_may_look_up_different_features(ranks):
    expected = _train(Mesh())
    merged = {}
    for found in ranks.run(_train, world_size=2):
        merged |= found
    assert merged.keys() == expected.keys()
    for key, row in expected.items():
        torch.testing.assert_close(merged[key], row)
    untouched = collection().local_rows("seen")[0].values
    assert torch.stack([expected["seen", row] for row in range(10)]).equal(untouched)


class Keyed:
    """As TorchRec's, as far as it is read."""

    def keys(self):
        return list(BAGS)

    def values(self):
        return torch.tensor([i for lists in BAGS.values() for bag in lists for i in bag])

    def offsets(self):
        return torch.tensor([0, *(len(bag) for lists in BAGS.values() for bag in lists)]).cumsum(0)

    def weights_or_none(self):
        return None

    def stride(self):
        return 3


def test_a_keyed_jagged_tensor_is_looked_up():
    embeddings = collection()
    expected = embeddings(SparseBatch.from_bags(BAGS))
    assert embeddings(Keyed()).values.equal(expected.values)
    assert embeddings(Keyed(), features=["user"]).values.equal(expected["user"])
    assert embeddings.pool(embeddings.fetch(embeddings.route(Keyed()))).values.equal(expected.values)


# Changes in place


def gradients_of(change, take):
    """What a step of SGD moves rows by, where vectors are changed first."""
    tables = [
        TableSpec(name="user", num_rows=9, dim=4, optimizer=SGD(lr=1.0), initializer=Uniform(bound=1.0)),
        TableSpec(name="item", num_rows=9, dim=2, optimizer=SGD(lr=1.0), initializer=Uniform(bound=1.0)),
        TableSpec(name="seen", num_rows=9, dim=2, pooling="none", optimizer=SGD(lr=1.0)),
    ]
    embeddings = EmbeddingCollection(tables)
    optimizer = EmbeddingOptimizer(embeddings)
    before = embeddings.state_dict()
    taken = [change(each) for each in take(embeddings(SparseBatch.from_bags(BAGS_OF_NINE)))]
    sum((each * torch.arange(1.0, each.numel() + 1).view(each.shape)).sum() for each in taken).backward()
    optimizer.step()
    return {name: before[name] - rows for name, rows in embeddings.state_dict().items()}


BAGS_OF_NINE = {"user": [[7], [7, 8], []], "item": [[3], [4], [3]], "seen": [[1, 1], [], [5]]}
IN_PLACE = {
    "relu": (lambda each: torch.nn.ReLU(inplace=True)(each), lambda each: each.relu()),
    "mul_": (lambda each: each.mul_(3.0), lambda each: each * 3.0),
    "dropout": (
        lambda each: torch.nn.functional.dropout(each, 0.5, training=bool(torch.manual_seed(0)), inplace=True),
        lambda each: torch.nn.functional.dropout(each, 0.5, training=bool(torch.manual_seed(0))),
    ),
}
TAKES = {
    "features": lambda out: [out["user"], out["item"], out["seen"].values],
    "values": lambda out: [out.values],
    "some": lambda out: [out.select(["item"]).values],
    "values of features": lambda out: [out["user"], out.values, out["item"]],
}


@pytest.mark.parametrize("take", TAKES)
@pytest.mark.parametrize("change", IN_PLACE)
def test_vectors_may_be_changed_in_place(change, take):
    found, expected = (gradients_of(each, TAKES[take]) for each in IN_PLACE[change])
    for name, rows in expected.items():
        torch.testing.assert_close(found[name], rows)
    assert any(rows.any() for rows in expected.values())


def test_stacked_vectors_may_be_changed_in_place():
    tables = [TableSpec(name=name, num_rows=9, dim=4, optimizer=SGD(lr=1.0)) for name in ("user", "item")]
    found = []
    for is_inplace in (False, True):
        embeddings = EmbeddingCollection(tables)
        before = embeddings.state_dict()
        batch = SparseBatch.from_bags({"user": [[7], [8, 7]], "item": [[3], [4]]})
        torch.nn.ReLU(inplace=is_inplace)(embeddings(batch).stacked()).sum().backward()
        EmbeddingOptimizer(embeddings).step()
        found.append({name: before[name] - rows for name, rows in embeddings.state_dict().items()})
    torch.testing.assert_close(*found)


def test_a_change_in_place_that_would_reach_other_vectors_is_refused():
    """Where all vectors were taken first, those of a feature are views to them, and torch says so."""
    out = collection()(SparseBatch.from_bags(BAGS))
    kept = out.values
    with pytest.raises(RuntimeError, match="being modified inplace"):
        out["user"].relu_()
    assert out.values is kept


def test_vectors_of_features_and_all_of_them_are_the_same():
    out = collection()(SparseBatch.from_bags(BAGS))
    parts = [out["user"], out["item"]]
    assert out.values is out.values
    assert torch.equal(out.values, torch.cat(parts, dim=1))
    out.values.mul_(0.0)
    assert parts[0].any()
    assert out["user"] is parts[0]
