"""Every example runs on one rank and on two, learns, and has the same network on both; pages name what exists."""

import re
import runpy
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import rowmesh
import rowmesh.placement
from rowmesh import SparseBatch
from rowmesh.mesh import Mesh
from rowmesh.models import DLRM
from rowmesh.run.metrics import Predictions
from tests.support.ranks import RankPool

EXAMPLES = Path(__file__).parents[1] / "examples"
PAGE = EXAMPLES.parent / "docs" / "from_torchrec.md"
NAMES = sorted({path.stem for path in EXAMPLES.glob("*.py")} - {"demo"})  # tests/test_demo.py runs that
Weights = dict[str, torch.Tensor]


def run(mesh: Mesh, name: str, arguments: Sequence[str] = ()) -> tuple[Weights, str]:
    """The weights of the network that a script trains, and what it prints."""
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    with patch.object(Mesh, "connect", lambda: mesh), redirect_stdout(StringIO()) as output:  # the ranks met before
        network = main(arguments)
    return {key: value.clone() for key, value in network.state_dict().items()}, output.getvalue()


def number(label: str, output: str) -> float:
    """The last number behind a word that was printed."""
    return float(re.findall(rf"{label} ([0-9.]+)", output)[-1])


@pytest.mark.parametrize("name", NAMES)
def test_a_script_learns_the_same_on_one_rank_and_on_two(ranks: RankPool, name: str):
    """Both train on the same samples; the two have bitwise the same network."""
    alone, output = run(Mesh(), name)
    (first, printed), (second, nothing) = ranks.run(run, name, world_size=2)
    assert all(first[key].equal(second[key]) for key in first)
    assert nothing == ""
    for text in (output, printed):
        assert re.search(r"loss [0-9.]+ on rank 0, [0-9,]+ samples/s", text), text
        assert number("AUC", text) > 0.6, text
    if name != "two_towers":  # whose negatives are the other samples of the same rank
        torch.testing.assert_close(first, alone, rtol=1e-3, atol=1e-4)
        assert number("AUC", printed) == pytest.approx(number("AUC", output), abs=1e-3)


def test_a_model_saved_on_two_ranks_goes_on_on_one(ranks: RankPool, tmp_path: Path):
    """As one rank that was not interrupted trains it."""
    folder = str(tmp_path / "model")
    ranks.run(run, "ddp_loop", ("--steps", "3", "--save", folder), world_size=2)
    resumed, output = run(Mesh(), "ddp_loop", ("--steps", "2", "--load", folder))
    assert "after step 5" in output
    whole, _ = run(Mesh(), "ddp_loop", ("--steps", "5"))
    torch.testing.assert_close(resumed, whole, rtol=1e-4, atol=1e-5)


def test_the_code_on_the_page_for_users_of_torchrec_runs(tmp_path: Path):
    """Row after row, in one scope; a cell's lines are divided by <br>."""
    cells = [
        line.split(" | ")[-1].removesuffix(" |") for line in PAGE.read_text().splitlines() if line.startswith("| ")
    ]
    lines = [line for cell in cells for line in re.findall(r"`([^`]+)`(?:<br>|$)", cell) if cell.startswith("`")]
    assert len(lines) > 50
    scope: dict[str, Any] = dict(vars(rowmesh.placement)) | {name: getattr(rowmesh, name) for name in rowmesh.__all__}
    scope |= {"rowmesh": rowmesh, "torch": torch, "mesh": Mesh(), "folder": tmp_path, "DLRM": DLRM}
    scope |= {"Predictions": Predictions, "ids": torch.tensor([[1, 2, 3]]), "position_weight": torch.ones(4)}
    sizes = {"num_embeddings": 50, "embedding_dim": 16}
    scope["config"] = SimpleNamespace(name="user", feature_names=["user"], pooling="SUM", **sizes)
    scope["sequence_config"] = SimpleNamespace(name="bought", feature_names=["bought"], **sizes)
    bags = {"item": [[1], [2, 3]], "user": [[4], []], "clicked": [[1, 2, 3], [4]], "bought": [[], [7, 7]]}
    scope["kjt"] = SparseBatch.from_bags(bags).to_keyed_jagged_tensor(JaggedStandIn)
    for line in lines:
        exec(line, scope)
    assert scope["vectors"].stacked().shape == (2, 2, 16)
    assert scope["bags"].shape == (2, 16)
    assert scope["dense_rows"].shape == (2, 50, 16)
    assert scope["table_wise"].ranges[0].owner(5, world_size=2) == 0


class JaggedStandIn:
    """What a KeyedJaggedTensor has that rowmesh reads."""

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, lambda value=value: value)
        self.weights_or_none = self.weights  # pyright: ignore[reportAttributeAccessIssue]
