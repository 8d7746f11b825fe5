"""Measures a topology on the ranks of a run: what a read costs over each link, and from a rank's own memory.

Every rank reads from every other as the run would (`Reader`): in messages of the process group, or out of the others'
memory where they share a host's (`rowmesh.exchange.transports.reader_for`). Pairs work at once, in
rounds in which every rank has one partner, rank XOR round: where a node has 2^g ranks, a round is within nodes or
between them for all alike, and links are as busy as in an exchange. The times of a few sizes give the line

    seconds = latency + n · seconds a byte

Source: OPER §3.2 (L, measured once per cluster).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.mesh.shared_memory import SharedBuffer, share
from rowmesh.ops.gather import gather
from rowmesh.placement.topology import Topology

SIZES = (1 << 10, 1 << 16, 1 << 20)
_WARMUP = 2
NOISE = 0.2  # share by which medians of one link differ from run to run on a busy machine
TABLE_BYTES = 64 << 20  # larger than most caches
ROW_BYTES = 64
_LOOKUPS = 1 << 14


class Reader(Protocol):
    """Reads from other ranks, as a transport does.

    Attributes:
        text: how it reads, for the topology's source.
    """

    text: str

    def times(self, partner: int, sizes: Sequence[int], repeats: int) -> list[float]:
        """The median seconds of this rank's reads of each size from its partner, which reads from this rank too."""
        ...


class Messages:
    """Reads in messages of the process group: a request of 8 bytes, then the bytes, each after the other.

    Args:
        mesh: of the run.
    """

    text = "reads in messages"

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def times(self, partner: int, sizes: Sequence[int], repeats: int) -> list[float]:
        """As `Reader` says; the lower rank reads first."""
        mesh = self._mesh
        if mesh.rank < partner:
            seconds = [_read(mesh, partner, size, repeats) for size in sizes]
            for size in sizes:
                _serve(mesh, partner, size, repeats)
            return seconds
        for size in sizes:
            _serve(mesh, partner, size, repeats)
        return [_read(mesh, partner, size, repeats) for size in sizes]


class SharedRows:
    """Reads rows out of the memory of ranks of the same host, as the one-sided transport does.

    Making one is collective and blocking; every rank allocates a table of `TABLE_BYTES`, which goes with the reader.

    Args:
        mesh: ranks of one host.

    Raises:
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """

    text = f"one-sided reads of rows of {ROW_BYTES} bytes,"

    def __init__(self, mesh: Mesh) -> None:
        buffer = SharedBuffer.create(TABLE_BYTES)
        buffer.bytes[:] = 1  # its pages are this rank's
        self._tables = [
            torch.from_numpy(theirs.bytes).view(torch.float32).view(-1, ROW_BYTES // 4)
            for (theirs,) in share(mesh, [buffer])
        ]

    def times(self, partner: int, sizes: Sequence[int], repeats: int) -> list[float]:
        """As `Reader` says; both read at once, as in an exchange."""
        return [lookup_seconds(self._tables[partner], size, repeats) for size in sizes]


def measure_topology(
    mesh: Mesh,
    *,
    reader: Reader | None = None,
    ranks_per_node: int | None = None,
    memory_bytes: int | None = None,
    sizes: Sequence[int] = SIZES,
    repeats: int = 9,
) -> Topology:
    """The topology of a run.

    Every rank must call it; it blocks until all have. A rank sends and receives (or reads) W · `repeats` times the sum
    of `sizes`, under 100 MB for 8 ranks.

    Args:
        mesh: of the run.
        reader: that reads as the run will; messages by default.
        ranks_per_node: G; by default, the ranks that share a host.
        memory_bytes: that a rank has for embeddings, which is not measured.
        sizes: bytes of a read.
        repeats: reads of each size, of which the median counts.

    Returns:
        The same on every rank.

    Raises:
        ConfigurationError: hosts do not have equally many ranks one after another.
        PeerError: a rank died or did not come.

    Example:
        >>> with Mesh.connect() as mesh:
        ...     topology = measure_topology(mesh, repeats=1)
        >>> topology.world_size, topology.cost.shape
        (1, (1, 1))
    """
    G = ranks_per_node or node_size(mesh.hosts)
    if G < 1 or mesh.world_size % G:
        raise ConfigurationError(f"{mesh.world_size} ranks do not make nodes of {G}; give a divisor as ranks_per_node")
    reader = reader or Messages(mesh)
    lines = np.zeros((2, mesh.world_size))  # seconds a byte, latency
    lines[:, mesh.rank] = _local_line()
    try:
        for round_ in range(1, 1 << (mesh.world_size - 1).bit_length()):
            dist.barrier(mesh.group)
            partner = mesh.rank ^ round_
            if partner < mesh.world_size:
                lines[:, partner] = fit_line(sizes, reader.times(partner, sizes, repeats))
        cost, latency = (without_noise(measured, G) for measured in _of_all_ranks(mesh, lines))
    except RuntimeError as error:
        raise mesh.peer_error("measuring links", error) from error
    where = f"measured on {mesh.world_size} ranks of {max(mesh.hosts) + 1} hosts"
    source = f"{where}, {reader.text} of {list(sizes)} bytes"
    return Topology(f"{mesh.world_size // G}x{G}", mesh.world_size // G, G, cost, latency, memory_bytes, source)


def node_size(hosts: Sequence[int]) -> int:
    """G, where every host has G ranks one after another.

    Raises:
        ConfigurationError: hosts differ.

    Example:
        >>> node_size((0, 0, 1, 1))
        2
    """
    G = list(hosts).count(hosts[0])
    if any(hosts[rank] != hosts[rank - rank % G] for rank in range(len(hosts))) or len(hosts) != G * len(set(hosts)):
        raise ConfigurationError(
            f"ranks are on hosts {list(hosts)}; a placement needs equally many on each, one host after another: launch "
            "them so, or give ranks_per_node"
        )
    return G


def without_noise(measured: NDArray[np.float64], ranks_per_node: int) -> NDArray[np.float64]:
    """Links that differ by no more than measuring is exact are made equal, `[W, W]`.

    Both directions of a link get their mean (messages go there and back, so each alone is unknown); then the links
    within nodes, those between nodes, and the look-ups of ranks get the mean of their kind where all are within NOISE
    of it. Otherwise a search would choose by noise.

    Example:
        >>> without_noise(np.array([[1.0, 2.0], [2.1, 1.0]]), ranks_per_node=2).tolist()
        [[1.0, 2.05], [2.05, 1.0]]
    """
    links = (measured + measured.T) / 2
    node = np.arange(len(measured)) // ranks_per_node
    is_own, is_near = np.eye(len(measured), dtype=bool), node[:, None] == node
    for kind in (is_own, is_near & ~is_own, ~is_near):
        if kind.any() and np.abs(links[kind] - (mean := links[kind].mean())).max() <= NOISE * mean:
            links[kind] = mean
    return links


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds a byte and latency, by least squares of relative errors, so that small reads count as much as large.

    Neither is negative: where the line would be, it goes through the origin or is the rate of the largest read.

    Example:
        >>> cost, latency = fit_line([1000, 2000, 4000], [0.003, 0.005, 0.009])
        >>> round(cost, 9), round(latency, 9)
        (2e-06, 0.001)
    """
    n, t = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    cost, latency = np.linalg.lstsq(np.stack([n / t, 1 / t], axis=1), np.ones(len(n)), rcond=None)[0]
    if latency < 0 or cost <= 0 or len(n) < 2:
        return float(t[-1] / n[-1]), 0.0 if latency < 0 else float(t[0])
    return float(cost), float(latency)


def _read(mesh: Mesh, partner: int, size: int, repeats: int) -> float:
    request, values = _bytes(8), _bytes(size)
    seconds = []
    for _ in range(_WARMUP + repeats):
        began = time.perf_counter()
        dist.send(request, group=mesh.group, group_dst=partner)
        dist.recv(values, group=mesh.group, group_src=partner)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[_WARMUP:])


def _serve(mesh: Mesh, partner: int, size: int, repeats: int) -> None:
    request, values = _bytes(8), _bytes(size)
    for _ in range(_WARMUP + repeats):
        dist.recv(request, group=mesh.group, group_src=partner)
        dist.send(values, group=mesh.group, group_dst=partner)


def _bytes(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8, device="cpu")


def lookup_seconds(table: torch.Tensor, num_bytes: int, repeats: int) -> float:
    """The median seconds in which rows all over a table are read, in an order that no cache foresees.

    Args:
        table: float32 `[R, 16]`, rows of ROW_BYTES.
        num_bytes: of all rows together; one row at least.
        repeats: of which the median counts.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    number = max(num_bytes // ROW_BYTES, 1)
    draws = [torch.randint(0, table.shape[0], (number,), generator=generator, device="cpu") for _ in range(_WARMUP + 1)]
    return _median_seconds(lambda turn: gather(table, draws[turn % len(draws)]), repeats)


def _median_seconds(function: Callable[[int], object], repeats: int) -> float:
    seconds = []
    for turn in range(_WARMUP + repeats):
        began = time.perf_counter()
        function(turn)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[_WARMUP:])


def _local_line() -> tuple[float, float]:
    """Seconds a byte, and of a call, of a rank's own look-ups: rows of 64 bytes all over a table."""
    table = torch.zeros(TABLE_BYTES // ROW_BYTES, ROW_BYTES // 4, device="cpu")
    sizes = (ROW_BYTES * _LOOKUPS // 16, ROW_BYTES * _LOOKUPS)
    return fit_line(sizes, [lookup_seconds(table, size, repeats=7) for size in sizes])


def _of_all_ranks(mesh: Mesh, lines: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The lines of all ranks: cost and latency, `[W, W]` each."""
    if mesh.world_size == 1:
        return lines[0:1], lines[1:2]
    mine = torch.from_numpy(lines)
    all_lines = [torch.empty_like(mine) for _ in range(mesh.world_size)]
    dist.all_gather(all_lines, mine, group=mesh.group)
    stacked = torch.stack(all_lines).numpy()
    return stacked[:, 0], stacked[:, 1]
