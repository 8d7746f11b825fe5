"""The contestants of `address_map` find the same places; nothing here is timed."""

import json

import numpy as np
import pytest

from benchmarks import address_map
from rowmesh.placement import AddressMap

NUM_ROWS = 60_000


@pytest.mark.parametrize("name", address_map.make_plans(NUM_ROWS))
def test_everyone_finds_the_owner_of_every_row(name):
    plan = address_map.make_plans(NUM_ROWS)[name]
    plan.check()
    ids = np.random.default_rng(0).permutation(NUM_ROWS)
    lookup, table = address_map.Lookup(plan, NUM_ROWS), plan.tables[0]
    places = {each: address_map.Places(NUM_ROWS) for each in ("rowmesh locate", "binary search", "array")}
    for each, out in places.items():
        lookup.functions()[each](ids, out)
        assert np.array_equal(out.values, places["rowmesh locate"].values)
    of_rank_0 = AddressMap(plan, ["item"], 0)
    for row, owner in zip(ids[:500].tolist(), places["array"].values[0, :500].tolist(), strict=True):
        assert owner == table.range_of(row).owner(row, plan.world_size)
        if of_rank_0.locate(0, row)[2] not in ("node", "relayed"):
            assert of_rank_0.locate(0, row)[0] == owner
    assert lookup.num_bytes["array"] == 4 * NUM_ROWS


def test_drawn_ids_are_distinct_rows():
    for kind in ("zipf", "uniform"):
        for ids in address_map.draw(kind, 1000, 1.1, 400, 3):
            assert len(set(ids.tolist())) == len(ids) > 100
            assert 0 <= ids.min() <= ids.max() < 1000


def test_every_contestant_is_reported(capsys):
    address_map.main(["--quick", "--max-rows", "50000", "--steps", "2", "--warmup", "1"])
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2 * 7 * 4
    assert all(line["id_ns"] > 0 and line["map_bytes"] > 0 for line in lines)
    assert len(last["summary"]) == 2 * 7 * 3
