"""A password in a URL stands in no file, page or line of a run."""

import contextlib
import io

import pytest

from rowmesh.cli.report import write_page
from rowmesh.errors import ConfigurationError
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from rowmesh.tables.dynamic.stores import open_records
from tests.support.redis_server import redis_server as redis_server


def test_no_file_of_a_run_has_a_password(config_file, tmp_path, redis_server):
    with redis_server.client() as client:
        client.config_set("requirepass", "s3cr3t")
    url = redis_server.url.replace("redis://", "redis://:s3cr3t@")
    options = ["train.steps=4", "train.patience=0", "data.batch_size=16", f"publish.to={url}", "publish.every_steps=2"]
    options += [
        "tables.storage=dynamic",
        "tables.dynamic.capacity=64",
        "tables.dynamic.shards=2",
        "tables.initializer.bound=0.1",
    ]
    options += [
        "tables.dynamic.mode=demote",
        f"tables.dynamic.store={url}",
        "checkpoint.every_steps=2",
        'run.trackers=["tensorboard"]',
    ]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run_training(resolve(config_file, options), at_end=write_page)
    assert "s3cr3t" not in out.getvalue()
    assert "tables.dynamic.store, publish.to: a URL has a password" in out.getvalue().replace("\n", " ")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.toml", "report.html", "manifest.json"} <= {path.name for path in files}
    assert not [path for path in files if b"s3cr3t" in path.read_bytes()]
    masked = resolve(tmp_path / "run" / "config.toml")
    assert masked.publish.to == url.replace("s3cr3t", "***")
    with pytest.raises(ConfigurationError, match=r"the password stands as \*\*\* where it was written down"):
        open_records(masked.tables.dynamic.store or "", "user", 4, max_records=1)


def test_a_page_of_a_run_of_an_earlier_version_has_none(tmp_path):
    from rowmesh.report.run_page import write_run_report

    (tmp_path / "config.toml").write_text('[publish]\nto = "redis://:s3cr3t@host"\n')
    write_run_report([tmp_path], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "***" in page
    assert "s3cr3t" not in page
