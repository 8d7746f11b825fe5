"""Checkpoints of rows on a device, beside steps and as increments: on the GPU where there is one, else interpreted."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from rowmesh import checkpoint
from rowmesh.checkpoint.series import Series
from rowmesh.checkpoint.store_snapshot import StoreSnapshot
from rowmesh.mesh import Mesh
from tests.checkpoint import test_chain, test_known_chains
from tests.checkpoint.test_snapshot import PLAIN, cases, save_both_ways
from tests.exchange.resolve.test_resolver import RULES
from tests.support.dynamic import Stream
from tests.support.slowed import sums_of
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
kernels_of("pool")  # or all are skipped

ON_DEVICE = {**PLAIN, "device": "cuda", "transport": "collective"}
DYNAMIC = Stream(rules=(("user", RULES["lru"]), ("item", RULES["lfu"])), num_steps=8, device="cuda")


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("point, copy_bytes", [("snapshot.read", 0), ("snapshot.copied", 1 << 20)])
def test_a_checkpoint_in_the_background_is_that_of_its_step(ranks, tmp_path, world_size, point, copy_bytes):
    """Dense rows, and tiers whose fast memory is the device's."""
    case = {**ON_DEVICE, "point": point, "copy_bytes": copy_bytes, "steps": 2}
    assert sum(ranks.run(save_both_ways, tmp_path, case, world_size=world_size)) > 0
    assert sums_of(tmp_path / "async") == sums_of(tmp_path / "sync")


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(case=cases())
def test_any_tables_and_rules(tmp_path_factory, case):
    folder = tmp_path_factory.mktemp("checkpoints")
    save_both_ways(Mesh(), folder, {**case, "device": "cuda"})
    assert sums_of(folder / "async") == sums_of(folder / "sync")


def test_without_pre_images_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(StoreSnapshot, "preserve", lambda *_: None)
    save_both_ways(Mesh(), tmp_path, {**ON_DEVICE, "steps": 1})
    found, expected = sums_of(tmp_path / "async"), sums_of(tmp_path / "sync")
    for table in ("item", "user"):
        assert any(found[name] != expected[name] for name in found if name.startswith(table))


@pytest.mark.parametrize("events", [["step", "increment", "step", "background", "set", "increment", "step"]])
def test_a_chain_is_read_as_a_full_one(tmp_path, events):
    steps = test_chain.write_chain(Mesh(), tmp_path, ON_DEVICE, [*events, "increment"])
    test_chain.read_both(Mesh(), tmp_path, PLAIN, steps)
    second = checkpoint.read_manifest(Series(tmp_path / "found").at(steps[1])).tables["item"]
    changed, of_all = sum(part.num_changed for part in second.parts), second.num_rows
    assert 0 < changed < of_all


def test_dynamic_tables_are_written_beside_steps(tmp_path):
    assert test_known_chains.save_both_ways(Mesh(), tmp_path, replace(DYNAMIC, num_steps=6), "snapshot.read") > 0
    assert sums_of(tmp_path / "async") == sums_of(tmp_path / "sync")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_chains_of_dynamic_tables(ranks, tmp_path, world_size):
    events = ["step", "step", "increment", "step", "background"]
    stream = replace(DYNAMIC, num_steps=4)
    (steps, *_) = ranks.run(test_known_chains.write_chain, tmp_path, stream, events, world_size=world_size)
    test_known_chains.read_both(Mesh(), tmp_path, replace(stream, device="cpu"), steps)
