"""What ranks choose together."""

import importlib

import pytest
import torch
from torch import nn

from rowmesh import FastLinear, fast_linear
from rowmesh.ops.linear import ALL, NONE, Choices, Measured, cpu

module = importlib.import_module("rowmesh.models.linear_layers")
pytestmark = pytest.mark.skipif(cpu.obstacle() is not None, reason=str(cpu.obstacle()))
FASTER, SLOWER = ((2.0, 1.0), (2.0, 1.0), (2.0, 1.0)), ((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def on_rank(mesh, first, others, obstacle):
    """Choices, reason and logits of a rank that measures and has what it is told."""
    times = first if mesh.rank == 0 else others
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "obstacle", lambda: obstacle if mesh.rank == 1 else None)
        patch.setattr(
            module,
            "measure",
            lambda shapes, samples, varies: Measured(dict(zip(shapes, times, strict=True)), samples, False),
        )
        fast = fast_linear(network(), 64, mesh=mesh)
    with fast():
        logits = network()(torch.ones(4, 6))
    return fast.choices.to_plain(), fast.reason, logits.tolist()


def test_all_ranks_choose_what_rank_0_measured(ranks):
    one, other = ranks.run(on_rank, (FASTER, SLOWER), (SLOWER, FASTER), None)
    assert one == other
    assert Choices.from_plain(one[0]).passes == {(8, 6): ALL, (1, 8): NONE}
    assert one[1] == (
        "by oneDNN in 3 of 6 products, by torch in the others: 1.5 times as fast as torch alone, as measured with 64 "
        "samples"
    )


def test_one_rank_without_it_is_enough(ranks):
    for choices, reason, _ in ranks.run(on_rank, (FASTER, FASTER), (FASTER, FASTER), "torch 9 has no operator for it"):
        assert (choices, reason) == ([], "by torch: torch 9 has no operator for it")


def test_without_a_gain_it_is_torch(monkeypatch):
    monkeypatch.setattr(
        module, "measure", lambda shapes, samples, varies: Measured(dict.fromkeys(shapes, SLOWER), 64, True)
    )
    fast = fast_linear(network(), 100)
    assert not fast.choices
    assert fast.reason == "by torch: oneDNN is not faster here, as measured before with 64 samples"


def test_it_is_said_that_samples_vary(monkeypatch):
    asked = []

    def measure(shapes, samples, varies):
        asked.append(varies)
        return Measured(dict.fromkeys(shapes, FASTER), 4096, False, varies)

    monkeypatch.setattr(module, "measure", measure)
    fast = fast_linear(network(), 10_000, varies=True)
    assert asked == [True]
    assert fast.reason.endswith("as measured with 4,096 samples or some fewer, another number each time")


def test_what_is_asked_for_is_not_measured(monkeypatch):
    monkeypatch.setattr(module, "measure", None)
    assert not fast_linear(network(), 64, use="torch").choices
    assert fast_linear(network(), 64, use="onednn").choices == Choices.everything([(8, 6), (1, 8)])
    assert "none in float32 on a CPU" in fast_linear(network().double(), 64).reason
    assert "none in float32 on a CPU" in fast_linear(nn.ReLU(), 64).reason


def test_choices_are_saved():
    fast = fast_linear(network(), 64, use="onednn")
    loaded = FastLinear(Choices(), "")
    loaded.load_state_dict(fast.state_dict())
    assert loaded.choices == fast.choices
    assert loaded.reason == "as in the training of the model"
