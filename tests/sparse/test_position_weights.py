"""PositionWeights: the weight of each id by its position in its bag."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rowmesh import PositionWeights, SparseBatch
from rowmesh.errors import ConfigurationError, DataError
from tests.sparse.test_convert import keyed


@given(
    bags=st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5),
    others=st.sampled_from([None, 0, 2]),
    is_first=st.booleans(),
    is_weighted=st.booleans(),
)
def test_weights_by_position(bags, others, is_first, is_weighted):
    """Of one feature, before or behind another one whose ids keep their weight."""
    positions = PositionWeights({"seen": 4})
    with torch.no_grad():
        positions.of("seen").copy_(torch.tensor([2.0, 3.0, 5.0, 7.0]))
    given = {"seen": bags}
    if others is not None:
        given |= {"user": [[1] * others] * len(bags)}
    if not is_first:
        given = dict(reversed(given.items()))
    batch = SparseBatch.from_bags(given)
    own = torch.arange(1.0, 1 + len(batch.ids)) if is_weighted else None
    found = positions(SparseBatch(batch.features, batch.ids, len(bags), jagged_offsets=batch.offsets, weights=own))
    learned = [
        [2.0, 3.0, 5.0, 7.0][at] if name == "seen" else 1.0
        for name in given
        for b in given[name]
        for at, _ in enumerate(b)
    ]
    expected = torch.tensor(learned) * (1 if own is None else own)
    assert found.weights.tolist() == expected.tolist()
    assert found.ids is batch.ids
    counts = torch.tensor([sum(len(bag) > at for bag in bags) for at in range(4)])
    if own is None:
        found.weights.sum().backward()
        assert positions.weight.grad.tolist() == counts.tolist()


def test_fixed_bags_and_keyed_jagged_tensors():
    positions = PositionWeights({"item": 2, "user": 3})
    with torch.no_grad():
        positions.weight.copy_(torch.arange(1.0, 6))
    batch = SparseBatch.from_dense(["user", "item"], torch.zeros(2, 3, 2, dtype=torch.int64))
    found = positions(batch)
    assert found.bag_size == 2
    assert found.weights.tolist() == [3, 4] * 3 + [1, 2] * 3
    assert positions(keyed()).weights.tolist() == [3, 3, 4, 1]
    assert str(positions) == "PositionWeights(item: 2, user: 3)"


def test_what_does_not_fit_is_named():
    positions = PositionWeights({"seen": 2})
    with pytest.raises(DataError, match=r"feature 'seen': sample 1 has 3 ids, and weights are of 2 positions; give"):
        positions(SparseBatch.from_bags({"seen": [[1], [1, 2, 3]]}))
    with pytest.raises(DataError, match=r"lacks features \['seen'\], whose positions have weights; did you mean 'sen'"):
        positions(SparseBatch.from_bags({"sen": [[1]]}))
    with pytest.raises(ConfigurationError, match="feature 'seen': bags have 1 position or more, got 0"):
        PositionWeights({"seen": 0})
    with pytest.raises(ConfigurationError, match="no features"):
        PositionWeights({})
    with pytest.raises(ConfigurationError, match="float32 or float64"):
        PositionWeights({"seen": 1}, dtype=torch.bfloat16)
