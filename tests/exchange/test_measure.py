"""Links are measured as the run will read: out of shared memory, or in messages."""

from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.measure import SharedRows, reader_for
from rowmesh.placement.measure import Messages, measure_topology


def measured(mesh, transport, hosts):
    """The reader, the topology, and how many messages of bytes the ranks sent each other meanwhile."""
    mesh = replace(mesh, hosts=hosts)
    sent, send = [], dist.send
    dist.send = lambda tensor, *args, **kwargs: (sent.append(tensor.numel()), send(tensor, *args, **kwargs))[1]
    try:
        reader = reader_for(transport, mesh)
        topology = measure_topology(mesh, reader=reader, repeats=3, sizes=(64, 1 << 12, 1 << 16))
    finally:
        dist.send = send
    return type(reader), topology.cost, topology.latency_s, topology.source, len(sent)


@pytest.mark.parametrize(
    ("transport", "hosts", "reader", "text"),
    [
        ("auto", (0, 0, 0), SharedRows, "one-sided reads of rows of 64 bytes"),
        ("one_sided", (0, 0, 0), SharedRows, "one-sided reads of rows of 64 bytes"),
        ("collective", (0, 0, 0), Messages, "reads in messages"),
        ("auto", (0, 1, 2), Messages, "reads in messages"),
    ],
)
def test_links_are_measured_as_they_are_used(ranks, transport, hosts, reader, text):
    results = ranks.run(measured, transport, hosts, world_size=3)
    for kind, cost, latency, source, num_messages in results:
        assert kind is reader
        assert text in source
        assert (num_messages == 0) == (reader is SharedRows)
        assert np.array_equal(cost, results[0][1])
        assert np.all((cost > 0) & np.isfinite(cost))
        assert np.all(latency >= 0)


def one_sided_across_hosts(mesh):
    with pytest.raises(ConfigurationError, match="'one_sided' cannot work"):
        reader_for("one_sided", replace(mesh, hosts=(0, 1)))


def test_what_cannot_be_used_is_not_measured(ranks):
    ranks.run(one_sided_across_hosts)
