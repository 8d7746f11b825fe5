"""Publishing removes what it published, and nothing else."""

import pytest

from rowmesh.errors import StoreError
from rowmesh.publish import PublishedReader, Publisher, open_target
from tests.publish.test_publisher import TABLES, Model, seen


@pytest.fixture(params=["parquet", "rocksdb"])
def kind(request):
    if request.param == "rocksdb":
        pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")
    return request.param


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def snapshots(folder):
    """What looks like the folder of a generation."""
    (folder / "20261101").mkdir(parents=True)
    (folder / "20261101" / "precious.csv").write_text("1,2\n")


def beside(folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


def begun(folder):
    (folder / "00000001").mkdir(parents=True)
    (folder / "00000001" / "manifest.json").write_text("{}")


def pointer(folder):
    folder.mkdir()
    (folder / "newest.json").write_text("{}")


@pytest.mark.parametrize("foreign", [snapshots, beside, begun, pointer])
def test_a_folder_of_something_else_is_refused_as_it_is(tmp_path, kind, foreign):
    folder = tmp_path / "published"
    foreign(folder)
    before, model, target = contents(folder), Model(), open_target(f"{kind}:{folder}")
    for number in (20261101, 1):
        target.remove(number)
    assert target.numbers() == []
    match = "something that is no generation" if foreign is pointer else "holds other things .*rowmesh did not make it"
    with pytest.raises(Exception, match=match):
        model.publish(Publisher(target, TABLES))
    assert contents(folder) == before


def test_what_comes_between_generations_stays(tmp_path, kind):
    folder, model = tmp_path / "published", Model()
    target = open_target(f"{kind}:{folder}")
    publisher = Publisher(target, TABLES, keep_last=1, whole_every=1)
    model.publish(publisher)
    snapshots(folder)
    (folder / "7").mkdir()
    (folder / "00000009").mkdir()
    (folder / "00000001" / "notes.txt").write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    model.publish(publisher)
    assert (folder / "20261101" / "precious.csv").exists()
    assert {path.name for path in (folder / "00000001").iterdir()} == {"notes.txt"}
    (folder / "00000002").rename(elsewhere)
    (folder / "00000002").symlink_to(elsewhere)
    kept = contents(elsewhere)
    model.publish(publisher)
    assert contents(elsewhere) == kept
    assert (folder / "7").exists()
    assert (folder / "00000009").exists()
    assert target.numbers() == [3]
    assert seen(PublishedReader(target)) == model.seen()


@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_what_is_in_the_way_of_a_generation_is_named(tmp_path, kind, what):
    folder, model = tmp_path / "published", Model()
    target = open_target(f"{kind}:{folder}")
    publisher = Publisher(target, TABLES)
    model.publish(publisher)
    place = folder / "00000002"
    if what == "folder":
        begun(tmp_path / "other")
        (tmp_path / "other" / "00000001").rename(place)
    elif what == "file":
        place.write_text("mine")
    else:
        place.symlink_to(tmp_path / "nowhere")
    before = contents(folder)
    with pytest.raises(StoreError, match=r"00000002 is in the way of generation 2, and rowmesh did not publish it"):
        model.publish(publisher)
    assert contents(folder) == before
    assert PublishedReader(target).generation.number == 1
