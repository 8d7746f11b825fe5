"""Topology: what it costs each rank to read a byte from each other, as a value that is shipped, measured or written.

A file is TOML. Where all links within nodes are alike, and all between nodes, it says so in three sections:

    name = "2x4"
    source = "where the figures are from"
    num_nodes = 2
    ranks_per_node = 4
    memory_bytes = 42949672960        # of a rank; may be left out

    [local]                           # a rank and its own memory
    bandwidth_bytes_per_s = 1.555e12
    latency_s = 5e-7

    [intra]                           # ranks of one node; not needed where a node has one rank
    bandwidth_bytes_per_s = 1e11
    latency_s = 2e-6

    [inter]                           # ranks of two nodes; not needed where there is one node
    bandwidth_bytes_per_s = 2.375e10
    latency_s = 5e-6

Otherwise `cost_s_per_byte` and `latency_s` are whole matrices; row i is what rank i pays to read from every rank.
`rowmesh plan --measure` writes such a file.

Source: OPER §3.2 (the matrix L of per-embedding latencies), §6.3 and Fig. 8 (links 4.21 times apart).
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from numpy.typing import NDArray

from rowmesh._support.files.atomic import replacing_file
from rowmesh.errors import ConfigurationError
from rowmesh.placement.pairs import LinkKinds

Floats = NDArray[np.float64]
MAX_RANKS = 1 << 14  # matrices of 2 GiB
NO_LATENCY = LinkKinds()
_SECTIONS = ("local", "intra", "inter")
_KEYS = {"name", "source", "num_nodes", "ranks_per_node", "memory_bytes", "cost_s_per_byte", "latency_s", *_SECTIONS}


@dataclass(frozen=True, eq=False)
class Topology:
    """Ranks, the nodes they are in, and what links cost.

    Attributes:
        name: of the topology.
        num_nodes: H.
        ranks_per_node: G; ranks n·G … (n + 1)·G − 1 are one node.
        costs: seconds a byte for rank i to read from rank j, float64 `[W, W]`; the diagonal is a rank's own memory.
            Kept by kind where all links of a kind are alike, since the matrix of thousands of ranks is large.
        latencies: seconds before the first byte, as costs.
        memory_bytes: that a rank has for embeddings, or None where unknown.
        source: where the figures are from.

    Raises:
        ConfigurationError: matrices of another size, or costs that are not positive.

    Example:
        >>> topology = Topology.grouped(num_nodes=2, ranks_per_node=2, inter_over_intra=4.21)
        >>> topology.cost[0].tolist()
        [0.0, 1.0, 4.21, 4.21]
        >>> topology.is_uniform, round(topology.inter_over_intra, 2)
        (False, 4.21)
        >>> Topology.load("2x4").world_size
        8
    """

    name: str
    num_nodes: int
    ranks_per_node: int
    costs: Floats | LinkKinds
    latencies: Floats | LinkKinds = NO_LATENCY
    memory_bytes: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ConfigurationError(
                f"topology {self.name!r}: {self.num_nodes} nodes of {self.ranks_per_node} ranks; both must be 1 or more"
            )
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ConfigurationError(f"topology {self.name!r}: memory_bytes is {self.memory_bytes}")
        object.__setattr__(self, "costs", self._checked("cost", self.costs))
        object.__setattr__(self, "latencies", self._checked("latency_s", self.latencies))
        if self.cheapest_link <= 0:
            i, j = np.argwhere((self.cost <= 0) & ~np.eye(self.world_size, dtype=bool))[0]
            raise ConfigurationError(
                f"topology {self.name!r}: the link from rank {j} to rank {i} costs {self.cost[i, j]} s a byte; "
                "it must be more than 0"
            )

    @staticmethod
    def uniform(world_size: int) -> Topology:
        """A single node whose links all cost 1 and whose own memory costs nothing: costs are bytes."""
        return Topology.grouped(1, world_size, 1.0)

    @staticmethod
    def grouped(num_nodes: int, ranks_per_node: int, inter_over_intra: float) -> Topology:
        """Nodes whose links cost 1 within and `inter_over_intra` between them; own memory costs nothing."""
        costs = LinkKinds(0.0, 1.0, inter_over_intra)
        return Topology(f"{num_nodes}x{ranks_per_node}", num_nodes, ranks_per_node, costs, source="relative costs")

    @staticmethod
    def shipped() -> tuple[str, ...]:
        """Names that `load` knows without a file."""
        files = (resources.files("rowmesh.placement") / "topologies").iterdir()
        return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))

    @staticmethod
    def load(source: str | Path) -> Topology:
        """A shipped topology by name, or a TOML file by path.

        Raises:
            ConfigurationError: there is no such name or file, or the file is not a topology; says what is wrong in it.
        """
        text = str(source)
        if text in Topology.shipped():
            file = resources.files("rowmesh.placement") / "topologies" / f"{text}.toml"
            return _parse(file.read_text(encoding="utf-8"), text)
        try:
            return _parse(Path(source).read_text(encoding="utf-8-sig"), text)
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"no topology {text!r}: give one of {', '.join(Topology.shipped())}, or the path of a TOML file"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read the topology {text}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the topology, with whole matrices; what stood at `path` stays where that fails."""
        values: dict[str, Any] = {
            "name": self.name,
            "source": self.source,
            "num_nodes": self.num_nodes,
            "ranks_per_node": self.ranks_per_node,
        }
        if self.memory_bytes is not None:
            values["memory_bytes"] = self.memory_bytes
        values |= {"cost_s_per_byte": self.cost.tolist(), "latency_s": self.latency_s.tolist()}
        with replacing_file(Path(path)) as file:
            file.write(tomli_w.dumps(values).encode())

    @property
    def world_size(self) -> int:
        """W."""
        return self.num_nodes * self.ranks_per_node

    @cached_property
    def cost(self) -> Floats:
        """`[W, W]`, what rank i pays for a byte of rank j."""
        return self._matrix(self.costs)

    @cached_property
    def latency_s(self) -> Floats:
        """`[W, W]`, seconds before the first byte."""
        return self._matrix(self.latencies)

    @property
    def own_cost(self) -> Floats:
        """`[W]`, seconds a byte of each rank's own memory."""
        costs = self.costs
        return np.full(self.world_size, costs.own) if isinstance(costs, LinkKinds) else np.diag(costs)

    @property
    def cheapest_link(self) -> float:
        """Seconds a byte of the cheapest link between ranks; infinite where there is one rank."""
        if self.world_size == 1:
            return math.inf
        costs = self.costs
        return min(costs.intra, costs.inter) if isinstance(costs, LinkKinds) else float(self._links(costs).min())

    @property
    def longest_latency_s(self) -> float:
        """Seconds before the first byte of the slowest link, or of own memory."""
        found = self.latencies
        return max(found.own, found.intra, found.inter) if isinstance(found, LinkKinds) else float(found.max())

    @property
    def is_uniform(self) -> bool:
        """Whether all links between ranks cost the same."""
        if self.world_size == 1:
            return True
        costs = self.costs
        links = np.array([costs.intra, costs.inter]) if isinstance(costs, LinkKinds) else self._links(costs)
        return bool(np.allclose(links, links[0], rtol=1e-9, atol=0.0))

    @property
    def same_node(self) -> NDArray[np.bool_]:
        """`[W, W]`: whether two ranks are in one node."""
        node = np.arange(self.world_size) // self.ranks_per_node
        return node[:, None] == node[None, :]

    @property
    def inter_over_intra(self) -> float:
        """How much dearer a link between nodes is than one within, by their means; 1 where there is only one kind."""
        if self.num_nodes == 1 or self.ranks_per_node == 1:
            return 1.0
        if isinstance(self.costs, LinkKinds):
            return self.costs.inter / self.costs.intra
        within = self.costs[self.same_node & ~np.eye(self.world_size, dtype=bool)]
        return float(self.costs[~self.same_node].mean() / within.mean())

    def _links(self, values: Floats) -> Floats:
        """The values off the diagonal."""
        return values[~np.eye(self.world_size, dtype=bool)]

    def _matrix(self, values: Floats | LinkKinds) -> Floats:
        if isinstance(values, LinkKinds):
            values = values.matrix(self.world_size, self.ranks_per_node)
            values.flags.writeable = False
        return values

    def _checked(self, what: str, values: Any) -> Floats | LinkKinds:
        """The values by kind where links of a kind are alike, else a matrix that cannot be changed."""
        if isinstance(values, LinkKinds):
            inter = values.inter if self.num_nodes > 1 else values.intra
            kinds = replace(values, intra=values.intra if self.ranks_per_node > 1 else inter, inter=inter)
            if all(math.isfinite(each) and each >= 0 for each in (kinds.own, kinds.intra, kinds.inter)):
                return kinds
            values = kinds.matrix(self.world_size, self.ranks_per_node)
        try:
            array = np.array(values, np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"topology {self.name!r}: {what} is no matrix of numbers ({error})") from error
        expected = (self.world_size, self.world_size)
        if array.shape != expected:
            raise ConfigurationError(
                f"topology {self.name!r}: {self.num_nodes} nodes of {self.ranks_per_node} ranks need {what} of shape "
                f"{expected}, got {array.shape}"
            )
        if not np.all(np.isfinite(array) & (array >= 0)):
            i, j = np.argwhere(~(np.isfinite(array) & (array >= 0)))[0]
            raise ConfigurationError(f"topology {self.name!r}: {what}[{i}][{j}] is {array[i, j]}")
        array.flags.writeable = False
        return LinkKinds.of(array, self.ranks_per_node) or array


def _parse(text: str, source: str) -> Topology:
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError(f"topology {source}: not valid TOML ({error})") from error
    if unknown := sorted(set(values) - _KEYS):
        raise ConfigurationError(f"topology {source}: unknown keys {unknown}; there are {sorted(_KEYS)}")
    num_nodes, ranks_per_node = (_integer(values, key, source) for key in ("num_nodes", "ranks_per_node"))
    if num_nodes * ranks_per_node > MAX_RANKS:
        raise ConfigurationError(
            f"topology {source}: {num_nodes:,} nodes of {ranks_per_node:,} ranks; a matrix of links is for at most "
            f"{MAX_RANKS:,} ranks"
        )
    if "cost_s_per_byte" in values:
        cost, latency = values["cost_s_per_byte"], values.get("latency_s", NO_LATENCY)
    else:
        cost, latency = _from_sections(values, num_nodes, ranks_per_node, source)
    return Topology(
        name=str(values.get("name", source)),
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        costs=cost,
        latencies=latency,
        memory_bytes=_integer(values, "memory_bytes", source) if "memory_bytes" in values else None,
        source=str(values.get("source", "")).strip(),
    )


def _from_sections(
    values: dict[str, Any], num_nodes: int, ranks_per_node: int, source: str
) -> tuple[LinkKinds, LinkKinds]:
    needed = {"local": True, "intra": ranks_per_node > 1, "inter": num_nodes > 1}
    seconds_per_byte, latency = [], []
    for section in _SECTIONS:
        if section not in values and not needed[section]:
            seconds_per_byte.append(1.0)
            latency.append(0.0)
            continue
        link = values.get(section)
        if not isinstance(link, dict):
            raise ConfigurationError(f"topology {source}: section [{section}] is missing; it says what such links cost")
        if unknown := sorted(set(link) - {"bandwidth_bytes_per_s", "latency_s"}):
            raise ConfigurationError(f"topology {source}: unknown keys {unknown} in section [{section}]")
        bandwidth = _number(link, "bandwidth_bytes_per_s", f"{source}, section [{section}]")
        if bandwidth <= 0:
            raise ConfigurationError(
                f"topology {source}, section [{section}]: bandwidth_bytes_per_s must be more than 0, got {bandwidth}"
            )
        seconds_per_byte.append(1.0 / bandwidth)
        latency.append(_number(link, "latency_s", f"{source}, section [{section}]") if "latency_s" in link else 0.0)
    return LinkKinds(*seconds_per_byte), LinkKinds(*latency)


def _integer(values: dict[str, Any], key: str, source: str) -> int:
    value = _number(values, key, source)
    if not math.isfinite(value) or value != int(value) or value < 1:
        raise ConfigurationError(f"topology {source}: {key} must be a whole number, 1 or more, got {value}")
    return int(value)


def _number(values: dict[str, Any], key: str, source: str) -> float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"topology {source}: {key} must be a number, got {value!r}")
    return value
