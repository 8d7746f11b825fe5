"""What of training goes through CUDA graphs, with something in their place that a CPU can run."""

import json

import pytest
import torch
from torch import nn

from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.models import DLRM
from rowmesh.run import graphs as module
from rowmesh.run import phases
from rowmesh.run.commands import run_training
from rowmesh.run.graphs import GraphedNetwork
from rowmesh.run.resolve import resolve


class Recorded:
    """As a graphed network is: inputs are copied, and what comes out lies in memory that the next replay overwrites."""

    def __init__(self, whole, samples):
        self.whole, self.samples, self.replays = whole, samples, 0
        self.gradients = [torch.empty_like(each) for each in (samples[1], *whole.parameters())]
        self.logits = whole(*samples).detach()

    def __call__(self, dense, vectors):
        assert (dense.requires_grad, vectors.requires_grad) == (False, True)
        return Replay.apply(self, dense, vectors, *self.whole.parameters())


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, recorded, dense, vectors, *parameters):
        ctx.recorded = recorded
        recorded.replays += 1
        for gradient in recorded.gradients:
            gradient.fill_(torch.nan)  # those of the last batch are gone
        with torch.no_grad():
            for sample, given in zip(recorded.samples, (dense, vectors), strict=True):
                sample.copy_(given)
        recorded.logits.copy_(recorded.whole(*recorded.samples).detach())
        return recorded.logits.detach()

    @staticmethod
    def backward(ctx, *grad_outputs):
        recorded = ctx.recorded
        with torch.enable_grad():
            logits = recorded.whole(*recorded.samples)
        found = torch.autograd.grad(logits, [recorded.samples[1], *recorded.whole.parameters()], grad_outputs)
        for gradient, value in zip(recorded.gradients, found, strict=True):
            gradient.copy_(value)
        vectors, *parameters = (gradient.detach() for gradient in recorded.gradients)
        return None, None, vectors, *parameters


def make(num_dense=3):
    torch.manual_seed(0)
    return DLRM(num_dense=num_dense, num_features=2, dim=4, bottom=[5], top=[6])


def batch(size, num_dense=3):
    return torch.randn(size, num_dense), torch.randn(size, 2, 4, requires_grad=True)


@pytest.mark.parametrize("num_dense", [3, 0])
def test_only_batches_of_the_first_size_with_gradients_are_replayed(num_dense):
    network, made = make(num_dense), []
    graphed = GraphedNetwork(network, lambda *what: made.append(Recorded(*what)) or made[-1])
    for size in (0, 5, 5, 2, 5):
        dense, vectors = batch(size, num_dense)
        logits = graphed(dense, vectors)
        assert torch.equal(logits, network(dense, vectors))
        gradients = torch.autograd.grad(logits.sum(), [vectors, *network.parameters()])
        expected = torch.autograd.grad(network(dense, vectors).sum(), [vectors, *network.parameters()])
        for mine, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
    with torch.no_grad():
        graphed(*batch(5, num_dense))
    ((recorded,),) = [made]
    assert recorded.replays == 3
    assert len(recorded.samples[0]) == 5


def test_the_networks_own_forward_stays():
    """Torch gives the module that it records another one."""

    def record(whole, samples):
        whole.forward = lambda *_: torch.zeros(5)
        return whole

    network = make()
    graphed = GraphedNetwork(network, record)
    assert not graphed(*batch(5)).any()
    assert network(*batch(5)).any()
    assert graphed(*batch(4)).any()


def test_networks_that_cannot_be_recorded_are_named():
    def fail(whole, samples):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RowmeshError, match=r"cannot be recorded as CUDA graphs, set train\.cuda_graphs=off: operation"):
        GraphedNetwork(nn.Linear(1, 1), fail)(*batch(5))


def test_a_run_with_graphs_is_the_run_without(config_file, tmp_path, monkeypatch):
    """The last batch of an epoch is another one's size; evaluations come in between."""
    made = []
    monkeypatch.setattr(phases, "check_device", lambda config: None)
    monkeypatch.setattr(
        module.torch.cuda, "make_graphed_callables", lambda *what: made.append(Recorded(*what)) or made[-1]
    )
    lines = []
    for graphs in ("off", "on"):
        folder = tmp_path / graphs
        options = [f"run.folder={folder}", f"train.cuda_graphs={graphs}", "train.eval_every=6", "train.log_every=1"]
        run_training(resolve(config_file, options))
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines.append([(line["step"], line.get("loss"), line.get("log_loss")) for line in records])
    assert lines[0] == lines[1]
    assert [recorded.replays for recorded in made] == [14]  # of 16 steps


@pytest.mark.parametrize(
    ("options", "has_gpu", "message"),
    [
        ([], False, "needs train.device=cuda: it records what a GPU does"),
        (["train.device=cuda"], False, r"needs a GPU, and torch\.cuda\.is_available\(\) is false"),
        (["train.device=cuda", "pipeline.depth=1"], True, "cannot be combined with a pipeline, whose threads"),
        (["train.device=cuda", "tables.C1.storage=tiered"], True, "cannot be combined with tiered tables"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_a_run_begins(config_file, monkeypatch, options, has_gpu, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(ConfigurationError, match=rf"train\.cuda_graphs=on {message}.*or set train\.cuda_graphs=off"):
        run_training(resolve(config_file, ["train.cuda_graphs=on", *options]))
