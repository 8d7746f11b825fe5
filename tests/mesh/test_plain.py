"""What travels between ranks: plain values, and nothing that a receiver would run."""

import ast
import errno
import math
from pathlib import Path

import pytest

from rowmesh.errors import DataError, NoRoomError, PeerError, RowmeshError
from rowmesh.mesh.plain import decode, encode, error_from_plain, error_to_plain
from rowmesh.run.checks import DivergedError

ROOT = Path(__file__).parents[2] / "rowmesh"
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
PICKLING = {  # of torch.distributed
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


KERNELS = ROOT / "ops" / "compiled.py"  # what it unpickles is code by itself: kernels that this user compiled


def is_torch_load(node):
    return isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node) == "torch.load"


def test_no_pickled_object_travels():
    for path in set(ROOT.rglob("*.py")) - {KERNELS}:
        for node in ast.walk(ast.parse(path.read_text())):
            names = set()
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0], *(alias.name for alias in node.names)}
            elif isinstance(node, ast.Attribute):
                names = {node.attr}
                if is_torch_load(node):  # of a model's file: only with weights_only
                    continue
            elif isinstance(node, ast.Call) and is_torch_load(node.func):
                assert {
                    word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg == "weights_only"
                } == {"weights_only": True}, path
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.literal_eval(node.value) is False, path
            assert not names & (PICKLES | PICKLING), f"{path}:{node.lineno}"


@pytest.mark.parametrize("value", [None, True, -3, 0.1, 1e-300, math.inf, "é\n", [], {"a": [1, None]}, "\ud800"])
def test_values_arrive_as_they_were(value):
    assert decode(encode(value), 0, "testing") == value


def test_what_is_undefined_arrives_too():
    assert math.isnan(decode(encode(math.nan), 0, "testing"))


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", DataError("no")])
def test_what_is_not_plain_is_not_sent(value):
    with pytest.raises(TypeError):
        encode(value)


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04K\x05.", b"{", b"\xff\xff", b"[" * 100_000, b"3 4"], ids=lambda data: str(data[:5])
)
def test_bytes_that_are_no_value_are_refused(data):
    with pytest.raises(PeerError, match=r"while testing, rank 3 sent what this rank cannot read .*same version"):
        decode(data, 3, "testing")


def test_values_of_another_form_are_refused():
    def read(values):
        host, pid = values
        return host, pid

    with pytest.raises(PeerError, match="rank 3 sent what"):
        decode(b"[1]", 3, "testing", read)


@pytest.mark.parametrize(
    "error", [RowmeshError("a"), DataError("b"), NoRoomError("c"), PeerError("d"), MemoryError("e"), OSError("f")]
)
def test_errors_arrive_as_they_were(error):
    copy = error_from_plain(decode(encode(error_to_plain(error)), 0, "testing"))
    assert (type(copy), str(copy)) == (type(error), str(error))


def test_errors_of_files_keep_what_a_command_prints():
    error = error_from_plain(error_to_plain(OSError(errno.ENOSPC, "No space left on device", Path("runs/a"))))
    assert isinstance(error, OSError)
    assert (error.errno, error.strerror, error.filename) == (28, "No space left on device", "runs/a")
    assert isinstance(error_from_plain(error_to_plain(FileNotFoundError(2, "no", "a"))), FileNotFoundError)


def test_other_errors_arrive_as_the_nearest_that_is_listed():
    assert type(error_from_plain(error_to_plain(DivergedError("the loss is NaN")))) is RowmeshError


@pytest.mark.parametrize("values", [["SystemExit", "0"], ["eval", "1"], [], None])
def test_only_listed_errors_are_made(values):
    with pytest.raises((KeyError, TypeError, ValueError)):
        error_from_plain(values)
