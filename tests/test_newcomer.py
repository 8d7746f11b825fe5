"""The way of a newcomer, with real processes in a fresh clone of what is committed: `make newcomer`, in two minutes.

The clone uses the interpreter of these tests, which saves the installation; kernels are compiled anew.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT, blocks, lacking, shell

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # on machines that are busy with other work
    pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs a git checkout"),
]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer") / "rowmesh"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), folder], check=True)
    return folder


def run(clone: Path, script: str) -> str:
    return shell(script, clone, PYTHONPATH=str(clone))


def test_from_a_clone_to_scores(clone: Path):
    """`make train` on little data; a CSV as in the tutorial, on one rank and two; a model of one's own."""
    settings = "data.batch_size=512 schedule.warmup_steps=0 tables.dim=4 model.bottom=[16] model.top=[16]"
    variables = f'PYTHON="{sys.executable}" SAMPLES=20000 HELD_OUT=5000 ARGS="{settings}"'
    printed = run(clone, f"{variables} bash configs/train.sh")
    assert "planted optimum" in printed
    assert (clone / "runs/make_train/report.html").exists()

    printed = ""
    for block in blocks("docs/tutorials/own_csv.md"):
        if block.file:
            (clone / block.file).write_text(block.text)
        elif block.language == "text":
            assert lacking(block.text, printed) == [], printed
        elif block.language == "bash":
            printed = run(clone, block.text)
        elif "load_run" not in block.text:  # test_tutorials runs that; here it would import torch again
            (clone / "block.py").write_text(block.text)
            run(clone, f'"{sys.executable}" block.py')
    assert (clone / "new.csv.scores.parquet").exists()

    code = next(block.text for block in blocks("docs/own_model.md") if block.language == "python")
    (clone / "two_towers.py").write_text(code)
    own = 'model.name=two_towers:TwoTowers \'model.options={left = ["user", "hour"]}\' run.folder=runs/own'
    (clone / "own.toml").write_text('[data]\nfolder = "prepared"\n')
    assert "network   two_towers:TwoTowers" in run(clone, f"rowmesh train own.toml {own}")
