"""Commands without a reader of their output, on terminals of any kind, or ended by a signal at a given point."""

import contextlib
import io
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rowmesh._support.faults import arm
from rowmesh._support.files.manifest import contents
from rowmesh.cli.__main__ import main
from rowmesh.data import PlantedConfig
from tests.support.clicks import prepare_clicks

SIGNALS = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 138}
SMALL = ["model.bottom=[4]", "model.top=[4]", "tables.dim=4", "data.batch_size=64"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`raw`, `prepared`, a configuration and a finished `run`; tests write elsewhere."""
    folder = tmp_path_factory.mktemp("made")
    prepare_clicks(folder, {"train": 300, "validation": 50, "test": 50}, PlantedConfig(num_rows=(30, 5), head=4))
    (folder / "clicks.toml").write_text(f'[data]\nfolder = "{folder}/prepared"\n[run]\nfolder = "{folder}/run"\n')
    assert call("train", folder / "clicks.toml", *SMALL) == 0
    return folder


@pytest.fixture(autouse=True)
def _handlers():
    """Signals as they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def call(*arguments):
    """The exit status of a command in this process."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments)])
    return stop.value.code or 0


def commands(made, out):
    """Every command that writes, into folders and files of `out`."""
    shutil.copytree(made / "run", out / "run")
    samples = ["--samples", 99, "--held-out", 9, "--max-rows", 9]
    return {
        "synthesize": ["data", "synthesize", out / "raw", *samples],
        "prepare": ["data", "prepare", made / "raw", "--out", out / "prepared"],
        "plan": ["plan", made / "clicks.toml", "--ranks", 2, "--out", out / "plan.json", "--report", out / "plan.html"],
        "train": ["train", made / "clicks.toml", *SMALL, f"run.folder={out}/trained"],
        "evaluate": ["evaluate", out / "run", "--split", "validation"],
        "export": ["export", out / "run", "--out", out / "exported"],
    }


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("synthesize", "files.folder.sync"),
        ("prepare", "files.write"),
        ("prepare", "files.folder.sync"),
        ("plan", "files.write"),
        ("evaluate", "files.write"),
        ("export", "files.folder.sync"),
    ],
)
def test_a_signal_leaves_nothing_half_written(made, tmp_path, name, point, number):
    """A closed terminal's comes twice: from the kernel and from the shell."""
    arguments = commands(made, tmp_path)[name]
    before = contents(tmp_path)

    def interrupt():
        for _ in range(1 if number == signal.SIGINT else 2):
            signal.raise_signal(number)

    with arm(point=point, action=interrupt):
        assert call(*arguments) == SIGNALS[number]
    assert contents(tmp_path) == before
    assert {each.name for each in tmp_path.iterdir()} == {"run"}
    assert call(*arguments) == 0, "the next one has its way"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prepare", "plan"])
def test_a_closed_terminal_ends_a_process_which_cleans_up(made, tmp_path, name):
    """Here it is the process's own controlling terminal."""
    arguments, before = commands(made, tmp_path)[name], contents(tmp_path)
    held = tmp_path.parent / "held"
    command = [sys.executable, "-m", "rowmesh.cli", *map(str, arguments)]
    variables = os.environ | {"ROWMESH_FAULTS": f"files.write@1=hold:{held}"}
    child, master = pty.fork()
    if child == 0:
        os.execve(sys.executable, command, variables)
    drained = threading.Thread(target=_drain, args=(os.dup(master), io.BytesIO()))
    drained.start()
    while not held.exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.close(master)
    held.unlink()
    os.kill(child, signal.SIGHUP)  # the copy of the terminal that is drained keeps it open
    _, status = os.waitpid(child, 0)
    drained.join()
    assert os.waitstatus_to_exitcode(status) == 129
    assert contents(tmp_path) == before


def test_nohup_is_heeded(made, tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    arguments = commands(made, tmp_path)["plan"]
    with arm(point="files.write", action=lambda: signal.raise_signal(signal.SIGHUP)):
        assert call(*arguments) == 0
    assert (tmp_path / "plan.json").exists()


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_is_finished(made, tmp_path):
    read, write = os.pipe()
    os.close(read)
    arguments = map(str, commands(made, tmp_path)["train"])
    try:
        command = [sys.executable, "-m", "rowmesh.cli", *arguments]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=200)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "trained" / "model" / "manifest.json").exists()
    assert (tmp_path / "trained" / "evaluation" / "test.json").exists()


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.slow)])
def test_every_command_writes_what_an_encoding_has(made, tmp_path, monkeypatch, encoding):
    for name, arguments in commands(made, tmp_path).items():
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert call(*arguments) == 0, name
        out.flush()
        assert out.buffer.getvalue(), name
    with contextlib.redirect_stderr(err):
        assert call("train", made / "clicks.toml", "run.folder=…", "no.such=×") == 2
    err.flush()
    assert b"Traceback" not in err.buffer.getvalue()


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"COLUMNS": "20", "TERM": "xterm-256color"}, marks=pytest.mark.slow),
        {"COLUMNS": "1", "LINES": "1", "TERM": "xterm"},
        pytest.param({"COLUMNS": "0", "TERM": "vt100"}, marks=pytest.mark.slow),
        {"TERM": None},
        pytest.param({"TERM": "dumb", "NO_COLOR": "1"}, marks=pytest.mark.slow),
        {"TERM": "no-such-terminal", "COLUMNS": "many"},
    ],
    ids=str,
)
def test_every_command_is_shown_by_terminals_of_any_kind(made, tmp_path, monkeypatch, variables):
    """A real one, whose size is 0 × 0 where COLUMNS does not say otherwise."""
    monkeypatch.delenv("COLUMNS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    arguments = {**commands(made, tmp_path), "env": ["env"], "help": ["data", "prepare", "--help"]}
    for name, words in arguments.items():
        with terminal() as shown:
            assert call(*words) == 0, name
        assert shown.getvalue(), name
        assert b"Traceback" not in shown.getvalue(), name


@contextlib.contextmanager
def terminal():
    """A terminal as standard output and error, and what it has shown in the end."""
    master, slave = pty.openpty()
    shown = io.BytesIO()
    reader = threading.Thread(target=_drain, args=(master, shown))
    reader.start()
    with open(slave, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):  # noqa: PTH123
        yield shown
    reader.join()


def _drain(descriptor, shown):
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while read := os.read(descriptor, 4096):
            shown.write(read)
    os.close(descriptor)


def test_a_configuration_that_nobody_may_read_says_so(tmp_path, capsys):
    assert call("train", Path("/proc/self/mem")) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_narrow_terminal_leaves_no_number_out(made, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "dumb")
    with terminal() as shown:
        assert call(*commands(made, tmp_path)["prepare"]) == 0
    lines = [line.split() for line in shown.getvalue().decode().splitlines()]
    assert any({"train", "300"} <= set(words) for words in lines), lines
