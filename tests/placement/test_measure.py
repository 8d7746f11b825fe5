"""Measured topologies, on real process groups."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.errors import ConfigurationError
from rowmesh.placement.measure import fit_line, measure_topology, node_size, without_noise
from rowmesh.placement.topology import Topology


def measured(mesh, ranks_per_node):
    topology = measure_topology(mesh, ranks_per_node=ranks_per_node, memory_bytes=1 << 30, repeats=3)
    return topology.cost, topology.latency_s, topology.num_nodes, topology.memory_bytes, topology.source


@pytest.mark.parametrize("world_size, ranks_per_node", [(1, None), (2, None), (3, 1), (4, 2)])
def test_all_ranks_measure_the_same(ranks, world_size, ranks_per_node):
    results = ranks.run(measured, ranks_per_node, world_size=world_size)
    cost, latency, num_nodes, memory_bytes, source = results[0]
    for other in results[1:]:
        assert np.array_equal(other[0], cost)
        assert np.array_equal(other[1], latency)
    assert cost.shape == latency.shape == (world_size, world_size)
    assert np.all((cost > 0) & np.isfinite(cost))  # the speed of this machine is unknown
    assert np.all((latency >= 0) & np.isfinite(latency))
    assert num_nodes == world_size // (ranks_per_node or world_size)
    assert memory_bytes == 1 << 30
    assert f"measured on {world_size} ranks of 1 hosts" in source


def save_measured(mesh, path):
    topology = measure_topology(mesh, repeats=1, sizes=(8, 1 << 12))
    if mesh.rank == 0:
        topology.save(path)
    return topology.cost


def test_a_measured_topology_can_be_saved(ranks, tmp_path):
    cost, _ = ranks.run(save_measured, tmp_path / "measured.toml")
    assert np.array_equal(Topology.load(tmp_path / "measured.toml").cost, cost)


def measure_in_threes(mesh):
    with pytest.raises(ConfigurationError, match="2 ranks do not make nodes of 3"):
        measure_topology(mesh, ranks_per_node=3)


def test_refuses_nodes_that_ranks_do_not_fill(ranks):
    ranks.run(measure_in_threes)


def test_node_size():
    assert node_size((0,)) == 1
    assert node_size((0, 0, 0)) == 3
    assert node_size((0, 1, 2)) == 1
    assert node_size((0, 0, 1, 1, 2, 2)) == 2
    for hosts in ((0, 0, 1), (0, 1, 0, 1), (0, 1, 1), (0, 0, 1, 1, 1, 0)):
        with pytest.raises(ConfigurationError, match="equally many on each"):
            node_size(hosts)


positive = st.floats(1e-11, 1e-7)


@given(positive, st.floats(1e-7, 1e-3))
def test_fit_finds_a_line(cost, latency):
    sizes = (1 << 10, 1 << 16, 1 << 20)
    found = fit_line(sizes, [latency + cost * size for size in sizes])
    assert found == pytest.approx((cost, latency), rel=1e-5)


@given(st.lists(st.floats(1e-7, 1e-1), min_size=3, max_size=3))
def test_fit_is_never_negative(seconds):
    cost, latency = fit_line((1 << 10, 1 << 16, 1 << 20), seconds)
    assert cost > 0
    assert latency >= 0


def test_noise_is_settled_and_real_differences_stay():
    """Four ranks in two nodes: links within nodes measured alike, those between nodes not."""
    measured = np.array([[9, 1.0, 4, 4], [1.1, 9, 4, 8], [4, 4, 9, 1.0], [4, 8, 1.05, 9]])
    links = without_noise(measured, ranks_per_node=2)
    assert links[0, 1] == links[1, 0] == links[2, 3] == links[3, 2] == pytest.approx(1.0375)
    assert links[1, 3] == 8
    assert links[0, 2] == 4
    assert (links == links.T).all()
    assert without_noise(measured[:1, :1], 1).tolist() == [[9.0]]
