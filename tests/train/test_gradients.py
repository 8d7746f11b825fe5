import pytest
import torch
from torch import nn

from rowmesh.mesh import Mesh
from rowmesh.train import gradients as module
from rowmesh.train.gradients import SharedGradients


def test_gradients_are_views_and_parameters_stay():
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    before = [parameter.detach().clone() for parameter in network.parameters()]
    gradients = SharedGradients(network, Mesh())
    assert all(old.equal(new) for old, new in zip(before, network.parameters(), strict=True))
    x = torch.randn(5, 3)
    for _ in range(2):  # the second time finds what the first left, unless it is cleared
        gradients.zero()
        network(x).sum().backward()
        gradients.average()
    actual = [parameter.grad.clone() for parameter in network.parameters()]
    expected = torch.autograd.grad(network(x).sum(), list(network.parameters()))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def average(mesh, backend):
    torch.manual_seed(mesh.rank)
    network = nn.Linear(2, 1)
    group = module.device_group
    module.device_group = lambda *of: (group(*of)[0], backend, "")
    try:
        gradients = SharedGradients(network, mesh)
    finally:
        module.device_group = group
    gradients.zero()
    network(torch.full((1, 2), float(mesh.rank))).sum().backward()
    gradients.average()
    return [parameter.grad.tolist() for parameter in network.parameters()]


def test_averages_are_the_same_whether_the_host_waits(ranks):
    assert ranks.run(average, "gloo") == ranks.run(average, "nccl") == [[[[0.5, 0.5]], [1.0]]] * 2


def test_nccl_is_waited_for_without_a_timeout(monkeypatch):
    """With one, NCCL ends its connections when it is over."""
    waited = []

    class Work:
        def wait(self):
            waited.append(True)

    monkeypatch.setattr(module, "device_group", lambda *of: (object(), "nccl", ""))
    monkeypatch.setattr(module.dist, "broadcast", lambda *of, **options: Work())
    monkeypatch.setattr(module.dist, "all_reduce", lambda *of, **options: Work())
    SharedGradients(nn.Linear(2, 1), Mesh(world_size=2, group=object())).average()
    assert waited == [True, True]


def averaged(mesh, transport, count):
    torch.manual_seed(0)
    network = nn.Linear(count, 1)
    gradients = SharedGradients(network, mesh, transport)
    means = []
    for step in range(3):
        gradients.zero()
        generator = torch.Generator().manual_seed(10 * step + mesh.rank)
        network(torch.randn(2, count, generator=generator) * 10.0**mesh.rank).sum().backward()
        gradients.average()
        means.append(network.weight.grad.flatten().clone())
    return torch.stack(means).tolist()


@pytest.mark.parametrize(("world_size", "count"), [(2, 5), (3, 70_000)])
def test_gradients_are_added_in_the_order_of_the_ranks(ranks, world_size, count):
    """The second is long enough to be added in parts."""
    generators = [[torch.Generator().manual_seed(10 * step + rank) for rank in range(world_size)] for step in range(3)]
    expected = []
    for step in generators:
        total = torch.zeros(count)
        for rank, generator in enumerate(step):
            total = total + (torch.randn(2, count, generator=generator) * 10.0**rank).sum(0)
        expected.append(total / world_size)
    for transport in ("one_sided", "collective"):
        for rank in ranks.run(averaged, transport, count, world_size=world_size):
            assert torch.tensor(rank).equal(torch.stack(expected))
