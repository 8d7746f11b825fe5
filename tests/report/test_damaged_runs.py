"""The page of a run whose files are damaged: it is written and says what is missing, or the file is named."""

import json
import random
import shutil
import tomllib

import pytest
import tomli_w

from rowmesh.data import PlantedConfig
from rowmesh.errors import RowmeshError
from rowmesh.report.run_page import write_run_report
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from tests.support.clicks import prepare_clicks, write_config

FILES = (
    "config.toml",
    "environment.json",
    "about.json",
    "plan.json",
    "metrics.jsonl",
    "counters.jsonl",
    "evaluation/test.json",
    "trace.json",
)
BYTES = (b"", b"\xff\xfe\x00", b"[]", b"7", b"null", b'"text"', b"[" * 100_000, b"{}", b'{"step": 1}\n' * 3)
VALUES = (None, "text", [], [None], {}, {"a": 1}, -1, 0, 1e308, float("nan"), float("inf"), 10**400, True)
RANDOM_CHANGES = 60


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    data = prepare_clicks(
        folder, {"train": 1000, "validation": 200, "test": 200}, PlantedConfig(num_rows=(50, 7, 30), head=10)
    )
    config = write_config(folder / "clicks.toml", folder / "run", data.folder, "[train]", "log_every = 2")
    more = ["train.steps=16", "train.eval_every=4", "pipeline.depth=1", "pipeline.trace=true"]
    run_training(resolve(config, ["data.batch_size=64", *more]))
    return folder / "run"


def read(name, content):
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in content.splitlines()]
    return tomllib.loads(content.decode()) if name.endswith(".toml") else json.loads(content)


def written(name, values):
    if name.endswith(".jsonl"):
        return "".join(json.dumps(line) + "\n" for line in values).encode()
    return tomli_w.dumps(values).encode() if name.endswith(".toml") else json.dumps(values).encode()


def places(values, place=()):
    """Where something stands in nested values."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in pairs:
        yield (*place, key)
        yield from places(value, (*place, key))


def changed(values, place, value):
    """With another value at a place, or without it, where that is `...`."""
    *path, last = place
    node = values
    for key in path:
        node = node[key]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return values


def damages(name, content):
    """Contents of a file that no run writes."""
    yield from BYTES
    yield content[: len(content) // 2]
    draw = random.Random(name)
    some = list(dict.fromkeys(places(read(name, content))))
    for _ in range(RANDOM_CHANGES):
        values, place, value = read(name, content), draw.choice(some), draw.choice([..., *VALUES])
        if not (name.endswith(".toml") and value in (None, [None])):
            yield written(name, changed(values, place, value))


def outcome(folders, out):
    try:
        write_run_report(folders, out)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("name", FILES)
def test_the_page_of_a_damaged_run_is_written_or_the_file_is_named(run, tmp_path, name):
    content = (run / name).read_bytes()
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("model"))
    for number, damage in enumerate(damages(name, content)):
        (copy / name).write_bytes(damage)
        pages = [[copy], [copy, run]] if number % 4 == 0 else [[copy]]
        for folders in pages:
            found = outcome(folders, tmp_path / "page.html")
            assert found is None or (isinstance(found, RowmeshError) and name in str(found)), (found, damage[:2000])
