"""`rowmesh recommend`: the items that a run ranks highest, by the names of the raw files."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowmesh.cli.__main__ import main
from rowmesh.cli.recommend import _moment, _seconds
from rowmesh.data.events.read import read_events
from rowmesh.data.events.schema import EventSchema
from rowmesh.data.progress import silent
from rowmesh.data.quarantine import Quarantine
from rowmesh.data.vocabulary import Vocabulary
from rowmesh.errors import ConfigurationError
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from rowmesh.run.sequence.recommend import _rows_of, recommend


@pytest.fixture
def run(sequence_file, tmp_path):
    run_training(resolve(sequence_file, ["train.epochs=1"]))
    return tmp_path / "run"


def history(events, path, *, held_out=1):
    """The events of all users but their last ones, as raw rows."""
    items, lines = events.item_values().to_pylist(), ["user_id,item_id,timestamp"]
    for user, (start, end) in enumerate(zip(events.offsets[:-1], events.offsets[1:], strict=True)):
        lines += [f"u{user},{items[events.items[at]]},{events.times[at]}" for at in range(start, end - held_out)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_item_that_came_is_in_the_top_as_often_as_the_test_says(run, events, tmp_path):
    """Every user asked at the time of the last event, alone, as the evaluation asks."""
    file, hits = history(events, tmp_path / "all.csv"), 0
    names = events.item_values().to_pylist()
    alone = recommend(run, file, top=10, seen="remove")
    found = alone.table.to_pydict()
    for user, last in enumerate(events.offsets[1:] - 1):
        own = [item for name, item in zip(found["user"], found["item"], strict=True) if name == f"u{user}"]
        assert len(own) == 10
        seen = {names[item] for item in events.items[events.offsets[user] : last]}
        assert not seen & set(own)
        hits += names[events.items[last]] in own
    assert hits > 0
    scores = np.array(found["score"]).reshape(-1, 10)
    assert (np.diff(scores) <= 0).all()


def test_later_and_unknown_events_are_left_out_and_counted(run, events, tmp_path, capsys):
    file = history(events, tmp_path / "all.csv", held_out=0)
    with file.open("a") as stream:
        stream.write("new,no_such_item,946700000\n")
    at = int(np.median(events.times))
    main_at = ["recommend", str(run), "--user-history", str(file), "--top", "3", "--at", str(at)]
    with pytest.raises(SystemExit) as stop:
        main(main_at)
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert f"left out  {int((events.times > at).sum()):,} events after that time" in out
    assert "left out  1 events of items that the training did not have" in out
    assert "nothing   for" in out
    table = pq.read_table(f"{file}.top.parquet")
    first = table["user"][0].as_py()
    shown = re.findall(r"^\W*(u\d+)\W+(\d+)\W", out, re.MULTILINE)
    assert shown == [(first, str(rank)) for rank in (1, 2, 3)]
    assert f"shown     the first user, 3 of {table.num_rows:,} rows; the file has the rest" in out
    assert set(pq.read_table(f"{file}.top.parquet").column_names) == {"user", "rank", "item", "score"}
    with pytest.raises(SystemExit):
        main(main_at)
    assert "is there already" in capsys.readouterr().err


def test_the_histories_are_never_replaced_by_the_recommendations(run, events, tmp_path, capsys):
    file = history(events, tmp_path / "all.csv")
    before, link = file.read_bytes(), tmp_path / "link.csv"
    link.symlink_to(file)
    for out in (file, link):
        with pytest.raises(SystemExit):
            main(["recommend", str(run), "--user-history", str(file), "--out", str(out), "--overwrite"])
        assert f"--out {out} is the file to read" in capsys.readouterr().err.replace("\n", " ")
    assert file.read_bytes() == before


def test_a_name_that_is_no_utf8_changes_no_other(run, events, tmp_path):
    """Neither an item's, nor a user's."""
    file = history(events, tmp_path / "all.csv")
    known = recommend(run, file, top=5, at=2**40)
    strange = tmp_path / "more.csv"
    item = events.item_values()[0].as_py().encode()
    strange.write_bytes(file.read_bytes() + b"new,caf\xe9,946700000\n" + b"us\xe9r,%s,946700000\n" % item)
    found = recommend(run, strange, top=5, at=2**40)
    assert (found.num_unknown, found.without) == (1, ["new"])
    assert found.table.slice(0, len(known.table)).equals(known.table)
    assert found.table["user"].to_pylist()[len(known.table) :] == ["us\\xe9r"] * 5


@pytest.mark.parametrize("strange", [[], ["known"], ["given"], ["known", "given"]])
def test_rows_are_found_by_the_bytes_of_names(strange):
    values = {"known": [b"a", b"7", b""], "given": [b"7", b"b", b"a", b""]}
    coded = Vocabulary("x")
    coded.encode(pa.array([*values["given"], *([b"\xff"] if "given" in strange else [])]))
    known = pa.array([*values["known"], *([b"\xff"] if "known" in strange else [])])
    known = known if "known" in strange else known.cast(pa.large_string())
    last = [] if "given" not in strange else [3 if "known" in strange else -1]
    assert _rows_of(coded, known).tolist() == [1, -1, 0, 2, *last]
    assert _rows_of(coded, pa.array([7, None])).tolist()[:4] == [0, -1, -1, 1]


def test_a_moment_far_away_is_no_traceback():
    assert _moment(1 << 41).endswith("s after 1970")
    assert _seconds(str(1 << 41)) == 1 << 41
    for text in ("1e308", str(10**30), "-" + "9" * 40):
        with pytest.raises(ConfigurationError, match="is no time; give seconds since 1970"):
            _seconds(text)


@pytest.mark.parametrize("time", ["1e308", "-1e308", "9" * 400, "nan"])
def test_an_event_at_a_time_that_cannot_be_is_a_bad_row(tmp_path, time):
    """Without a warning of NumPy, which is an error here."""
    (tmp_path / "events.csv").write_text(f"user,item,time\nu,a,{time}\nu,b,5\n")
    schema = EventSchema.parse({"user": "user", "item": "item", "time": "time"})
    with Quarantine(tmp_path / "bad", 10, tmp_path / "kept") as quarantine:
        events = read_events([tmp_path / "events.csv"], tmp_path / "read", schema, quarantine, silent)
        assert [block["time"].tolist() for block in events.blocks()] == [[5_000_000]]
    assert quarantine.num_bad_rows == 1
