"""Sequences hold what a plain sort and a plain k-core give, whatever the size of the parts."""

import datetime
import gzip
import json
from collections import Counter
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowmesh.data.events import EventSchema, SequenceLoader, Sequences, find_event_schema, prepare, prepare_events
from rowmesh.data.events.prepare import _ends, _moment, _parts
from rowmesh.data.events.schema import LAYOUTS, EventSplit, Positive
from rowmesh.errors import ConfigurationError, DataError

SCHEMA = EventSchema(user="u", item="i", time="t")
REAL = Path(__file__).parents[3] / ".." / "shared" / "data"


def written(path, events, header="u,i,t"):
    path.write_text("\n".join([header, *(",".join(map(str, event)) for event in events)]) + "\n")
    return path


def prepared(tmp_path, events, schema=SCHEMA, **options):
    return prepare_events([written(tmp_path / "events.csv", events)], tmp_path / "out", schema, **options)


def histories(data):
    users, items = data.user_values().to_pylist(), data.item_values().to_pylist()
    return {
        users[u]: [(items[data.items[e]], int(data.times[e])) for e in range(data.offsets[u], data.offsets[u + 1])]
        for u in range(len(users))
    }


def expected(events, k):
    """The k-core, and each user's events by time; ties as they came."""
    while True:
        users, items = Counter(u for u, _, _ in events), Counter(i for _, i, _ in events)
        kept = [e for e in events if users[e[0]] >= k and items[e[1]] >= k]
        if kept == events:
            break
        events = kept
    out = {}
    for user, item, time in events:
        out.setdefault(user, []).append((item, time))
    return {user: sorted(history, key=lambda e: e[1]) for user, history in out.items()}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("part_events", [1, 7, 1 << 20])
def test_events_are_those_of_the_core_in_order(tmp_path, k, part_events):
    generator = np.random.default_rng(k)
    events = [
        (f"u{generator.zipf(1.5) % 20}", f"i{generator.zipf(1.6) % 15}", int(generator.integers(30)))
        for _ in range(200)
    ]
    data = prepared(tmp_path, events, SCHEMA.model_copy(update={"k_core": k}), part_events=part_events)
    wanted = expected(events, k)
    assert histories(data) == wanted
    assert list(histories(data)) == list(dict.fromkeys(u for u, _, _ in events if u in wanted))
    counts = np.bincount(data.items)
    assert (np.diff(counts) <= 0).all()
    ties = sum(len(h) > 1 and h[-1][1] == h[-2][1] for h in wanted.values())
    assert data.counts.num_tied_last == ties
    assert data.counts.num_outside_core == 200 - len(data.items)


def test_the_more_frequent_item_comes_first_where_the_schema_says_so(tmp_path):
    events = [("a", "rare", 5), ("a", "often", 5), ("b", "often", 1)]
    assert histories(prepared(tmp_path, events))["a"] == [("rare", 5), ("often", 5)]
    schema = SCHEMA.model_copy(update={"ties": "item"})
    assert histories(prepared(tmp_path, events, schema, overwrite=True))["a"] == [("often", 5), ("rare", 5)]


def test_only_positive_events_count(tmp_path):
    path = written(tmp_path / "e.csv", [("a", "x", 1, 5), ("a", "y", 2, 3), ("a", "z", 3, 4)], "u,i,t,rating")
    schema = EventSchema.parse({"user": "u", "item": "i", "time": "t", "positive": {"column": "rating", "minimum": 4}})
    data = prepare_events([path], tmp_path / "out", schema)
    assert histories(data) == {"a": [("x", 1), ("z", 3)]}
    assert data.counts.num_negative == 1


@pytest.mark.parametrize("part_events", [1, 1 << 20])
def test_side_columns_follow_their_events(tmp_path, part_events, monkeypatch):
    """Through the core, the sort and the filter; rows by frequency among what is kept, and one of missing values."""
    monkeypatch.setattr(prepare, "PART_EVENTS", 3)
    actions = ["look", "", "buy", "look", "share", "look", "buy"]
    events = [("a", f"i{n % 2}", 10 - n, 5, action, n // 2) for n, action in enumerate(actions)]
    events += [("b", "i0", 1, 1, "rare", 9), ("c", "i9", 1, 5, "rarer", 9)]  # not positive; outside the core
    schema = EventSchema.parse(
        {
            "user": "u",
            "item": "i",
            "time": "t",
            "positive": {"column": "rating", "minimum": 4},
            "k_core": 2,
            "side": ["action", "rating", "shelf/name"],
        }
    )
    path = written(tmp_path / "e.csv", events, "u,i,t,rating,action,shelf/name")
    data = prepare_events([path], tmp_path / "out", schema, part_events=part_events)
    assert data.num_side == {"action": 4, "rating": 1, "shelf/name": 4}
    assert data.side_values("action").to_pylist() == ["look", "buy", None, "share"]
    found = [data.side_values(name).to_numpy(zero_copy_only=False)[data.side[name]] for name in schema.side]
    expected = [(action or None, "5", str(n // 2)) for n, action in enumerate(actions)]
    assert list(zip(*found, strict=True)) == expected[::-1]
    (batch,) = SequenceLoader(data, "train", batch_size=4, max_length=3)
    assert {name: rows.tolist() for name, rows in batch.side.items()} == {
        name: rows[1:4].tolist() for name, rows in data.side.items()
    }
    (again,) = batch.split(1)
    assert all(again.side[name].equal(rows) for name, rows in batch.side.items())


@pytest.mark.parametrize(
    "side, says",
    [(["t"], "side names 't', which is the user, the item or the time"), (["a", "a"], "side names 'a' twice")],
)
def test_side_columns_that_cannot_be(side, says):
    with pytest.raises(ConfigurationError, match=says):
        EventSchema.parse({"user": "u", "item": "i", "time": "t", "side": side})


def test_a_side_column_that_was_changed_is_refused(tmp_path):
    path = written(tmp_path / "e.csv", [("a", "x", 1, "p"), ("a", "y", 2, "q")], "u,i,t,s")
    data = prepare_events([path], tmp_path / "out", SCHEMA.model_copy(update={"side": ("s",)}))
    rows = np.load(data.folder / "side_0.npy")
    np.save(data.folder / "side_0.npy", rows + 7)
    with pytest.raises(DataError, match=r"side_0\.npy"):
        Sequences.open(data.folder)
    with pytest.raises(DataError, match="side column 's' holds rows that do not exist"):
        Sequences.open(data.folder, verify=False)


def test_times_are_read_as_the_schema_says_and_bad_ones_are_kept_apart(tmp_path):
    events = [("a", "x", "2022-04-10 08:59:09"), ("a", "y", "yesterday"), ("", "z", "2022-04-10 08:59:09")]
    schema = SCHEMA.model_copy(update={"time_format": "%Y-%m-%d %H:%M:%S"})
    data = prepared(tmp_path, events, schema)
    assert histories(data) == {"a": [("x", 1649581149)]}
    assert data.counts.bad_rows == 2
    milliseconds = SCHEMA.model_copy(update={"time_unit": "ms"})
    ordered = prepared(tmp_path, [("a", "x", 1999), ("a", "y", 1001)], milliseconds, overwrite=True)
    assert histories(ordered) == {"a": [("y", 1), ("x", 1)]}


def test_the_last_two_events_are_held_out(tmp_path):
    data = prepared(tmp_path, [("a", f"i{n}", n) for n in range(4)] + [("b", "i0", 0), ("b", "i1", 1)])
    assert data.train_ends.tolist() == [2, 6]
    assert data.validation_ends.tolist() == [3, 6]
    assert data.users("train").tolist() == [0, 1]
    assert data.users("test").tolist() == data.users("validation").tolist() == [0]
    np.testing.assert_array_equal(data.popularity("train"), [2, 2, 0, 0])
    np.testing.assert_array_equal(data.popularity("test"), [2, 2, 1, 0])


@hypothesis.given(times=st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=9).map(sorted), min_size=1))
def test_one_moment_divides_all_users(times):
    flat = np.concatenate(times)
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in times])])
    split = EventSplit(by="time", validation=0.2, test=0.3)
    train, validation = _ends(flat, offsets, split)
    moments = [_moment(flat, 0.5), _moment(flat, 0.7)]
    for ends, moment in zip((train, validation), moments, strict=True):
        for user, end in enumerate(ends):
            assert (flat[offsets[user] : end] < moment).all()
            assert (flat[end : offsets[user + 1]] >= moment).all()


def test_parts_hold_all_users_once():
    offsets = np.array([0, 5, 6, 20, 21])
    assert list(_parts(offsets, 6)) == [(0, 2), (2, 3), (3, 4)]


def test_mistakes_are_named(tmp_path):
    with pytest.raises(DataError, match="no event is left of 1"):
        prepared(tmp_path, [("a", "x", 1)], SCHEMA.model_copy(update={"k_core": 2}))
    with pytest.raises(DataError, match="column 'i' is missing"):
        prepare_events([written(tmp_path / "e.csv", [("a", 1)], "u,t")], tmp_path / "out", SCHEMA)
    with pytest.raises(ConfigurationError, match="unknown key 'usr'"):
        EventSchema.parse({"usr": "u", "user": "u", "item": "i", "time": "t"})
    with pytest.raises(ConfigurationError, match="movielens-1m"):
        EventSchema.load("movielens1m")
    with pytest.raises(DataError, match="run rowmesh data prepare"):
        Sequences.open(tmp_path)


def test_a_folder_that_was_changed_is_refused(tmp_path):
    data = prepared(tmp_path, [("a", "x", 1), ("a", "y", 2)])
    path = data.folder / "items.npy"
    path.write_bytes(path.read_bytes()[:-4] + b"\xff\xff\xff\x7f")
    with pytest.raises(DataError):
        Sequences.open(data.folder)
    with pytest.raises(DataError, match="items that do not exist"):
        Sequences.open(data.folder, verify=False)


def test_ratings_of_movielens_1m_are_read(tmp_path):
    path = tmp_path / "ratings.dat"
    path.write_text("1::1193::5::978300760\n1::661::3::978302109\n")
    schema = LAYOUTS["movielens-1m"].model_copy(update={"k_core": 1})
    assert histories(prepare_events([path], tmp_path / "out", schema)) == {
        "1": [("1193", 978300760), ("661", 978302109)]
    }


@pytest.mark.skipif(not (REAL / "sequences").is_dir(), reason="needs the real event tables")
def test_beauty_has_the_published_numbers(tmp_path):
    schema = EventSchema(user="user_id", item="item_id", time="timestamp", delimiter="\t", k_core=5)
    data = prepare_events([REAL / "sequences" / "beauty_timed.tsv.gz"], tmp_path / "out", schema)
    counts = data.counts
    assert (counts.num_users, counts.num_items, counts.num_events) == (22_363, 12_101, 198_502)
    assert counts.num_tied_last / counts.num_users == pytest.approx(0.435, abs=5e-4)
    with gzip.open(REAL / "sequences" / "beauty_timed.tsv.gz", "rt") as file:
        first = [line.split() for line in file if line.startswith("1\t")]
    assert [item for item, _ in histories(data)["1"]] == [item for _, item, _ in first]


def test_bad_rows_say_what_is_wrong(tmp_path):
    rows = [("a", "x", "2024-02-29", 5), ("b", "x", "2024-02-30", 5), ("", "x", "2024-02-29", 5)]
    rows += [("c", "", "2024-02-29", 5), ("d", "x", "2024-02-29", "many")]
    path = written(tmp_path / "e.csv", rows, "u,i,t,n")
    path.write_bytes(path.read_bytes() + b"e,x,2024-02-\xe9,5\n")
    schema = EventSchema(user="u", item="i", time="t", time_format="%Y-%m-%d", positive=Positive(column="n"))
    data = prepare_events([path], tmp_path / "out", schema)
    assert histories(data) == {"a": [("x", 1709164800)]}
    kept = [json.loads(line) for line in (data.folder / "quarantine.jsonl").read_text().splitlines()]
    assert [(row["line"], row["reason"]) for row in kept] == [
        (3, "t is '2024-02-30', not a time like %Y-%m-%d"),
        (4, "u is '', not a user"),
        (5, "i is '', not an item"),
        (6, "n is 'many', not a number"),
        (7, r"t is '2024-02-\\xe9', not a time like %Y-%m-%d"),
    ]
    assert kept[0]["row"] == "b, x, 2024-02-30"


def test_events_of_one_second_are_in_order_of_their_fractions(tmp_path):
    events = [("a", "x", "2024-02-29 10:00:00.75"), ("a", "y", "2024-02-29 10:00:00.5")]
    data = prepared(tmp_path, events, SCHEMA.model_copy(update={"time_format": "%Y-%m-%d %H:%M:%S.%f"}))
    assert histories(data) == {"a": [("y", 1709200800), ("x", 1709200800)]}


def test_a_time_format_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match="time_format: 'Q' is a bad directive"):
        EventSchema.parse({"user": "u", "item": "i", "time": "t", "time_format": "%Q"})


def test_that_no_event_is_left_says_what_was_bad(tmp_path):
    with pytest.raises(
        DataError, match=r"of 0; 2 rows were bad: (.|\n)*events\.csv:2: t is 'now', not a time like unix"
    ):
        prepared(tmp_path, [("a", "x", "now"), ("a", "x", "then")])


@pytest.mark.parametrize("time_format", ["unix", "%Y-%m-%d"])
@pytest.mark.parametrize("kind", [pa.date32(), pa.date64(), pa.timestamp("ns"), pa.timestamp("us", "UTC")])
def test_dates_and_timestamps_need_no_format(tmp_path, kind, time_format):
    times = pa.array([datetime.date(2024, 2, 29)]).cast(pa.date64()).cast(pa.timestamp("ms"), safe=False)
    times = times.cast(pa.date32()).cast(kind) if pa.types.is_date(kind) else times.cast(kind)
    pq.write_table(pa.table({"u": ["a"], "i": ["x"], "t": times}), tmp_path / "e.parquet")
    schema = SCHEMA.model_copy(update={"format": "parquet", "time_format": time_format})
    data = prepare_events([tmp_path / "e.parquet"], tmp_path / "out", schema)
    assert histories(data) == {"a": [("x", 1709164800)]}


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("u", pa.array([["a"]]), r"column 'u' holds lists \(list<"),
        ("s", pa.array([["a"]]), r"column 's' holds lists \(list<"),
        ("t", pa.array([[1]]), "column 't' of type list<.*> holds no times"),
        ("t", pa.array([True]), "column 't' of type bool holds no times"),
        ("n", pa.array([[1]]), "column 'n' of type list<.*> holds no numbers"),
    ],
)
def test_columns_that_cannot_be_are_named_before_anything_is_read(tmp_path, column, values, message):
    good = {"u": pa.array(["a"]), "i": pa.array(["x"]), "t": pa.array([1]), "n": pa.array([1]), "s": pa.array(["p"])}
    files = [tmp_path / "good.parquet", tmp_path / "bad.parquet"]
    for path, columns in zip(files, (good, good | {column: values}), strict=True):
        pq.write_table(pa.table(columns), path)
    schema = EventSchema(format="parquet", user="u", item="i", time="t", side=("s",), positive=Positive(column="n"))
    with pytest.raises(DataError, match=rf"bad\.parquet: {message}"):
        prepare_events(files, tmp_path / "out", schema)


def test_files_of_events_are_named_once(tmp_path):
    path = written(tmp_path / "e.csv", [("a", "x", 1)])
    with pytest.raises(DataError, match="are one file; name it once"):
        prepare_events([path, path], tmp_path / "out", SCHEMA)
    with pytest.raises(DataError, match="is a folder; name files of events"):
        prepare_events([tmp_path], tmp_path / "out", SCHEMA)


def test_a_byte_order_mark_is_no_part_of_a_schema(tmp_path):
    path = tmp_path / "events.toml"
    path.write_text('user = "u"\nitem = "i"\ntime = "t"\n', encoding="utf-8-sig")
    assert EventSchema.load(path) == find_event_schema(str(path)) == SCHEMA
