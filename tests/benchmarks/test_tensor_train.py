"""The contestants of `tensor_train` compute the same; nothing here is timed."""

import json

import pytest
import torch

from benchmarks import tensor_train, tensor_train_ablation, tensor_train_orders
from benchmarks.peers.tensor_train import PlainTorch, make
from benchmarks.tensor_train import Case
from rowmesh.ops.tensor_train.reference import rows

CASE = Case(num_rows=3000, dim=16, rank=16, batch=64)
IDS = torch.randint(3000, (64,), generator=torch.Generator().manual_seed(0)).repeat(3)


@pytest.mark.parametrize("unique", [False, True])
def test_the_plain_peer_is_a_tensor_train(unique):
    peer = PlainTorch([13, 14, 17], [2, 2, 4], 3, unique)
    shapes = [(13, 2, 3), (14, 3, 2, 3), (17, 3, 4)]
    first, second, third = (core.view(shape) for core, shape in zip(peer.cores, shapes, strict=True))
    torch.testing.assert_close(peer(IDS), rows((first, second, third.transpose(1, 2)), IDS))


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # of its own
def test_tensorly_has_the_same_cores():
    pytest.importorskip("tltorch")
    forward, cores = make("tensorly_torch", [13, 14, 17], [2, 2, 4], 3, 3000, "")
    assert [tuple(core.shape) for core in cores] == [(1, 13, 2, 3), (3, 14, 2, 3), (3, 17, 4, 1)]
    first, second, third = cores
    mine = (first[0], second.permute(1, 0, 2, 3), third[..., 0].permute(1, 2, 0))
    torch.testing.assert_close(forward(IDS), rows(mine, IDS))


def test_the_table_itself_is_a_peer():
    forward, (weight,) = make("embedding_bag", [1, 1, 1], [2, 2, 4], 1, 3000, "")
    assert torch.equal(forward(IDS), weight[IDS])


@pytest.mark.parametrize("name", tensor_train_ablation.LEVELS)
def test_every_arrangement_finds_the_same_rows(name):
    whole = tensor_train_ablation.make_bag(CASE, tensor_train_ablation.Shared)
    bag = tensor_train_ablation.make_bag(CASE, tensor_train_ablation.LEVELS[name])
    torch.testing.assert_close(bag(IDS.view(-1, 1)), whole(IDS.view(-1, 1)))


@pytest.mark.parametrize("name", tensor_train_ablation.LEVELS)
def test_a_forward_is_arranged_as_it_is_called(name, monkeypatch):
    """Else all would be measured alike."""
    level, found = tensor_train_ablation.LEVELS[name], []
    look_up = tensor_train_ablation.AblatedBag._look_up_bags

    def noted(*arguments):
        bags, lookup = look_up(*arguments)
        found.append(lookup.prefixes)
        return bags, lookup

    monkeypatch.setattr(tensor_train_ablation.AblatedBag, "_look_up_bags", noted)
    tensor_train_ablation.make_bag(CASE, level)(IDS.view(-1, 1))
    (prefixes,) = found
    assert isinstance(prefixes, level)
    assert (prefixes.num_unique < IDS.numel()) == level.distinct
    assert (prefixes.num_prefixes < prefixes.num_unique) == level.shared


def test_every_way_of_training_ends_with_the_same_cores():
    grad = torch.randn(IDS.numel(), CASE.dim, generator=torch.Generator().manual_seed(1))
    results = []
    for bag, step in tensor_train_ablation.trainers(CASE, grad).values():
        step(IDS)
        results.append(list(bag.cores))
    for cores in results[1:]:
        torch.testing.assert_close(cores, results[0])


@pytest.mark.parametrize("extra", [[], ["--ablation"]])
def test_every_contestant_is_reported(extra, capsys, monkeypatch):
    reordered = []
    monkeypatch.setattr(tensor_train_orders, "run", lambda *arguments: reordered.append(arguments))
    tensor_train.main(["--quick", "--rows", "3000", "--steps", "1", "--repeats", "1", *extra])
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line["step_ms"] > 0 for line in lines)
    forward = {line.get("contestant", line.get("arrangement")) for line in lines if line["kind"] == "forward"}
    if extra:
        assert forward == set(tensor_train_ablation.LEVELS)
    else:
        assert forward == {"rowmesh", "plain_torch", "plain_torch_unique", "embedding_bag"}
    assert len(last["summary"]) == (len(lines) if extra else 4)
    assert len(reordered) == len(extra)
