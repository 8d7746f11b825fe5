"""Grids: every rank is in one shard group and one replicate group; groups in node order fit their hosts."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.errors import ConfigurationError
from rowmesh.mesh.grid import Grid, valid_replicas


@st.composite
def grids(draw):
    world_size = draw(st.integers(1, 48))
    return Grid(
        world_size, draw(st.sampled_from(valid_replicas(world_size))), draw(st.sampled_from(["shards", "replicas"]))
    )


@given(grids())
def test_groups_and_columns_cross_once(grid):
    assert len(grid.groups) == grid.replicas
    assert len(grid.replicate_groups) == grid.shards
    for rank in range(grid.world_size):
        replica, shard = grid.place(rank)
        assert grid.groups[replica][shard] == rank
        assert grid.replicate_groups[shard][replica] == rank
        assert set(grid.groups[replica]) & set(grid.replicate_groups[shard]) == {rank}


@given(grids(), st.data())
def test_nodes_of_a_group_are_its_ranks_on_one_host(grid, data):
    per_host = data.draw(st.sampled_from(valid_replicas(grid.world_size)))
    on_hosts = {count for group in grid.groups for count in Counter(rank // per_host for rank in group).values()}
    expected = on_hosts.pop() if len(on_hosts) == 1 else grid.shards  # cut unevenly: hosts are not distinguished
    assert grid.ranks_per_node(per_host) == expected


def test_impossible_numbers_of_replicas_name_those_that_are():
    with pytest.raises(ConfigurationError, match=r"6 ranks cannot form 4 replica groups .* 1, 2, 3, 6"):
        Grid(6, 4)
    with pytest.raises(ConfigurationError, match="together must be"):
        Grid(4, 2, "hosts")  # pyright: ignore[reportArgumentType]
