import pytest
import torch
from torch import nn

from rowmesh.errors import RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.run import gradients as module
from rowmesh.run.gradients import SharedGradients


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


def deep(width):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(5)))


def averaged_early(mesh, transport, is_early, has_samples):
    """Gradients of three steps, of a network whose third layer is frozen and whose fourth gets none in the second."""
    network = deep(7)
    network[2].requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BUCKET_BYTES", 300)
        gradients = SharedGradients(network, mesh, transport)
    means = []
    for step in range(3):
        gradients.zero()
        if is_early:
            gradients.sends_early()
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
        if has_samples[mesh.rank]:
            layers = [layer for number, layer in enumerate(network) if (number, step) != (3, 1)]
            nn.Sequential(*layers)(x).pow(2).sum().backward()
        gradients.average()
        means += [parameter.grad.flatten().clone() for parameter in network.parameters() if parameter.requires_grad]
    return torch.cat(means).tolist()


@pytest.mark.parametrize("has_samples", [(True, True, True), (True, False, True)])
def test_sending_early_changes_no_bit(ranks, has_samples):
    """Nor does a rank without samples, which sends everything at the end."""
    runs = [
        ranks.run(averaged_early, transport, is_early, has_samples, world_size=3)
        for transport, is_early in (("one_sided", False), ("collective", False), ("collective", True))
    ]
    assert all(rank == runs[0][0] for run in runs for rank in run)
    assert any(runs[0][0])


def order_of_sending(mesh):
    """Which buckets were sent when the backward was over, and when the gradients were averaged."""
    network, sent = deep(7), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BUCKET_BYTES", 300)
        gradients = SharedGradients(network, mesh)
    buckets = gradients._buckets
    assert buckets is not None
    post = buckets._sums.post
    buckets._sums.post = lambda bucket, vector: (sent.append(bucket), post(bucket, vector))[1]
    gradients.sends_early()
    network(torch.ones(1, 7)).sum().backward()
    after_backward = list(sent)
    gradients.average()
    network(torch.ones(1, 7)).sum().backward()
    return after_backward, sent


def test_buckets_are_sent_in_the_backward_the_last_first(ranks):
    for after_backward, in_all in ranks.run(order_of_sending):
        assert after_backward == in_all == list(range(max(in_all), -1, -1))
        assert len(in_all) > 2


def gradients_twice(mesh):
    network = deep(7)
    gradients = SharedGradients(network, mesh)
    gradients.sends_early()
    network(torch.ones(1, 7)).sum().backward()
    with pytest.raises(RowmeshError, match="got a gradient twice in one backward"):
        network(torch.ones(1, 7)).sum().backward()
    gradients.average()


def test_a_gradient_that_comes_after_it_was_sent_is_refused(ranks):
    ranks.run(gradients_twice)
