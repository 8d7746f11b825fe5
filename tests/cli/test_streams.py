"""Standard output and error that are closed, full, or of another encoding, in this process."""

import io
import os
import pty
import subprocess
import sys

import pytest

from rowmesh.cli.__main__ import main

TEXT = "rows 4 × 16, … ≥ 3 → é \udce9 日\n"
SHOW = """
import sys
from rowmesh.cli.streams import lasting_streams
lasting_streams()
"""


def python(code, **options):
    return subprocess.run([sys.executable, "-c", SHOW + code], capture_output=True, timeout=60, **options)


def closed_pipe():
    """The end to write of a pipe whose reader is gone."""
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", b"rows 4 x 16, ... >= 3 -> \\xe9 \\udce9 \\u65e5\n"),
        ("latin-1", b"rows 4 \xd7 16, ... >= 3 -> \xe9 \\udce9 \\u65e5\n"),
        ("utf-8", "rows 4 × 16, … ≥ 3 → é \\udce9 日\n".encode()),
    ],
)
def test_what_an_encoding_lacks_is_written_plainly(encoding, expected):
    variables = os.environ | {"PYTHONIOENCODING": encoding}
    done = python(f"print({TEXT!a}, end='')\nprint({TEXT!a}, end='', file=sys.stderr)", env=variables)
    assert (done.stdout, done.stderr, done.returncode) == (expected, expected, 0)


def test_the_c_locale_without_utf_8():
    variables = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = python(f"print({TEXT!a}, end='')", env=variables)
    assert (done.stdout, done.returncode) == (b"rows 4 x 16, ... >= 3 -> \\xe9 \\udce9 \\u65e5\n", 0), done.stderr


def test_how_the_user_has_errors_handled_stays():
    variables = os.environ | {"PYTHONIOENCODING": "ascii:replace"}
    assert python(f"print({TEXT!a}, end='')", env=variables).stdout == b"rows 4 ? 16, ? ? 3 ? ? ? ?\n"


def test_every_piece_of_output_that_rowmesh_has_is_ascii_where_it_must_be(monkeypatch, config_file, tmp_path):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    for arguments in (["plan", config_file, "--ranks", "4", "--out", tmp_path / "plan.json"], ["env"], ["--help"]):
        with pytest.raises(SystemExit) as stop:
            main([*map(str, arguments)])
        assert stop.value.code in (0, None)
    out.flush()
    assert b"-> " in out.buffer.getvalue()


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_reader_that_is_gone_is_no_error(name):
    write = closed_pipe()
    code = f"print('x' * 100000, file=sys.{name}, flush=True)\nprint('end', file=sys.{name})\nassert not streams_lost()"
    code = f"from rowmesh.cli.streams import lost as streams_lost\n{code}"
    try:
        done = subprocess.run([sys.executable, "-c", SHOW + code], **{name: write}, timeout=60)
    finally:
        os.close(write)
    assert done.returncode == 0


def test_a_terminal_that_is_gone_is_no_error():
    """The kernel answers writes to it with EIO."""
    master, slave = pty.openpty()
    code = "sys.stdin.readline()\nprint('x', flush=True)\nprint('end')"
    with subprocess.Popen([sys.executable, "-c", SHOW + code], stdin=subprocess.PIPE, stdout=slave) as process:
        os.close(slave)
        os.close(master)
        process.communicate(b"go\n", timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_a_stream_that_is_closed_from_the_start_leads_nowhere(descriptor, tmp_path):
    """Else the next file that is opened gets its number, and what is printed."""
    code = f"file = open({str(tmp_path / 'rows')!r}, 'w')\nprint('out')\nprint('err', file=sys.stderr)\n"
    code += "assert file.fileno() > 2"
    command = f'exec {sys.executable} -c "$CODE" {descriptor}>&-'
    done = subprocess.run(["sh", "-c", command], env=os.environ | {"CODE": SHOW + code}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if descriptor == 1 else "out\n")
    assert done.stderr == ("" if descriptor == 2 else "err\n")
    assert (tmp_path / "rows").read_text() == ""


def test_a_pipe_that_does_not_block_is_waited_for():
    read, write = os.pipe()
    os.set_blocking(write, False)
    code = "print('x' * 1_000_000)\nprint('end')"
    with subprocess.Popen([sys.executable, "-c", SHOW + code], stdout=write) as process:
        os.close(write)
        with open(read, "rb") as reader:  # noqa: PTH123 - a descriptor
            content = reader.read()
    assert (process.returncode, len(content)) == (0, 1_000_005)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")  # noqa: PTH110
def test_output_that_is_lost_to_a_full_disk_is_said_in_the_end():
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [sys.executable, "-m", "rowmesh.cli", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    expected = "rowmesh: error: standard output is incomplete: No space left on device; "
    assert done.stderr.startswith(expected)
    assert done.stderr.count("\n") == 1


def test_the_names_of_streams_stay():
    done = python("print(sys.stdout.isatty(), sys.stdout.fileno(), sys.stdout.name, sys.stdout.line_buffering)")
    assert done.stdout.split() == [b"False", b"1", b"<stdout>", b"False"]
