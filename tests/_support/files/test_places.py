"""A path with a scheme is refused wherever a folder is taken, before anything is made."""

import pytest
from pydantic import BaseModel

import rowmesh
from rowmesh import EmbeddingCollection, TableSpec
from rowmesh._support.files.places import local_path
from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.publish import open_target
from rowmesh.run.config import Config
from rowmesh.run.resolve import validate
from rowmesh.run.section import Folder, Source
from rowmesh.tables.dynamic.stores import open_records
from tests.support.commands import run_command

REMOTE = ["s3://b/r", "gs://b/r", "hdfs://h/r", "http://h/r", "abfs+x://r", "s3:/b/r"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.glob("*:")), "a folder was made"


def folders(section: type[BaseModel] = Config, before=()):
    """The keys of configurations that take paths, as the code has them."""
    checks = {check.func for kind in (Folder, Source) for check in getattr(kind, "__metadata__", ())}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from folders(kind, (*before, name))
        elif any(getattr(each, "func", None) in checks for each in field.metadata):
            yield (*before, name)


@pytest.mark.parametrize("place", REMOTE)
def test_paths_with_a_scheme_are_refused(place):
    with pytest.raises(ConfigurationError, match=r"has the scheme .*: name a folder here, or mount the store"):
        local_path(place, "run.folder")
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4)])
    state = {"embeddings": embeddings}
    for call in (
        lambda: rowmesh.save(place, state),
        lambda: rowmesh.async_save(place, state),
        lambda: rowmesh.load(place, state),
        lambda: rowmesh.load_run(place),
        lambda: open_target(f"parquet:{place}"),
        lambda: open_target(f"rocksdb:{place}"),
        lambda: open_records(f"file:{place}", "user", 4, max_records=1),
        lambda: open_records(f"rocksdb:{place}", "user", 4, max_records=1),
    ):
        with pytest.raises(ConfigurationError, match="has the scheme"):
            call()


def test_the_error_shows_no_password():
    with pytest.raises(ConfigurationError, match=r"http://ann:\*\*\*@host/run"):
        local_path("http://ann:secret@host/run", "run.folder")


@pytest.mark.parametrize("place", ["runs/a", "/data/a:b", "a:b/c", "C:/data", "x=s3", ""])
def test_others_are_paths(place):
    assert str(local_path(place, "run.folder")) in (place, ".")


def test_every_key_of_a_configuration_that_takes_a_path_refuses_them():
    found = list(folders())
    assert {("run", "folder"), ("data", "folder"), ("checkpoint", "folder"), ("tiers", "folder")} < set(found)
    for section, key in found:
        values = {
            "data": {"folder": "clicks"},
            section: {"folder": "clicks", key: "s3://b/r"} if section == "data" else {key: "s3://b/r"},
        }
        with pytest.raises(ConfigurationError, match=rf"{section}\.{key}.*has the scheme s3://"):
            validate(values, "a test")
    with pytest.raises(ConfigurationError, match=r"publish\.to.*has the scheme s3://"):
        validate({"data": {"folder": "clicks"}, "publish": {"to": "parquet:s3://b/r"}}, "a test")


@pytest.mark.parametrize(
    "words",
    [
        ["train", "clicks.toml", "run.folder=s3://b/r"],
        ["data", "synthesize", "s3://b/r"],
        ["data", "prepare", "a.csv", "--out", "s3://b/r"],
        ["data", "prepare", "redis://h/r", "--out=here"],
        ["plan", "clicks.toml", "--ranks", "2", "--out", "gs://b/plan.json"],
        ["predict", "s3://b/run", "file.csv"],
        ["evaluate", "s3://b/run"],
        ["report", "s3://b/run"],
        ["export", "run", "--out", "s3://b/x"],
        ["checkpoint", "list", "s3://b/run"],
    ],
    ids=" ".join,
)
def test_every_command_refuses_them(tmp_path, words):
    (tmp_path / "clicks.toml").write_text('[data]\nfolder = "clicks"\n')
    done = run_command(Mesh(), words)
    assert done.status == 2
    (given,) = (word.rpartition("=")[2] for word in words if "://" in word)
    assert f"{given!r} has the scheme" in done.err.replace("\n", " ")
    assert {path.name for path in tmp_path.iterdir()} == {"clicks.toml"}
