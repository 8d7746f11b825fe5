"""Runs that the memory of a host cannot hold are refused before they take any."""

import dataclasses

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.observe import memory
from rowmesh.placement import Plan, TableShape
from rowmesh.train import preflight
from rowmesh.train.commands import run_training
from rowmesh.train.preflight import check_memory
from rowmesh.train.resolve import resolve

SHAPE = TableShape("item", 1000, value_bytes=64, gradient_bytes=64)


def refusal(mesh, plan, hosts, available, averages=False):
    """What a rank is told where each has so much memory available."""
    patch = pytest.MonkeyPatch()
    patch.setattr(memory, "available_bytes", lambda: available[mesh.rank])
    try:
        check_memory(plan, dataclasses.replace(mesh, hosts=hosts), averages=averages)
    except ConfigurationError as error:
        return str(error)
    finally:
        patch.undo()
    return ""


def test_each_host_must_hold_what_its_ranks_get(ranks):
    """A host has what the rank that measured least says."""
    plan = Plan.dealt([SHAPE], 4, 2)  # 16,000 bytes a rank
    assert ranks.run(refusal, plan, (0, 0, 1, 1), [32_000] * 4, world_size=4) == [""] * 4
    assert ranks.run(refusal, plan, (0, 0, 0, 0), [64_000] * 4, world_size=4) == [""] * 4
    for hosts, available, named in [
        ((0, 0, 1, 1), [99_000, 99_000, 99_000, 31_999], "(rank 2, 3)"),
        ((0, 0, 0, 0), [63_999, 99_000, 99_000, 99_000], "(rank 0, 1, 2, 3)"),
    ]:
        messages = ranks.run(refusal, plan, hosts, available, world_size=4)
        assert named in messages[0]
        assert messages == [messages[0]] * 4


def test_the_message_says_what_is_there_and_how_many_ranks_it_takes(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 40_000)
    monkeypatch.setattr(preflight.platform, "node", lambda: "red")
    with pytest.raises(
        ConfigurationError, match=r"host red \(rank 0\) has 40 kB of .* gives its ranks 64 kB"
    ) as refused:
        check_memory(Plan.dealt([SHAPE], 1), Mesh(), averages=False)
    assert "takes at least 2 ranks with 40 kB each: start more, on more hosts, free memory" in str(refused.value)
    monkeypatch.setattr(memory, "available_bytes", lambda: 63)
    with pytest.raises(ConfigurationError, match="no number of ranks with 63 B each"):
        check_memory(Plan.dealt([SHAPE], 1), Mesh(), averages=False)


def test_replicas_count(ranks):
    plan = Plan.dealt([SHAPE], 2, replicas=2)
    assert ranks.run(refusal, plan, (0, 1), [64_000, 64_000]) == ["", ""]
    messages = ranks.run(refusal, plan, (0, 0), [64_000, 64_000])
    assert all("takes at least 2 ranks with 32 kB each" in message for message in messages)
    assert all("form fewer replica groups" in message for message in messages)
    assert ranks.run(refusal, plan, (0, 1), [65_000, 65_000], True) == ["", ""]  # a mark a row
    assert all(ranks.run(refusal, plan, (0, 1), [64_999, 65_000], True))


def test_a_run_is_refused_and_leaves_nothing(config_file, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(ConfigurationError, match="1 kB of memory available"):
        run_training(resolve(config_file))
    assert not (tmp_path / "run").exists()
