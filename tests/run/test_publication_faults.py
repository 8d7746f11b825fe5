"""Whatever a target does wrong obeys `publish.on_failure`: every exception, every call, every kind of target."""

import contextlib
import errno
import io
from contextlib import closing
from types import SimpleNamespace

import pytest
from torch import nn

from rowmesh import EmbeddingCollection, Mesh, TableSpec, errors
from rowmesh.errors import PeerError, RowmeshError, StoreError
from rowmesh.publish import PublishedReader, open_target
from rowmesh.publish.target import PartWriter, Target
from rowmesh.run import publications
from rowmesh.run.commands import run_training
from rowmesh.run.publish_config import PublishConfig
from rowmesh.run.resolve import resolve
from tests.run.test_publications import check
from tests.support.redis_server import redis_server as redis_server

KINDS = ["parquet", "rocksdb", "redis"]
READ = ("network", "network_place", "open_rows", "close")
CALLS = [
    *(name for name in vars(Target) if not name.startswith("_") and name not in READ),
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
    PeerError("no rank of ours"),
]
ROUNDS = [*(("publish", error) for error in ERRORS), *((call, ValueError(call)) for call in CALLS)]


class SilentError(Exception):
    """An error that cannot be shown."""

    def __str__(self):
        raise self


EVERY_ERROR = [
    *(error for error in ERRORS if not isinstance(error, RowmeshError)),
    OSError("without a number"),
    *(
        each("told" if each is not StoreError else "")
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, RowmeshError)
    ),
    ExceptionGroup("several", [ValueError("one"), OSError("two")]),
    StopIteration(3),
    Exception(),
    SilentError(),
]


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
def test_a_run_ends_where_it_is_to(config_file, tmp_path, request, monkeypatch, kind):
    url, plan = url_of(kind, tmp_path, request), [("begin", RuntimeError("a package"))]
    monkeypatch.setattr(publications, "open_target", lambda *a, **k: Failing(open_target(*a, **k), plan))
    with pytest.raises(StoreError, match=r"what step 1 left cannot be published: .*publish\.on_failure is stop"):
        run(config_file, "publish.every_steps=1", f"publish.to={url}", "publish.on_failure=stop")


def job(on_failure):
    """A run with one table, trained by nobody, as `Publications` looks at it."""
    options = {"to": "parquet:nowhere", "on_failure": on_failure, "retry_s": 0.0, "keep_last": 1, "whole_every": 1}
    return SimpleNamespace(
        config=SimpleNamespace(
            publish=PublishConfig.model_validate(options),
            train=SimpleNamespace(seed=0),
            parallel=SimpleNamespace(synchronization="exact", sync_every=1),
        ),
        mesh=Mesh(),
        embeddings=EmbeddingCollection([TableSpec(name="user", num_rows=4, dim=2)]),
        network=nn.Linear(2, 1),
    )


class Remembered:
    """A target in memory, which knows manifests alone."""

    name = "memory"

    def __init__(self):
        self._manifests, self._newest = {}, None

    def newest(self):
        return self._newest

    def manifest(self, number):
        return self._manifests.get(number)

    def begin(self, number):
        self._manifests[number] = None

    def part(self, *_):
        return SimpleNamespace(rows=lambda *_: None, deleted=lambda *_: None, close=dict)

    def write_network(self, number, state):
        pass

    def publish(self, generation):
        self._manifests[generation.number] = self._newest = generation.to_json()

    def numbers(self):
        return sorted(self._manifests)

    def remove(self, number):
        del self._manifests[number]

    def close(self):
        pass


WRITTEN = ["open_target", *(call for call in CALLS if call not in ("manifest", "numbers", "remove"))]
"""What a version cannot be published without; the others are asked for old ones, which may stay."""


@pytest.mark.parametrize(
    "error", EVERY_ERROR, ids=lambda error: type(error).__name__ + str(getattr(error, "errno", ""))
)
def test_every_error_of_every_call_obeys(monkeypatch, error):
    plan, lines, target = [], [], Remembered()

    def opened(*_, **__):
        if plan and plan[0][0] == "open_target":
            raise plan.pop(0)[1]
        return Failing(target, plan)

    monkeypatch.setattr(publications, "open_target", opened)
    for on_failure in ("continue", "stop"):
        run = job(on_failure)
        with closing(run.embeddings):
            for step, call in enumerate(WRITTEN, 1):
                with closing(publications.Publications(run)) as each:
                    plan[:] = [(call, error)]
                    lines.clear()
                    if on_failure == "continue":
                        each.write(step, lines.append)
                        assert not plan, f"{call} was called"
                        assert f"what step {step} left cannot be published" in lines[0]
                        assert lines[0].endswith("; training goes on")
                    else:
                        with pytest.raises(StoreError, match=rf"^what step {step} left .*publish\.on_failure is stop"):
                            each.write(step, lines.append)
                        assert not lines
                    lines.clear()
                    each.write(step + 100, lines.append)  # whatever went wrong, the next has all rows
                    assert "published generation" in lines[-1]
                    assert lines[-1].endswith("all rows")
            with closing(publications.Publications(run)) as each:
                each.write(1000, lines.append)
                plan[:] = [("close", error)]
            assert not plan, "a connection that breaks when it is closed costs nothing"


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
