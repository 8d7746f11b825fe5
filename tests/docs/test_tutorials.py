"""The tutorials run as they stand there, and print what they show but for the numbers.

Commands run in this process, and alone. Those under torchrun are left to the slow test below and to `test_newcomer`.
"""

import re
import shlex
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rowmesh import SparseBatch
from rowmesh.cli.__main__ import main
from rowmesh.mesh import Mesh
from tests.support.pages import Block, blocks, lacking, shell
from tests.support.ranks import RankPool
from tests.test_examples import JaggedStandIn

TUTORIALS = "docs/tutorials"


def run(page: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Runs all blocks of a page in the current folder; returns what its Python has defined."""
    printed = ""
    for block in blocks(f"{TUTORIALS}/{page}"):
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "text":
            assert lacking(block.text, printed) == [], printed
        else:
            printed = execute(block, scope)
    return scope


def execute(block: Block, scope: dict[str, Any]) -> str:
    """Runs a block of Python, or commands of rowmesh; returns what it printed."""
    with redirect_stdout(StringIO()) as output, redirect_stderr(output):
        if block.language == "python":
            exec(compile(block.text, "tutorial", "exec"), scope)
        for command in block.commands if block.language == "bash" else ():
            if command.startswith("rowmesh ") and "doctor" not in command:
                with pytest.raises(SystemExit) as stop:
                    main(shlex.split(command)[1:])
                assert not stop.value.code, output.getvalue()
    return output.getvalue()


def test_own_csv_and_comparing(tmp_path: Path):
    with chdir(tmp_path):
        run("own_csv.md", {})
        run("compare.md", {})
    assert (tmp_path / "new.csv.scores.parquet").exists()
    assert (tmp_path / "comparison.html").exists()


def own_loop(mesh: Mesh, folder: Path) -> dict[str, torch.Tensor]:
    """The network that the page trains."""
    folder.mkdir(exist_ok=True)
    steps = [Block(block.language, "", block.text) for block in blocks(f"{TUTORIALS}/own_loop.md")]
    printed, scope = "", {}
    with chdir(folder), patch.object(Mesh, "connect", lambda: mesh):  # the ranks have met before
        for block in steps:
            if block.language == "text" and mesh.world_size == 1:
                assert lacking(block.text, printed) == [], printed
                losses, shown = (
                    [float(each) for each in re.findall(r"\d\.\d+", text)] for text in (printed, block.text)
                )
                assert losses == pytest.approx(shown, abs=0.03)
            elif block.language == "python":
                printed = execute(block, scope)
    scope["embeddings"].close()
    return {name: value.clone() for name, value in scope["network"].state_dict().items()}


def test_own_loop_trains_the_same_model_on_two_ranks(ranks: RankPool, tmp_path: Path):
    alone = own_loop(Mesh(), tmp_path / "alone")
    together, _ = ranks.run(own_loop, tmp_path / "together", world_size=2)
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-4)


def test_from_torchrec(tmp_path: Path):
    bags = {"item": [[1], [2, 3]], "user": [[4], []]}
    rows = {"item": 1000, "user": 500}
    config = partial(SimpleNamespace, embedding_dim=16, pooling="SUM")
    scope = {
        "configs": [config(name=name, num_embeddings=num, feature_names=[name]) for name, num in rows.items()],
        "kjt": SparseBatch.from_bags(bags).to_keyed_jagged_tensor(JaggedStandIn),
        "trained": {name: torch.randn(num, 16) for name, num in rows.items()},
        "labels": torch.tensor([1.0, 0.0]),
    }
    with chdir(tmp_path):
        assert run("from_torchrec.md", scope)["side_by_side"].shape == (2, 32)


@pytest.mark.slow
@pytest.mark.timeout(900)  # on machines that are busy with other work
def test_the_commands_for_a_cluster(tmp_path: Path):
    """As they stand there, with as many processes."""
    with chdir(tmp_path):
        for block in blocks(f"{TUTORIALS}/own_csv.md")[:5]:
            if block.file:
                Path(block.file).write_text(block.text)
            else:
                execute(block, {})
    printed = ""
    for block in blocks(f"{TUTORIALS}/cluster.md"):
        if block.language == "text":
            assert lacking(block.text, printed) == [], printed
        else:
            printed = shell(block.text, tmp_path)
    assert (tmp_path / "runs/two_nodes/model").is_dir()
