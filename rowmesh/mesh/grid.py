"""Grid: how ranks form shard groups and replicate groups. Arithmetic alone; `Mesh.part` connects them.

T ranks form M shard groups of N = T / M. A shard group holds one replica of a table, a shard of it on each of its
ranks. The M ranks that hold the same shard form a replicate group. All-to-alls stay in a shard group; synchronization
stays in a replicate group.

Source: two-dimensional sparse parallelism §3.1, Fig. 3; §5 for which ranks share a host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rowmesh.errors import ConfigurationError

Together = Literal["shards", "replicas"]


@dataclass(frozen=True)
class Grid:
    """M × N ranks.

    Attributes:
        world_size: T.
        replicas: M.
        together: which ranks have consecutive numbers, and so share hosts: the shards of a replica (group m is ranks
            m·N … m·N + N − 1), or the replicas of a shard (group m is ranks m, m + M, m + 2·M, …).

    Raises:
        ConfigurationError: M does not divide T; lists those that do.

    Example:
        >>> grid = Grid(4, replicas=2, together="replicas")
        >>> [list(group) for group in grid.groups], [list(ranks) for ranks in grid.replicate_groups]
        ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    """

    world_size: int
    replicas: int = 1
    together: Together = "shards"

    def __post_init__(self) -> None:
        if self.replicas not in (valid := valid_replicas(self.world_size)):
            raise ConfigurationError(
                f"{self.world_size} ranks cannot form {self.replicas} replica groups of equal size; the number of "
                f"replicas can be {', '.join(map(str, valid))}"
            )
        if self.together not in get_args(Together):
            raise ConfigurationError(f"together must be 'shards' or 'replicas', got {self.together!r}")

    @property
    def shards(self) -> int:
        """N."""
        return self.world_size // self.replicas

    @property
    def groups(self) -> list[range]:
        """The ranks of each shard group, by shard."""
        return _blocks(self) if self.together == "shards" else _strides(self, self.replicas)

    @property
    def replicate_groups(self) -> list[range]:
        """The ranks of each replicate group, by replica."""
        return _strides(self, self.shards) if self.together == "shards" else _blocks(self)

    def place(self, rank: int) -> tuple[int, int]:
        """(replica, shard) of a rank."""
        if self.together == "shards":
            return divmod(rank, self.shards)
        shard, replica = divmod(rank, self.replicas)
        return replica, shard

    def ranks_per_node(self, ranks_per_node: int) -> int:
        """Ranks of a group on each host it is on, of hosts of so many ranks; all N where groups are cut unevenly.

        Example:
            >>> Grid(8, replicas=2).ranks_per_node(2), Grid(8, replicas=2, together="replicas").ranks_per_node(2)
            (2, 1)
        """
        mine = ranks_per_node
        if self.together == "replicas":
            mine, rest = divmod(ranks_per_node, self.replicas)
            if mine == 0:
                return 1
            if rest:
                return self.shards
        return mine if mine < self.shards and self.shards % mine == 0 else self.shards


def valid_replicas(world_size: int) -> list[int]:
    """The numbers of replica groups that so many ranks can form."""
    return [count for count in range(1, world_size + 1) if world_size % count == 0]


def _blocks(grid: Grid) -> list[range]:
    size = grid.shards if grid.together == "shards" else grid.replicas
    return [range(first, first + size) for first in range(0, grid.world_size, size)]


def _strides(grid: Grid, stride: int) -> list[range]:
    return [range(first, grid.world_size, stride) for first in range(stride)]
