"""The script of the first run on a GPU: what it would run is there, and its stages do not stop each other."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def first_light(*words, **environment):
    return subprocess.run(
        ["bash", "benchmarks/first_light.sh", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_what_the_stages_run_is_there():
    done = first_light("--list")
    assert done.returncode == 0, done.stderr
    stages = [line.split() for line in done.stdout.splitlines()]
    assert {"what", "kernels", "memcheck", "ranks", "run", "ops", "step"} <= {name for name, *_ in stages}
    for name, limit, command, *words in stages:
        assert 0 < int(limit) <= 600, name
        if command == "bench":
            assert (ROOT / "benchmarks" / f"{words[0]}.py").is_file()
        for word in words if command == "tests" else ():
            assert not word.startswith(("tests/", "rowmesh/")) or (ROOT / word).exists(), word


def test_a_failed_stage_does_not_stop_the_next(tmp_path):
    # Without a GPU `what` fails, and the benchmark says that there is none.
    done = first_light("what", "ops_quick", OUT=str(tmp_path))
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["what", "ops_quick"]
    assert done.returncode == sum("passed" not in line for line in lines), done.stdout
    assert (tmp_path / "what.log").is_file()


def test_a_stage_that_there_is_not(tmp_path):
    done = first_light("kernel", OUT=str(tmp_path / "out"))
    assert done.returncode == 2
    assert "no stage kernel" in done.stderr
    assert not (tmp_path / "out").exists()
