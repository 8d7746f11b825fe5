"""Relayed rows: how much memory they take. What is trained through them is tested in tests/test_plans.py."""

from __future__ import annotations

from dataclasses import replace

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape

NUM_ROWS, DIM = 4800, 16
TABLE = TableSpec(name="a", num_rows=NUM_ROWS, dim=DIM)


def memory_of_relayed_rows(mesh, num_direct):
    """Of four ranks on two nodes; the rows behind the first ones go in two hops, and every rank wants all of them.

    Returns what each of two accumulated look-ups has for relayed rows, before and after they are pushed.
    """
    ranges = (RowRange(0, num_direct, "cyclic"), RowRange(num_direct, NUM_ROWS, "cyclic", two_hop=True))
    plan = Plan((TablePlan(TableShape.of(TABLE), ranges),), 4, 2)
    mesh = replace(mesh, hosts=(0, 0, 1, 1))
    collection = EmbeddingCollection([TABLE], mesh=mesh, transport="collective", plan=plan)
    optimizer = EmbeddingOptimizer(collection)
    batch = SparseBatch.from_bags({"a": [list(range(NUM_ROWS))]})
    first, second = collection(batch), collection(batch)
    look_ups = collection.engine.exchanges[0].look_ups._made
    before = [look_up.relayed.num_bytes for look_up in look_ups]
    (first.values + second.values).sum().backward()
    optimizer.step()
    after = [look_up.relayed.num_bytes for look_up in look_ups]
    collection.close()
    return before, after


def test_room_is_made_for_rows_that_are_fetched_only(ranks):
    """A node leader stands for one of two places of a node: it asks for half of the relayed rows, half of them here."""
    num_relayed = 1600
    for before, after in ranks.run(memory_of_relayed_rows, NUM_ROWS - num_relayed, world_size=4):
        assert len(before) == 2
        for num_bytes in before:
            fetched = num_relayed // 2 * 4 * DIM
            assert fetched // 2 <= num_bytes <= 1.25 * fetched
        assert after == before, "gradients need no room for rows"
