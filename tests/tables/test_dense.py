"""DenseArena: its memory, its state, and the rows it starts from."""

import pytest
import torch

from rowmesh.ops.initialize.reference import values
from rowmesh.optim import SGD, AdaGrad, Adam, RowWiseAdaGrad
from rowmesh.placement import AddressMap, Plan, TableShape
from rowmesh.tables import DenseArena, TableSpec, Uniform, fuse
from rowmesh.tables.initializer import table_key

RULES = [SGD(), AdaGrad(initial_accumulator=0.5), RowWiseAdaGrad(initial_accumulator=0.25), Adam()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_and_state(rule, dtype):
    (group,) = fuse([TableSpec(name="a", num_rows=10, dim=3, optimizer=rule, dtype=dtype)])
    arena = DenseArena(group, 10)
    assert arena.rows.shape == (10, 3)
    assert arena.rows.dtype == dtype
    assert arena.rows.data_ptr() == arena.address
    assert arena.address % 64 == 0
    assert arena.num_bytes[0] >= arena.rows.nbytes
    assert arena.num_bytes[1] >= sum(state.nbytes for state in arena.state.values())
    for name, extent in rule.state.items():
        state = arena.state[name]
        assert state.shape == ((10,) if extent == "row" else (10, 3))
        assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert bool((state == rule.initial_state[name]).all())


def test_every_rank_starts_from_its_part_of_the_same_table():
    tables = [
        TableSpec(name=name, num_rows=n, dim=3, initializer=Uniform(bound=1.0)) for name, n in (("a", 7), ("b", 1))
    ]
    (group,) = fuse(tables)
    plan = Plan.dealt([TableShape.of(table) for table in tables], 3)
    for rank in range(3):
        address_map = AddressMap(plan, ["a", "b"], rank)
        arena = DenseArena(group, address_map.num_slots[rank])
        held = [list(address_map.held(number)) for number in range(2)]
        arena.initialize(5, held)
        for table, pieces in zip(tables, held, strict=True):
            for row, slot in (
                (row, slot) for piece in pieces for row, slot in zip(piece.rows, piece.slots, strict=True)
            ):
                expected = values(table_key(5, table.name), torch.tensor([row]).numpy(), 3, "uniform", -1.0, 1.0)
                assert torch.equal(arena.rows[slot], torch.from_numpy(expected)[0].float())
