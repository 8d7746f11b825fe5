from types import SimpleNamespace

import pytest
import torch

from rowmesh.errors import DataError
from rowmesh.sparse import SparseBatch
from rowmesh.sparse.convert import as_batch, with_empty_bags

BATCH = SparseBatch.from_bags({"user": [[7], [7, 9]], "shop": [[1], [1]], "item": [[3], []]})
KNOWN = ["item", "user", "day"]


def keyed(**more):
    """What a TorchRec KeyedJaggedTensor answers."""
    parts = {
        "keys": lambda: ["user", "item"],
        "values": lambda: torch.tensor([7, 7, 9, 3]),
        "offsets": lambda: torch.tensor([0, 1, 3, 4, 4]),
        "weights_or_none": lambda: None,
    }
    return SimpleNamespace(**parts | more)


def test_a_batch_stays_what_it_is():
    assert as_batch(BATCH) is BATCH


@pytest.mark.parametrize("more", [{}, {"stride": lambda: 2}], ids=["without a stride", "with a stride"])
def test_a_keyed_jagged_tensor_becomes_a_batch(more):
    batch = as_batch(keyed(**more))
    assert (batch.features, batch.batch_size) == (("user", "item"), 2)
    assert batch.ids.tolist() == [7, 7, 9, 3]


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("values", torch.float32),
        ("values", torch.float64),
        ("values", torch.bfloat16),
        ("values", torch.bool),
        ("values", torch.complex64),
        ("offsets", torch.float32),
    ],
)
def test_a_keyed_jagged_tensor_of_no_whole_numbers_is_refused(part, kind):
    plain = keyed()
    what = "ids" if part == "values" else "offsets"
    with pytest.raises(DataError, match=f"the {what} of a KeyedJaggedTensor must be whole numbers, got {kind}"):
        as_batch(keyed(**{part: lambda: getattr(plain, part)().to(kind)}))


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8, torch.uint32, torch.uint64])
def test_a_keyed_jagged_tensor_of_other_integers_is_read(kind):
    batch = as_batch(keyed(values=lambda: torch.tensor([7, 7, 9, 3]).to(kind)))
    assert batch.ids.tolist() == [7, 7, 9, 3]


def test_anything_else_is_refused():
    with pytest.raises(DataError, match="a SparseBatch or a TorchRec KeyedJaggedTensor, got dict"):
        as_batch({"user": torch.zeros(2)})  # pyright: ignore[reportArgumentType]


def test_features_are_kept_and_others_are_empty():
    part = with_empty_bags(BATCH, ["user", "item"], KNOWN)
    assert part.features == ("user", "item", "day")
    assert part.ids.tolist() == [7, 7, 9, 3]
    assert part.offsets.tolist() == [0, 1, 3, 4, 4, 4, 4]


def test_equal_bags_and_weights():
    ids = torch.arange(6).view(2, 3)
    batch = SparseBatch.from_dense(["user", "item"], ids, weights=torch.arange(6.0))
    part = with_empty_bags(batch, ["item"], KNOWN)
    assert part.offsets.tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3, 3]
    assert part.weights is not None
    assert part.weights.tolist() == [3, 4, 5]
    assert with_empty_bags(batch, ["item", "user"], ["user", "item"]).bag_size == 1


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (["shop"], r"features \['shop'\] belong to no table; there are \['item', 'user', 'day'\]"),
        (["itme"], r"belong to no table; did you mean 'item'\?"),
        (["day"], r"the batch lacks features \['day'\]; it has"),
        (["user", "user"], "name one more than once"),
        ("user", r"write features=\['user'\]"),
    ],
)
def test_wrong_features_are_named(features, message):
    with pytest.raises(DataError, match=message):
        with_empty_bags(BATCH, features, KNOWN)
