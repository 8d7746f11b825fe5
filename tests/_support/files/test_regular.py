"""What stands in the place of a file is an error at once: nothing waits for the writer of a pipe."""

import os
import shutil
import socket
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowmesh._support.files.regular import check_regular, open_regular, read_regular
from rowmesh.data import Loader, Prepared, Schema, prepare
from rowmesh.data.events import EventSchema, Sequences, find_event_schema, prepare_events
from rowmesh.data.inputs import DataSource
from rowmesh.data.quarantine import NoBadRows
from rowmesh.data.raw import FileSource
from rowmesh.data.reader import read_blocks
from rowmesh.errors import DataError, RowmeshError
from tests.support.at_once import at_once

SCHEMA = Schema.parse({"label": "y", "dense": ["x"], "categorical": ["a"]})
EVENTS = EventSchema(user="a", item="x", time="y", format="parquet", side=("s",))


def pipe(path):
    """In the place of what was there."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def test_files_are_opened_and_read(tmp_path):
    (tmp_path / "a").write_bytes(b"rows")
    assert read_regular(tmp_path / "a") == b"rows"
    descriptor = open_regular("a", dir_fd=(folder := os.open(tmp_path, os.O_RDONLY)))
    assert os.get_blocking(descriptor) in (True, False)
    assert os.read(descriptor, 9) == b"rows"
    os.close(descriptor)
    os.close(folder)
    check_regular(tmp_path / "a")


@pytest.mark.parametrize("call", [open_regular, check_regular, read_regular])
def test_what_is_no_file_is_named(tmp_path, call):
    with pytest.raises(OSError, match=r"a pipe, no file: .*p"):
        at_once(lambda: call(pipe(tmp_path / "p")))
    with pytest.raises(OSError, match="a device, no file"):
        call(Path("/dev/null"))
    with pytest.raises(IsADirectoryError):
        call(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(OSError, match=r"a socket, no file|No such device"):
            call(tmp_path / "s")
    with pytest.raises(FileNotFoundError):
        call(tmp_path / "none")


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_a_pipe_in_the_place_of_a_data_file_is_an_error(tmp_path, kind):
    schema = SCHEMA.model_copy(update={"format": kind})
    folder = tmp_path / "rows"
    folder.mkdir()
    path = pipe(folder / "train.csv")
    calls = (
        lambda: prepare({"train": [path]}, tmp_path / "out", schema),
        lambda: list(read_blocks(path, schema, NoBadRows())),
        lambda: prepare_events([path], tmp_path / "out", EVENTS),
        lambda: DataSource.find([folder], "criteo"),
        lambda: FileSource([path], schema),
        lambda: FileSource([folder], schema),
        lambda: FileSource([folder], schema, follow=True),
        lambda: DataSource.find([Path(__file__)], str(path)),
    )
    for call in calls:
        with pytest.raises(RowmeshError, match=r"train\.csv"):
            at_once(call)
    for call in (calls[0], calls[2]):
        with pytest.raises(RowmeshError, match=r"train\.csv: a pipe, no file"):
            at_once(call)
    assert at_once(lambda: find_event_schema(str(path))) is None


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    (folder / "train.csv").write_text("y,x,a\n1,2,p\n0,3,q\n1,1,p\n")
    return prepare({"train": [folder / "train.csv"]}, folder / "out", SCHEMA).folder


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    folder = tmp_path_factory.mktemp("events")
    rows = {"a": ["u"] * 4, "x": ["i", "j", "k", "i"], "y": np.arange(4), "s": ["p", "q", "p", "p"]}
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    return prepare_events([folder / "rows.parquet"], folder / "out", EVENTS).folder


def read_samples(folder):
    prepared = Prepared.open(folder)
    list(Loader(prepared, "train", batch_size=2))
    return prepared.counts("a"), prepared.vocabulary("a")


def read_sequences(folder):
    opened = Sequences.open(folder)
    return opened.user_values(), opened.item_values(), opened.side_values("s")


@pytest.mark.parametrize("kind", ["samples", "sequences"])
def test_a_pipe_in_the_place_of_a_prepared_file_is_an_error(kind, request, tmp_path):
    original, read = request.getfixturevalue(kind), {"samples": read_samples, "sequences": read_sequences}[kind]
    read(original)
    files = [path.relative_to(original) for path in original.rglob("*") if path.is_file()]
    assert len(files) > 4
    for number, name in enumerate(files):
        folder = shutil.copytree(original, tmp_path / str(number))
        pipe(folder / name)
        with pytest.raises(DataError, match=name.name):
            at_once(lambda folder=folder: read(folder))
