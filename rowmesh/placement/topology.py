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
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from numpy.typing import NDArray

from rowmesh._support.files.atomic import replacing_file
from rowmesh.errors import ConfigurationError

Floats = NDArray[np.float64]
MAX_RANKS = 1 << 14  # matrices of 2 GiB
_SECTIONS = ("local", "intra", "inter")
_KEYS = {"name", "source", "num_nodes", "ranks_per_node", "memory_bytes", "cost_s_per_byte", "latency_s", *_SECTIONS}


@dataclass(frozen=True, eq=False)
class Topology:
    """Ranks, the nodes they are in, and what links cost.

    Attributes:
        name: of the topology.
        num_nodes: H.
        ranks_per_node: G; ranks n·G … (n + 1)·G − 1 are one node.
        cost: float64 `[W, W]`, seconds a byte for rank i to read from rank j; the diagonal is a rank's own memory.
        latency_s: float64 `[W, W]`, seconds before the first byte.
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
    cost: Floats
    latency_s: Floats = field(default_factory=lambda: np.zeros(0))
    memory_bytes: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ConfigurationError(
                f"topology {self.name!r}: {self.num_nodes} nodes of {self.ranks_per_node} ranks; both must be 1 or more"
            )
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ConfigurationError(f"topology {self.name!r}: memory_bytes is {self.memory_bytes}")
        is_given = not (isinstance(self.latency_s, list | tuple | np.ndarray) and len(self.latency_s) == 0)
        latency = self.latency_s if is_given else np.zeros((self.world_size, self.world_size))
        object.__setattr__(self, "cost", self._checked("cost", self.cost))
        object.__setattr__(self, "latency_s", self._checked("latency_s", latency))
        if np.any(self._links(self.cost) <= 0):
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
        cost = _by_node(num_nodes, ranks_per_node, 0.0, 1.0, inter_over_intra)
        return Topology(f"{num_nodes}x{ranks_per_node}", num_nodes, ranks_per_node, cost, source="relative costs")

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

    @property
    def is_uniform(self) -> bool:
        """Whether all links between ranks cost the same."""
        links = self._links(self.cost)
        return not len(links) or bool(np.allclose(links, links[0], rtol=1e-9, atol=0.0))

    @property
    def same_node(self) -> NDArray[np.bool_]:
        """`[W, W]`: whether two ranks are in one node."""
        node = np.arange(self.world_size) // self.ranks_per_node
        return node[:, None] == node[None, :]

    @property
    def inter_over_intra(self) -> float:
        """How much dearer a link between nodes is than one within, by their means; 1 where there is only one kind."""
        within = self.cost[self.same_node & ~np.eye(self.world_size, dtype=bool)]
        between = self.cost[~self.same_node]
        return float(between.mean() / within.mean()) if len(within) and len(between) else 1.0

    def _links(self, values: Floats) -> Floats:
        """The values off the diagonal."""
        return values[~np.eye(self.world_size, dtype=bool)]

    def _checked(self, what: str, values: Any) -> Floats:
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
        return array


def _by_node(num_nodes: int, ranks_per_node: int, local: float, intra: float, inter: float) -> Floats:
    node = np.arange(num_nodes * ranks_per_node) // ranks_per_node
    values = np.where(node[:, None] == node[None, :], intra, inter).astype(np.float64)
    np.fill_diagonal(values, local)
    return values


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
        cost, latency = values["cost_s_per_byte"], values.get("latency_s", ())
    else:
        cost, latency = _from_sections(values, num_nodes, ranks_per_node, source)
    return Topology(
        name=str(values.get("name", source)),
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        cost=cost,
        latency_s=latency,
        memory_bytes=_integer(values, "memory_bytes", source) if "memory_bytes" in values else None,
        source=str(values.get("source", "")).strip(),
    )


def _from_sections(values: dict[str, Any], num_nodes: int, ranks_per_node: int, source: str) -> tuple[Floats, Floats]:
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
    return _by_node(num_nodes, ranks_per_node, *seconds_per_byte), _by_node(num_nodes, ranks_per_node, *latency)


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
