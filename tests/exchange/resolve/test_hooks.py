"""Hooks are told of a table's decisions while they are there, and what they raise names them; `test_resolver` has what
they are told, on ranks, in pipelines and with replicas, against the rules."""

import pytest
import torch

from rowmesh import SparseBatch
from rowmesh.errors import ConfigurationError, RowmeshError
from tests.exchange.resolve.test_traps import bags, made, read


def test_a_hook_is_told_until_it_is_removed():
    embeddings, told = made(capacity=2, shards=1, admit_after=2), []
    embeddings(bags([9]))
    handle = embeddings.register_decision_hook("item", told.append)
    embeddings(bags([1, 9, 1]))
    read(embeddings, [1, 7])
    embeddings(bags([9, 3, 3]))
    embeddings(SparseBatch.from_bags({"item": [[]]}))
    handle.remove()
    embeddings(bags([4, 4]))
    assert [(each.table, each.step) for each in told] == [("item", 2), ("item", 3), ("item", 4)]
    assert [each.ids.tolist() for each in told] == [[1, 9], [3, 9], []]
    assert [each.counts.tolist() for each in told] == [[2, 1], [2, 1], []]
    assert [each.ids[each.admitted].tolist() for each in told] == [[1, 9], [3], []]
    assert [each.ids[each.known].tolist() for each in told] == [[], [9], []]
    assert [each.evicted_ids.tolist() for each in told] == [[], [1], []]


def test_known_ids_are_told_of_too():
    embeddings, told = made(capacity=9), []
    embeddings(bags([1, 2]))
    with_hook = embeddings.register_decision_hook("item", told.append)
    embeddings(bags([2, 2, 1]))
    with_hook.remove()
    embeddings(bags([1]))
    assert [(each.ids.tolist(), each.counts.tolist(), each.known.tolist()) for each in told] == [
        ([1, 2], [1, 2], [True, True])
    ]
    assert embeddings.dynamic_counters["item"].hits == 3


def test_what_it_keeps_cannot_be_changed():
    embeddings = made(capacity=9)

    def change(told):
        told.ids[0] = 5

    embeddings.register_decision_hook("item", change)
    with pytest.raises(RowmeshError, match="ValueError: assignment destination is read-only"):
        embeddings(bags([1]))


def fail(mesh):
    embeddings = made(mesh, capacity=9, shards=3)
    seen = []

    def strange(told):
        seen.append(told.step)
        if mesh.rank == 1:
            raise KeyError("nobody")

    embeddings.register_decision_hook("item", strange)
    with pytest.raises(RowmeshError) as caught:
        embeddings(bags([1, 2, 3]))
    embeddings.close()
    return seen, str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_it_raises_ends_the_step_on_all_ranks(ranks, world_size):
    found = ranks.run(fail, world_size=world_size)
    assert [seen for seen, _ in found] == [[1]] * world_size
    for _, text in found:
        assert text.startswith("rank 1: hook fail.<locals>.strange of dynamic table 'item' failed at step 1")
        assert "KeyError: 'nobody'" in text
        assert "test_hooks.py, line" in text


def test_no_other_table_has_any():
    with pytest.raises(ConfigurationError, match="'user' is no dynamic table; there are"):
        made(capacity=9).register_decision_hook("user", torch.nn.Identity())
