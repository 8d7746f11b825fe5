"""Files that are written to while they are prepared: their rest would be missing."""

import pytest

from rowmesh.data import Schema, prepare
from rowmesh.data.events import EventSchema, prepare_events
from rowmesh.errors import DataError

ROWS = "y,a,t\n" + "1,p,5\n0,q,6\n" * 20


@pytest.mark.parametrize("kind", ["samples", "events"])
def test_a_file_that_grows_while_it_is_prepared_is_an_error(tmp_path, kind):
    path, out = tmp_path / "rows.csv", tmp_path / "out"
    path.write_text(ROWS)
    schema, events = Schema.parse({"label": "y", "categorical": ["a"]}), EventSchema(user="y", item="a", time="t")

    def prepared(progress):
        if kind == "samples":
            return prepare({"train": [path]}, out, schema, progress=progress)
        return prepare_events([path], out, events, progress=progress)

    def grow(step, share):
        if "read" in step and path.read_text() == ROWS:
            with path.open("a") as file:
                file.write("1,r,7\n")

    with pytest.raises(DataError, match=r"rows.csv was written to while it was read, and rows may be missing"):
        prepared(grow)
    assert not out.exists()
    assert prepared(lambda *_: None).folder == out
