"""Topology: shipped files, saved ones, and what is wrong with others."""

import numpy as np
import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.placement.topology import Topology


@pytest.mark.parametrize("name", Topology.shipped())
def test_shipped_topologies_say_where_they_are_from(name):
    topology = Topology.load(name)
    assert topology.name == name
    nodes, ranks = name.split("-")[0].split("x")
    assert (topology.num_nodes, topology.ranks_per_node) == (int(nodes), int(ranks))
    assert "data sheet" in topology.source
    assert topology.memory_bytes
    off_diagonal = topology.cost[~np.eye(topology.world_size, dtype=bool)]
    assert np.diag(topology.cost).max() < off_diagonal.min()


def test_links_are_as_far_apart_as_in_the_paper():
    assert {"1x8", "2x4", "4x4", "16x8"} <= set(Topology.shipped())
    for name in ("2x4", "4x4", "16x8"):
        assert Topology.load(name).inter_over_intra == pytest.approx(4.21)
        assert not Topology.load(name).is_uniform
    assert Topology.load("1x8").is_uniform


def test_groups_and_uniform():
    grouped = Topology.grouped(2, 3, 5.0)
    assert grouped.cost[1].tolist() == [1.0, 0.0, 1.0, 5.0, 5.0, 5.0]
    assert grouped.same_node[4].tolist() == [False] * 3 + [True] * 3
    assert Topology.uniform(4).is_uniform
    assert Topology.uniform(1).is_uniform
    assert Topology.uniform(1).inter_over_intra == 1.0
    assert Topology.grouped(4, 1, 3.0).is_uniform


def test_save_and_load(tmp_path):
    rng = np.random.default_rng(0)
    one = Topology("mine", 2, 2, rng.random((4, 4)) + 1e-9, rng.random((4, 4)), 1 << 34, 'measured "here"')
    one.save(tmp_path / "mine.toml")
    two = Topology.load(tmp_path / "mine.toml")
    assert (two.name, two.num_nodes, two.ranks_per_node) == ("mine", 2, 2)
    assert (two.memory_bytes, two.source) == (1 << 34, 'measured "here"')
    assert np.array_equal(one.cost, two.cost)
    assert np.array_equal(one.latency_s, two.latency_s)


def test_costs_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        Topology.uniform(2).cost[0, 1] = 3.0


@pytest.mark.parametrize(
    "text, message",
    [
        ("num_nodes = [", "not valid TOML"),
        ("nodes = 2", r"unknown keys \['nodes'\]"),
        ("num_nodes = 1", "ranks_per_node must be a number, got None"),
        ("num_nodes = 1.5\nranks_per_node = 1", "num_nodes must be a whole number, 1 or more, got 1.5"),
        ("num_nodes = 1\nranks_per_node = 2\n[local]\nbandwidth_bytes_per_s = 1", r"section \[intra\] is missing"),
        ("num_nodes = 1\nranks_per_node = 1\n[local]\nspeed = 1", r"unknown keys \['speed'\] in section \[local\]"),
        ("num_nodes = 1\nranks_per_node = 1\n[local]\nbandwidth_bytes_per_s = 0", "must be more than 0, got 0"),
        ("num_nodes = 1\nranks_per_node = 2\ncost_s_per_byte = [[0, 1]]", r"of shape \(2, 2\), got \(1, 2\)"),
        ("num_nodes = 1\nranks_per_node = 2\ncost_s_per_byte = [[0, 1], [0]]", "no matrix of numbers"),
        ("num_nodes = 1\nranks_per_node = 2\ncost_s_per_byte = [[0, 1], [-1, 0]]", r"cost\[1\]\[0\] is -1"),
        ("num_nodes = 1\nranks_per_node = 2\ncost_s_per_byte = [[0, 1], [0, 0]]", "from rank 0 to rank 1 costs 0.0"),
        ("num_nodes = 0\nranks_per_node = 2\ncost_s_per_byte = []", "num_nodes must be a whole number, 1 or more"),
    ],
)
def test_says_what_is_wrong_in_a_file(tmp_path, text, message):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=message) as error:
        Topology.load(tmp_path / "bad.toml")
    assert "bad.toml" in str(error.value)


def test_says_which_names_there_are():
    with pytest.raises(ConfigurationError, match=r"no topology '3x3': give one of 16x8, .*2x4.* or the path"):
        Topology.load("3x3")


def test_a_byte_order_mark_is_no_part_of_a_topology(tmp_path):
    path = tmp_path / "mine.toml"
    Topology.load(Topology.shipped()[0]).save(path)
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert Topology.load(path).num_nodes == Topology.load(Topology.shipped()[0]).num_nodes
