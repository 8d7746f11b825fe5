"""What the benchmark of a step on a GPU does without one: it says so; and its contestants train the same rows."""

import json

import pytest
import torch

from benchmarks import gpu_step
from tests.support.triton import find_obstacle


def test_says_that_there_is_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    gpu_step.main(["--quick"])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["unavailable"].startswith(f"torch {torch.__version__} finds no CUDA device")


@pytest.mark.triton
def test_contestants_train_the_same_rows(device):
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    from benchmarks import gpu_step_cases as cases

    sizes = cases.Sizes(rows=20, dim=3, batch=8, num_batches=2)
    cases.check(sizes, device)
    inputs = cases.draw(sizes, device)
    for tables in (None, cases.Rowmesh(sizes, "cuda"), cases.EmbeddingBags(sizes, device)):
        cases.dense_step(sizes, inputs, device, tables)(0)
    step = cases.PipelinedStep(sizes, inputs, device, cases.Rowmesh(sizes, "cuda"))
    step(0)
    step.close()
    assert cases.floor_bytes(sizes, inputs) > 26 * 8 * (8 + 2 * 12)
