import json
import os
import signal
import subprocess
import sys
import time

import pytest

import rowmesh
from rowmesh.cli.__main__ import main, wait_passively
from rowmesh.errors import PeerError, RowmeshError


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_version(capsys):
    assert run(capsys, "--version")[:2] == (0, f"rowmesh {rowmesh.__version__}\n")


def test_help_names_every_command(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(name in out for name in ("data", "plan", "train", "evaluate", "predict", "export", "env"))
    assert "Make and prepare data sets." in out


def test_help_does_not_wait_for_torch():
    check = "import sys, rowmesh.cli.__main__; assert not {'torch', 'numba', 'pyarrow'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_mistakes_end_in_one_message_and_status_2(capsys, tmp_path):
    status, out, err = run(capsys, "train", str(tmp_path / "clicks.toml"))
    assert (status, out) == (2, "")
    assert err == f"rowmesh: error: cannot read the configuration {tmp_path}/clicks.toml: No such file or directory\n"


def failing_with(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("rowmesh.observe.environment.environment_report", fail)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError("no 80 MiB of shared memory"), "no 80 MiB of shared memory; use smaller tables"),
        (MemoryError(), "Python had no room; use smaller tables"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            "out of memory: can't allocate memory: you tried to allocate 8 bytes; use",
        ),
    ],
)
def test_too_little_memory_is_one_message(capsys, monkeypatch, error, message):
    failing_with(monkeypatch, error)
    status, _, err = run(capsys, "env")
    assert status == 2
    assert message in err
    assert err.startswith("rowmesh: error: out of memory: ")


def test_the_rank_is_named_once(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    failing_with(monkeypatch, PeerError("rank 1: rank 0 (process 7) died while training"))
    assert run(capsys, "env")[2] == "rowmesh (rank 1): error: rank 0 (process 7) died while training\n"


def test_a_full_disk_names_the_file(capsys, monkeypatch):
    failing_with(monkeypatch, OSError(28, "No space left on device", "runs/a/metrics.jsonl"))
    status, _, err = run(capsys, "env")
    assert status == 2
    assert err.startswith("rowmesh: error: runs/a/metrics.jsonl: No space left on device; make room")


def test_under_torchrun_the_message_names_the_rank(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    status, _, err = run(capsys, "evaluate", str(tmp_path))
    assert status == 2
    assert err.startswith("rowmesh (rank 3): error: ")


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["env", "--jsno"], ["train", "a.toml", "--overrite"]])
def test_unknown_words_are_refused(capsys, arguments):
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert "Error" in out + err


class Freed:
    """Takes a while to be freed, in which a signal comes."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_is_not_lost_while_an_object_is_freed(capsys, monkeypatch):
    def interrupted(*_, **__):
        Freed()
        time.sleep(30)

    monkeypatch.setattr("rowmesh.observe.environment.environment_report", interrupted)
    before = sys.unraisablehook
    assert run(capsys, "env") == (130, "", "rowmesh: interrupted\n")
    assert sys.unraisablehook is before


def test_ctrl_c_is_one_line(capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("rowmesh.observe.environment.environment_report", interrupt)
    assert run(capsys, "env") == (130, "", "rowmesh: interrupted\n")


@pytest.mark.parametrize("kind", [ZeroDivisionError, RuntimeError])
def test_our_own_mistakes_keep_their_traceback(monkeypatch, kind):
    failing_with(monkeypatch, kind())
    with pytest.raises(kind):
        main(["env"])


def test_env_prints_text_and_json(capsys):
    status, out, _ = run(capsys, "env")
    assert status == 0
    assert "torch" in out
    status, out, _ = run(capsys, "env", "--json")
    assert json.loads(out)["software"]["rowmesh"] == rowmesh.__version__


def test_errors_of_rowmesh_are_printed_without_a_traceback(capsys, monkeypatch):
    failing_with(monkeypatch, RowmeshError("table 'item': no room\n  for 3 rows"))
    assert run(capsys, "env") == (2, "", "rowmesh: error: table 'item': no room\n  for 3 rows\n")


def test_sigterm_ends_with_its_own_status_and_what_it_interrupted(capsys, monkeypatch):
    """torchrun sends it, too, to a rank that was failing by itself."""

    def terminate(*_, **__):
        try:
            raise PeerError("rank 1: rank 0 (process 7) died while training")
        finally:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("rowmesh.observe.environment.environment_report", terminate)
    before = signal.getsignal(signal.SIGTERM)
    assert run(capsys, "env") == (143, "", "rowmesh (rank 1): error: rank 0 (process 7) died while training\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_sigterm_does_not_cut_the_clean_up(capsys, monkeypatch):
    cleaned = []

    def terminate(*_, **__):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned.append(True)

    monkeypatch.setattr("rowmesh.observe.environment.environment_report", terminate)
    assert run(capsys, "env") == (143, "", "")
    assert cleaned


@pytest.mark.parametrize(
    "given, expected",
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "9"}, None)],
)
def test_the_environment_decides_how_threads_wait(monkeypatch, given, expected):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    wait_passively()
    assert os.environ.get("OMP_WAIT_POLICY") == expected


def test_how_threads_wait_is_said_before_torch_is_there():
    """OpenMP reads it when it is loaded."""
    program = """
import sys
from rowmesh.cli import __main__
assert "torch" not in sys.modules
wait_passively = __main__.wait_passively
__main__.wait_passively = lambda: (wait_passively(), print("torch" in sys.modules))
__main__.main(["--version"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[0] == "False", done.stderr
