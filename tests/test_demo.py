"""examples/demo.py, which `make demo` calls: its runs keep what they promise, and its table is aligned."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rowmesh.run.resolve import resolve
from tests.support.commands import run_on

SCRIPT = Path(__file__).parents[1] / "examples" / "demo.py"


def load_script():
    spec = importlib.util.spec_from_file_location("demo_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


demo = load_script()
HUGE = demo.Measured(
    step_ms=12_345.6,
    rows_ms=10_234.5,
    sent_bytes=123_456e6,
    table_bytes=987_654_000_000,
    memory_bytes=123_456_000_000,
    auc=0.5,
    best_auc=1.0,
    ids=106_496.0,
    unique_ids=27_767.0,
)
SMALL = replace(HUGE, step_ms=8.4, sent_bytes=0.0, table_bytes=345_000_000, memory_bytes=2_282_000_000)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of drawn data: the first test that runs something draws them, the others reuse them."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def on_ranks(ranks, monkeypatch, tmp_path, data):
    """Has commands run on ranks that are there already, with less data than `--quick` draws."""

    def execute(command, log):
        arguments = list(command[command.index("rowmesh.cli") + 1 :])
        done = run_on(ranks, arguments, ranks=2 if arguments[0] == "train" else 1)
        log.write_text(done.out + done.err)
        assert done.status == 0, done.err

    sizes = {"samples": 2_000, "max_rows": 60, "batch_size": 128, "steps": 4, "cored_rows": 50, "memory_mb": 0.05}
    folders = {"data": data, "out": tmp_path / "runs"}
    monkeypatch.setattr(demo, "execute", execute)
    monkeypatch.setattr(demo, "QUICK", replace(demo.QUICK, **sizes, **folders))
    return tmp_path / "runs"


def test_the_table_is_aligned_in_80_columns():
    results = [(run, HUGE if number % 2 else SMALL) for number, run in enumerate(demo.RUNS)]
    lines = list(demo.draw(results, demo.Settings()))
    table = lines[: 3 + len(results)]
    assert max(map(len, table)) == demo.WIDTH
    assert max(len(line) for line in lines if not line.startswith("report ")) <= demo.WIDTH
    ends = {tuple(word.end() for word in re.finditer(r"[\d,.]+", line[21:71])) for line in table[3:]}
    assert ends == {(7, 14, 23, 32, 41, 50)}
    assert len({run.name for run in demo.RUNS}) == len(demo.RUNS)
    assert lines[-1] == f"report   runs/demo/{demo.RUNS[-1].folder}/report.html"


@pytest.mark.parametrize("run", demo.RUNS, ids=lambda run: run.folder)
def test_every_key_exists(run, tmp_path):
    for settings in (demo.Settings(out=tmp_path), replace(demo.QUICK, out=tmp_path)):
        settings.tiers.mkdir(exist_ok=True)
        _, path, *keys, overwrite = settings.training(run)
        config = resolve(Path(path), keys)
        assert (config.train.steps, overwrite) == (settings.steps, "--overwrite")


def test_the_memory_that_is_given_holds_the_rows_in_tiers(tmp_path):
    settings = demo.Settings(out=tmp_path, memory_mb=64)
    settings.tiers.mkdir()
    (tiers,) = (run for run in demo.RUNS if run.folder == "tiers")
    config = resolve(demo.CONFIG, settings.training(tiers)[2:-1])
    row_bytes = 64 * 4 + 4
    assert 0.99 * 64e6 < config.tiers.fast_rows * row_bytes * settings.ranks <= 64e6


def test_runs_keep_what_they_promise(on_ranks, capsys):
    asked = ["tiers_pipeline", "tensor_train"]
    assert demo.main(["--quick", "--only", *asked]) == 0
    out = capsys.readouterr().out
    rows = {line[:21].strip(): line.split()[-1] for line in out.splitlines() if line.endswith(("equal", "another"))}
    assert [*rows.values()] == ["equal", "another"]
    pages = re.findall(r"^report   (.*)$", out, re.MULTILINE)
    assert len(pages) == 3
    assert all(Path(page).exists() for page in pages)
    assert not list(on_ranks.glob("*/model"))
    assert not (on_ranks / "rows").exists()


def test_a_broken_promise_ends_it(on_ranks, monkeypatch):
    other = demo.Run("another seed", "none", "a model that is not the plain one", ("train.seed=1",))
    monkeypatch.setattr(demo, "RUNS", (demo.RUNS[0], other))
    with pytest.raises(
        SystemExit, match="another seed was to train the plain model to the bit and differs in table C1"
    ):
        demo.main(["--quick"])


def test_a_command_that_fails_is_shown(tmp_path):
    log = tmp_path / "run.log"
    with pytest.raises(SystemExit, match=r"an error of it\nfailed, status 3; all that it printed is in .*run.log"):
        demo.execute([sys.executable, "-c", "import sys; print('an error of it'); sys.exit(3)"], log)


@pytest.mark.slow
def test_the_whole_of_it(tmp_path):
    folders = ["--data", tmp_path / "data", "--out", tmp_path / "runs"]
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the plain model to the bit") == sum(run.promise == "bits" for run in demo.RUNS) - 1
    assert done.stdout.count("report   ") == len(demo.RUNS)
