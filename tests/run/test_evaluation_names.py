"""Metrics of other samples replace none: what evaluations are called."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rowmesh.data.raw import RawData
from rowmesh.data.schema import Schema
from rowmesh.run.config import DataConfig
from rowmesh.run.evaluation_names import evaluation_name, place_of
from rowmesh.run.run_folder import RunFolder


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.evaluations.mkdir(parents=True)
    return folder


def evaluate(run, trained, data, split):
    """Leaves a file as an evaluation does; returns its name."""
    name = evaluation_name(run, trained, data, split)
    run.evaluation(name).write_text(json.dumps({"data": place_of(data, split)}))
    return name


def raw(test=""):
    section = DataConfig(folder="rows", source="raw", raw_schema="criteo", **({"test": test} if test else {}))
    return section, RawData(location="rows", schema=Schema.load("criteo"))


def test_raw_rows_have_the_name_of_their_file_or_folder(run):
    trained, data = raw("held_out/test")
    places = ("./held_out/test", "days/friday.csv", "days/test")
    assert [evaluate(run, trained, data, place) for place in places] == ["test", "friday.csv", "days-test"]


@pytest.mark.parametrize("test", ["", "held_out/test"])
def test_two_places_of_one_name_have_two_names(run, test):
    trained, data = raw(test)
    places = ("a/day", "b/day", "x/b/day", "a/test", "b/test")
    found = [evaluate(run, trained, data, place) for place in places]
    assert found == ["day", "b-day", "x-b-day", *(["a-test", "b-test"] if test else ["test", "b-test"])]
    assert [evaluate(run, trained, data, str(Path(place).resolve())) for place in places] == found, "the same again"
    if test:
        assert evaluate(run, trained, data, test) == "test"


def test_names_end_with_a_number_where_folders_do_not_tell_places_apart(run):
    trained, data = raw()
    places = ["/a-b/day", "/a/b-day", "/a-b-day", "/a/b/day"]
    found = [evaluate(run, trained, data, place) for place in places]
    assert found[:3] == ["day", "b-day", "a-b-day"]
    assert len({*found}) == 4
    assert [evaluate(run, trained, data, place) for place in places] == found


def test_streams_of_two_servers_have_two_names_without_a_password(run):
    trained, data = raw()
    trained, data = trained.model_copy(update={"stream": "clicks"}), replace(data, stream="clicks")
    urls = ("redis://:secret@one:6379/0", "redis://two:6379/0")
    assert [evaluate(run, trained, data, url) for url in urls] == ["clicks", "redis-clicks"]
    assert json.loads(run.evaluation("clicks").read_text())["data"] == "redis://one:6379/0 stream clicks"


def test_prepared_data_that_are_not_the_runs_have_their_name_before_the_split(run, tmp_path):
    trained = DataConfig(folder=str(tmp_path / "clicks"))
    own, other = (SimpleNamespace(folder=folder, place=str(folder)) for folder in (tmp_path / "clicks", tmp_path / "b"))
    assert [evaluate(run, trained, data, "test") for data in (other, own, other)] == ["b-test", "test", "b-test"]


def test_a_file_that_cannot_be_read_is_replaced(run):
    trained, data = raw()
    run.evaluation("day").write_text("[" * 100_000)
    assert evaluate(run, trained, data, "a/day") == "day"
