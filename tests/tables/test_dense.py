"""DenseArena: its memory, its state, and the rows it starts from, in the memory of the host and of devices."""

import numpy as np
import pytest
import torch

from rowmesh.errors import ConfigurationError
from rowmesh.ops.initialize.reference import values
from rowmesh.placement import AddressMap, Plan, TableShape
from rowmesh.tables import DenseArena, TableSpec, Uniform, fuse
from rowmesh.tables.initializer import table_key
from rowmesh.tables.update_rules import SGD, AdaGrad, Adam, RowWiseAdaGrad
from tests.support.triton import find_device

RULES = [SGD(), AdaGrad(initial_accumulator=0.5), RowWiseAdaGrad(initial_accumulator=0.25), Adam()]


DEVICES = [None, find_device()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_and_state(rule, dtype, device):
    (group,) = fuse([TableSpec(name="a", num_rows=10, dim=3, optimizer=rule, dtype=dtype)])
    arena = DenseArena(group, 10, device)
    assert arena.has_views == (device is None)
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


@pytest.mark.parametrize("device", DEVICES)
def test_every_rank_starts_from_its_part_of_the_same_table(device):
    tables = [
        TableSpec(name=name, num_rows=n, dim=3, initializer=Uniform(bound=1.0)) for name, n in (("a", 7), ("b", 1))
    ]
    (group,) = fuse(tables)
    plan = Plan.cyclic([TableShape.of(table) for table in tables], 3)
    for rank in range(3):
        address_map = AddressMap(plan, ["a", "b"], rank)
        arena = DenseArena(group, address_map.num_slots[rank], device)
        held = [list(address_map.held(number)) for number in range(2)]
        arena.initialize(5, held)
        for table, pieces in zip(tables, held, strict=True):
            for row, slot in (
                (row, slot) for piece in pieces for row, slot in zip(piece.rows, piece.slots, strict=True)
            ):
                expected = values(table_key(5, table.name), torch.tensor([row]).numpy(), 3, "uniform", -1.0, 1.0)
                assert torch.equal(arena.rows[slot].cpu(), torch.from_numpy(expected)[0].float())


@pytest.mark.parametrize("device", DEVICES)
def test_rows_can_be_set_and_read(device):
    (group,) = fuse([TableSpec(name="a", num_rows=10, dim=3, optimizer=RULES[2])])
    arena, slots = DenseArena(group, 10, device), np.array([7, 0, 3])
    rows, state = torch.randn(3, 3), {"sum": torch.rand(3)}
    arena.write_rows(slots, rows, state)
    found, found_state = arena.read_rows(slots)
    assert torch.equal(found, rows)
    assert torch.equal(found_state["sum"], state["sum"])
    assert arena.read_rows(np.array([1]))[1]["sum"].tolist() == [0.25]


def test_memory_of_others_is_used():
    (group,) = fuse([TableSpec(name="a", num_rows=10, dim=3)])
    rows = torch.zeros(10, 3)
    arena = DenseArena(group, 10, rows=rows)
    arena.write_rows(np.array([4]), torch.ones(1, 3), {})
    assert rows[4].tolist() == [1.0] * 3


def test_devices_tell_fewer_slots_apart():
    (group,) = fuse([TableSpec(name="a", num_rows=10, dim=3)])
    with pytest.raises(ConfigurationError, match="would hold 2,147,483,648 rows on cpu, and at most 2,147,483,647 can"):
        DenseArena(group, 2**31, torch.device("cpu"))
