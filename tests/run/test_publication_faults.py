"""Whatever a target does wrong obeys `publish.on_failure`: every exception, every call, every kind of target."""

import contextlib
import errno
import io

import pytest

from rowmesh.errors import StoreError
from rowmesh.publish import PublishedReader, open_target
from rowmesh.publish.target import PartWriter, Target
from rowmesh.run import publications
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from tests.run.test_publications import check
from tests.support.redis_server import redis_server as redis_server

KINDS = ["parquet", "rocksdb", "redis"]
CALLS = [
    *(name for name in vars(Target) if not name.startswith("_") and name not in ("network", "open_rows", "close")),
    *(name for name in vars(PartWriter) if not name.startswith("_") and name != "deleted"),
]
"""What a publisher asks of a target and of the writer of a part, as the protocols have it."""
ERRORS = [
    *(
        OSError(number, name)
        for number, name in sorted(errno.errorcode.items())
        if number in (1, 2, 5, 13, 17, 20, 28, 36, 104, 116)
    ),
    ValueError("no number"),
    KeyError("a key"),
    TypeError("a type"),
    RuntimeError("a package"),
    RecursionError("too deep"),
    MemoryError("no room"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    OverflowError("too large"),
    AssertionError("not ours"),
    StoreError("a store"),
]
ROUNDS = [*(("publish", error) for error in ERRORS), *((call, ValueError(call)) for call in CALLS)]


class Failing:
    """A target, or the writer of a part, one of whose calls fails."""

    def __init__(self, inner, plan):
        self._inner, self._plan = inner, plan

    def __getattr__(self, name):
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*arguments):
            if self._plan and self._plan[0][0] == name:
                raise self._plan.pop(0)[1]
            result = value(*arguments)
            return Failing(result, self._plan) if name == "part" else result

        return call


def url_of(kind, tmp_path, request):
    if kind == "redis":
        return request.getfixturevalue("redis_server").url
    if kind == "rocksdb":
        pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")
    return f"{kind}:{tmp_path / 'published'}"


def run(config_file, *options):
    """What a run prints that goes well."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run_training(resolve(config_file, ["train.patience=0", "publish.retry_s=0.0", *options]))
    return out.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_whatever_a_target_raises(config_file, tmp_path, request, monkeypatch, kind):
    url, plan = url_of(kind, tmp_path, request), list(ROUNDS)
    monkeypatch.setattr(publications, "open_target", lambda *a, **k: Failing(open_target(*a, **k), plan))
    steps = len(ROUNDS) + 2
    text = run(config_file, f"train.steps={steps}", "data.batch_size=16", "publish.every_steps=1", f"publish.to={url}")
    assert not plan, "every error was raised"
    # Old generations of which one cannot be read or removed stay for a while; a part that fails is closed, too.
    assert text.count("cannot be published") == len(ROUNDS) - 3
    check(url, tmp_path / "run", steps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [ERRORS[0], ValueError("no number"), RecursionError("too deep")], ids=str)
def test_a_run_ends_where_it_is_to(config_file, tmp_path, request, monkeypatch, kind, error):
    url, plan = url_of(kind, tmp_path, request), [("begin", error)]
    monkeypatch.setattr(publications, "open_target", lambda *a, **k: Failing(open_target(*a, **k), plan))
    with pytest.raises(StoreError, match=r"what step 1 left cannot be published: .*publish\.on_failure is stop"):
        run(config_file, "publish.every_steps=1", f"publish.to={url}", "publish.on_failure=stop")


DAMAGED = [b"\xff\xfe\x00", b"\xff\x00", b"[" * 100_000, b"", b"null", b'{"format": 1e999}', b"7", b'{"format": 2}']


@pytest.mark.parametrize("kind", ["parquet", "redis"])
@pytest.mark.parametrize("pointer", DAMAGED, ids=lambda pointer: repr(pointer[:20]))
def test_a_damaged_pointer_ends_no_training(config_file, tmp_path, request, kind, pointer):
    url = url_of(kind, tmp_path, request)
    options = ["train.steps=2", "publish.every_steps=2", f"publish.to={url}"]
    run(config_file, *options)
    if kind == "redis":
        with request.getfixturevalue("redis_server").client() as client:
            client.set("rowmesh-published:newest", pointer)
    else:
        (tmp_path / "published" / "newest.json").write_bytes(pointer)
    with pytest.raises(Exception, match=r"no generation|damaged|of format") as seen:
        PublishedReader(open_target(url))
    assert type(seen.value).__module__ == "rowmesh.errors"
    text = run(config_file, *options, f"run.folder={tmp_path / 'other'}")
    assert "what step 2 left cannot be published" in text
    assert (tmp_path / "other" / "model" / "manifest.json").exists()
    with pytest.raises(StoreError, match=r"publish\.on_failure is stop"):
        run(config_file, *options, f"run.folder={tmp_path / 'third'}", "publish.on_failure=stop")


@pytest.mark.parametrize("error", [ValueError("Invalid IPv6 URL"), UnicodeError("label too long")], ids=str)
def test_a_target_that_cannot_be_opened_ends_no_training(config_file, tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(publications, "open_target", fail)
    text = run(config_file, "train.steps=2", f"publish.to=parquet:{tmp_path / 'published'}")
    assert f"cannot be published: {type(error).__name__}: {error}" in text
