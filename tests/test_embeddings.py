"""What look-ups return: padded rows, and look-ups of some features."""

import pytest
import torch

from rowmesh import Adam, EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.embeddings import JaggedRows
from rowmesh.errors import DataError
from rowmesh.mesh import Mesh

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
