"""The choice of a transport between devices, and why."""

import pytest
import torch

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.device import choice as module
from rowmesh.exchange.device.choice import choose_device_transport
from rowmesh.mesh import Mesh

TWO, CPU = Mesh(world_size=2, hosts=(0, 0), pids=(1, 2)), torch.device("cpu")


class Fake:
    """A transport that needs no ranks."""

    def __init__(self, *arguments):
        self.name, self.reason = "collective", "nccl between devices: each of 2 ranks has a GPU of its own"


@pytest.fixture
def found(monkeypatch):
    """Sets the obstacle that is found."""
    monkeypatch.setattr(module, "DeviceCollective", Fake)
    return lambda obstacle: monkeypatch.setattr(module, "find_obstacle", lambda mesh, device: obstacle)


@pytest.mark.parametrize(
    ("name", "chosen", "end"),
    [
        ("one_sided", "one_sided", "asked for; kernels are interpreted on CPUs of one host"),
        ("collective", "collective", "each of 2 ranks has a GPU of its own"),
        ("auto", "collective", "not one_sided: it has not run on GPUs yet, and is taken where it is asked for"),
    ],
)
def test_one_sided_is_taken_where_it_is_asked_for(found, name, chosen, end):
    found(None)
    transport = choose_device_transport(name, TWO, CPU)
    assert transport.name == chosen
    assert transport.reason.endswith(end)


def test_one_sided_is_refused_where_it_cannot_be(found):
    found("ranks 0 and 1 share a GPU")
    pattern = "'one_sided' cannot work between devices: ranks 0 and 1 share a GPU; use 'collective' or 'auto'"
    with pytest.raises(ConfigurationError, match=pattern):
        choose_device_transport("one_sided", TWO, CPU)
