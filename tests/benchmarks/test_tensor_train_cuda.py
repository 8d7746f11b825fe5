"""What `tensor_train --device cuda` times computes the same; nothing here is timed."""

import argparse
import json

import pytest
import torch

from benchmarks import tensor_train, tensor_train_cuda
from benchmarks.command import Report
from benchmarks.tensor_train import Case
from rowmesh.ops.tensor_train import reference

CASE = Case(num_rows=27, dim=8, rank=3, batch=16)
OPTIONS = argparse.Namespace(rank=[3], precision="highest")
IDS = torch.randint(27, (16,), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def ids(device):
    pytest.importorskip("triton")
    return IDS.to(device)


@pytest.fixture
def grad(device):
    return torch.randn(CASE.batch, CASE.dim, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.triton
def test_every_level_finds_the_rows_and_ends_with_the_same_cores(ids, grad):
    expected = [core.detach().clone().requires_grad_() for core in CASE.make_bag().cores]
    rows = reference.rows(expected, ids.cpu())
    rows.backward(grad.cpu())
    for level in tensor_train_cuda.LEVELS.values():
        table = tensor_train_cuda.DeviceTable(CASE, level, grad)
        torch.testing.assert_close(table.look_up(ids).cpu(), rows.detach())
        table.train(ids)
        for mine, core in zip(table.cores, expected, strict=True):
            torch.testing.assert_close(mine.cpu(), core.detach() - tensor_train_cuda.LR * core.grad)


def one_call(functions, batches, options):
    for function in functions.values():
        function(batches[0])
    return {name: {"step_ms": 1.0} for name in functions}


@pytest.mark.triton
def test_every_contestant_and_arrangement_is_reported(device, ids, capsys, monkeypatch):
    monkeypatch.setattr(tensor_train_cuda, "measure", one_call)
    report = Report("tensor_train", None)
    tensor_train_cuda.run_case(report, CASE, [ids], OPTIONS, device)
    tensor_train_cuda.run_ablation(report, CASE, {"drawn": [ids]}, OPTIONS, device)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [line["contestant"] for line in lines if "contestant" in line and line["kind"] == "train"]
    assert names == ["rowmesh", "plain_torch", "plain_torch_unique", "embedding_bag"]
    names = [line["arrangement"] for line in lines if "arrangement" in line and line["kind"] == "train"]
    assert names == list(tensor_train_cuda.LEVELS)


@pytest.mark.triton
def test_wrong_rows_are_not_timed(device, ids, grad, monkeypatch):
    monkeypatch.setattr(tensor_train_cuda.DeviceTable, "look_up", lambda table, ids: torch.zeros_like(grad))
    with pytest.raises(AssertionError, match="rows are wrong by 1"):
        tensor_train_cuda.contestants(CASE, ids, OPTIONS, device)


def test_says_in_one_line_that_there_is_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tensor_train.main(["--device", "cuda"])
    (line,) = capsys.readouterr().out.splitlines()
    assert "finds no CUDA device" in json.loads(line)["unavailable"]
