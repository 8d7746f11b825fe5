"""Readers of transports: what a read costs as the run will do it, for `rowmesh.placement.measure`.

Source: OPER §3.2 (L), §5.2 (one look-up for local and remote rows).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rowmesh.exchange.choice import TransportName, transport_for
from rowmesh.mesh import Mesh
from rowmesh.mesh.shared_memory import SharedBuffer, share
from rowmesh.placement.measure import ROW_BYTES, TABLE_BYTES, Messages, Reader, lookup_seconds


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


def reader_for(transport: TransportName, mesh: Mesh) -> Reader:
    """What reads as a run on a mesh would, given the transport that it is configured with.

    Collective and blocking where ranks share memory.

    Raises:
        ConfigurationError: as `transport_for`.
    """
    name, _ = transport_for(transport, mesh)
    return SharedRows(mesh) if name == "one_sided" else Messages(mesh)
