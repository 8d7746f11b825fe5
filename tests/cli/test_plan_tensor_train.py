"""`rowmesh plan` and tensor-train tables: what cores would save and cost, and plans beside them."""

import re

import pytest
import torch

from rowmesh.cli.plan_tensor_train import compressions
from rowmesh.data import Loader, Prepared
from rowmesh.placement import Plan
from rowmesh.placement.request import Request
from rowmesh.run.resolve import resolve
from rowmesh.run.tasks import task_of
from rowmesh.tables import TensorTrain

ADAGRAD = "tables.tensor_train.optimizer.name=adagrad"


def test_it_says_what_cores_save_and_cost(run):
    out = run("--ranks", 2, "--tensor-train", "2,4", "tables.tensor_train.min_rows=1000000", "tables.C1.storage=dense")
    assert "tensor-train: no table has 1,000,000 rows or more" in out
    out = run("--ranks", 2, "--tensor-train", "2,4", "tables.tensor_train.min_rows=1", ADAGRAD)
    heads = re.search(r"^ *tensor-train +rows +dense, all ranks +distinct ids +rank 2: cores", out, re.MULTILINE)
    assert heads, out
    lines = {line.split()[0]: line for line in out.splitlines() if line.count(" ms") == 2}
    assert set(lines) == {"C1", "C2", "C3", "all"}
    assert len(re.findall(r" ×", lines["all"])) == 2
    assert re.search(r"ranks add up gradients of [\d.,]+ \w+ at rank 2, [\d.,]+ \w+ at rank 4", " ".join(out.split()))


@pytest.mark.parametrize(("rule", "states"), [pytest.param("adagrad", 1, marks=pytest.mark.slow), ("adam", 2)])
@pytest.mark.parametrize("storage", ["dense", "tensor_train"])
def test_numbers_are_those_of_training(config_file, rule, states, storage):
    """Rows with the state of the optimizer of rows, cores with that of cores, distinct ids as batches have them."""
    overrides = [f"tables.tensor_train.optimizer.name={rule}", "tables.tensor_train.min_rows=1"]
    config = resolve(config_file, [*overrides, f"tables.storage={storage}"])
    data = Prepared.open(config.data.folder)
    for table in compressions(task_of(config, data)[0], Request(batch_size=400), 2, (2, 999)):
        batches = Loader(data, "train", batch_size=400, shuffle=True)
        distinct = [len(torch.unique(batch.sparse.select([table.table]).ids)) for batch in batches]
        assert table.num_distinct == pytest.approx(sum(distinct) / len(distinct), rel=0.1)
        assert table.rows_bytes == table.num_rows * (16 * 4 + 4)
        for rank, found in zip((2, 999), table.by_rank, strict=True):
            full = TensorTrain().shape(table.num_rows, 16).full_ranks
            shape = TensorTrain(rank=(min(rank, full[0]), min(rank, full[1]))).shape(table.num_rows, 16)
            assert found.gradient_bytes == 4 * shape.num_parameters
            assert found.cores_bytes == found.gradient_bytes * (1 + states)
            assert 0 < found.step_s < 10


def test_plans_leave_cores_out(run, tmp_path):
    path = tmp_path / "plan.json"
    out = run("--ranks", 4, "--out", path, "tables.C1.storage=tensor_train", ADAGRAD)
    assert re.search(r"^cores     [\d.,]+ \w+ of cores .* of 1 tensor-train table\(s\), .*: C1$", out, re.MULTILINE)
    assert [table.name for table in Plan.load(path).tables] == ["C2", "C3"]


def test_nothing_to_place(run, tmp_path):
    out = run("--ranks", 4, "tables.storage=tensor_train", ADAGRAD, "--replicas", "auto")
    assert "there is nothing to place, and no plan to write" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor-train", "0"], "--tensor-train: '0' are no ranks; write 16 or 16,32,64"),
        (
            ["tables.storage=tensor_train", ADAGRAD, "--memory", "1kB"],
            r"--memory 1kB does not hold the [\d,]+ bytes of tensor-train cores",
        ),
    ],
)
def test_mistakes(run, arguments, message):
    assert re.search(message, run("--ranks", 2, *arguments, status=2))
