"""Batches of raw rows: every rank's part of the same global batches, read once, from any place."""

import json
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.data.quarantine import NoBadRows
from rowmesh.data.raw import FileSource, RawLoader, ids_of
from rowmesh.data.raw.encoder import sparse_of
from rowmesh.data.raw.files import _TextChunk
from rowmesh.data.schema import Categorical, Schema
from rowmesh.errors import ConfigurationError, DataError

SCHEMA = Schema(
    label="click",
    weight="weight",
    dense=("price",),
    dense_transform="none",
    categorical=["user", {"name": "tags", "separator": "|"}],
)
PARQUET = Schema.parse({**SCHEMA.model_dump(), "format": "parquet", "categorical": ["user", "tags"]})
TYPES = pa.schema(
    {
        "click": pa.int64(),
        "weight": pa.float32(),
        "price": pa.float64(),
        "user": pa.string(),
        "tags": pa.list_(pa.string()),
    }
)


class Kept:
    """A quarantine that keeps what it is told."""

    def __init__(self):
        self.rows = []

    def add(self, file, line, reason, row):
        self.rows.append((file.name, line, reason))


def waiting_by(wait):
    """What a loader does with batches, where it waits for more by a function."""

    def agree(mine):
        if mine == "waiting":
            wait()
        return mine

    return agree


def rows_of(first, count):
    return [
        {
            "click": n % 2,
            "weight": 1 + n % 3,
            "price": None if n % 5 == 0 else n / 4,
            "user": f"user {n % 7}",
            "tags": [f"t{k}" for k in range(n % 3)],
        }
        for n in range(first, first + count)
    ]


def write_text(path, rows, more=""):
    lines = ["click,weight,price,user,tags"]
    for row in rows:
        price = "" if row["price"] is None else row["price"]
        lines.append(f"{row['click']},{row['weight']},{price},{row['user']},{'|'.join(row['tags'])}")
    path.write_text("\n".join(lines) + "\n" + more)


def folder_of(tmp_path, sizes, kind):
    folder, first = tmp_path / kind, 0
    folder.mkdir()
    for number, size in enumerate(sizes):
        rows = rows_of(first, size)
        if kind == "text":
            write_text(folder / f"{number:03}.csv", rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows, TYPES), folder / f"{number:03}.parquet", row_group_size=4)
        first += size
    return folder


def joined(batches):
    """The rows of some batches."""
    return [row for batch in batches for row in plain(batch)]


def loader(folder, kind="text", **options):
    schema = SCHEMA if kind == "text" else PARQUET
    options = {"batch_size": 6, "quarantine": NoBadRows(), "prefetch": 0, **options}
    return RawLoader(FileSource([folder], schema), schema, **options)


def plain(batch):
    """A batch as plain rows."""
    ids, offsets = batch.sparse.ids.tolist(), batch.sparse.jagged_offsets.tolist()
    size = batch.sparse.batch_size
    bags = [ids[offsets[i] : offsets[i + 1]] for i in range(2 * size)]
    return [
        (batch.labels[i].item(), batch.weights[i].item(), batch.dense[i, 0].item(), bags[i], bags[size + i])
        for i in range(size)
    ]


def expected_rows(first, count):
    def hashed(values):
        return ids_of(pa.array(values, pa.string())).tolist()

    return [
        (row["click"], row["weight"], row["price"] or 0.0, hashed([row["user"]]), hashed(row["tags"]))
        for row in rows_of(first, count)
    ]


@pytest.mark.parametrize("kind", ["text", "parquet"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_the_same_batches(tmp_path, kind, world_size):
    folder, total = folder_of(tmp_path, [10, 1, 7, 0, 5], kind), 23
    parts = [list(loader(folder, kind, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert {len(part) for part in parts} == {4}
    for number, batches in enumerate(zip(*parts, strict=True)):
        size = min(6, total - 6 * number)
        assert joined(batches) == expected_rows(6 * number, size)
        sizes = [batch.sparse.batch_size for batch in batches]
        assert max(sizes) - min(sizes) <= 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 8), st.data())
def test_goes_on_from_every_place_under_any_number_of_ranks(tmp_path_factory, sizes, batch_size, data):
    folder = folder_of(tmp_path_factory.mktemp("raw"), sizes, "text")
    whole = [plain(batch) for batch in loader(folder, batch_size=batch_size)]
    if not whole:
        return
    stop = data.draw(st.integers(0, len(whole)))
    first = loader(folder, batch_size=batch_size, prefetch=2)
    batches = iter(first)
    for _ in range(stop):
        next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    batches.close()
    found = []
    for rank in range(2):
        second = loader(folder, batch_size=batch_size, rank=rank, world_size=2)
        second.load_state_dict(state)
        found.append([plain(batch) for batch in second])
        assert second.batches == len(whole)
    assert [a + b for a, b in zip(*found, strict=True)] == whole[stop:]


def test_positions_of_steps_behind_the_reader(tmp_path):
    folder = folder_of(tmp_path, [20], "text")
    ahead = loader(folder)
    whole = [plain(batch) for batch in ahead]
    for steps in range(4):
        behind = loader(folder)
        behind.load_state_dict(ahead.state_after(steps))
        assert [plain(batch) for batch in behind] == whole[steps:]


def test_bad_rows_are_missing_in_their_batch(tmp_path):
    folder = folder_of(tmp_path, [4], "text")
    write_text(folder / "001.csv", rows_of(4, 1), more="2,1,1,user 5,\nno columns\n1,1,0.25,user 6,\n")
    whole, parts = Kept(), []
    alone = [plain(batch) for batch in loader(folder, batch_size=4, quarantine=whole)]
    assert [len(batch) for batch in alone] == [4, 2]
    for rank in range(2):
        parts.append(Kept())
        batches = loader(folder, batch_size=4, quarantine=parts[rank], rank=rank, world_size=2)
        assert (
            joined(batches)
            == [row for batch in alone for row in (batch[:2], batch[2:])[rank] if len(batch) == 4]
            + ([alone[1][:1], alone[1][1:]][rank])
        )
    assert sorted(whole.rows) == sorted(parts[0].rows + parts[1].rows)
    assert [(name, line) for name, line, _ in sorted(whole.rows)] == [("001.csv", 3), ("001.csv", 4)]


def test_files_that_appear_later_are_read_until_the_end(tmp_path):
    folder = folder_of(tmp_path, [5], "text")
    looks = []

    def wait():
        looks.append(len(looks))
        if len(looks) == 1:
            write_text(folder / "001.csv.tmp", rows_of(5, 4))
        elif len(looks) == 2:
            (folder / "001.csv.tmp").rename(folder / "001.csv")
        else:
            write_text(folder / "002.csv", rows_of(9, 1))
            (folder / "_END").touch()

    source = FileSource([folder], SCHEMA, follow=True)
    batches = RawLoader(
        source,
        SCHEMA,
        batch_size=4,
        quarantine=NoBadRows(),
        multi_hot=(False, True),
        agree=waiting_by(wait),
        prefetch=0,
    )
    assert joined(batches) == expected_rows(0, 10)
    assert len(looks) == 3


def test_work_is_linear_in_the_number_of_files(tmp_path, monkeypatch):
    """Both of a look at a followed folder and of a batch of many small files."""
    folder, calls, number = tmp_path / "many", {"compared": 0, "measured": 0}, 300
    folder.mkdir()
    for each in range(number):
        write_text(folder / f"{each:03}.csv", rows_of(each, 1))
    (folder / "_END").touch()
    compare, measure = Path.__eq__, _TextChunk.__len__

    def compared(path, other):
        calls["compared"] += 1
        return compare(path, other)

    def measured(chunk):
        calls["measured"] += 1
        return measure(chunk)

    monkeypatch.setattr(Path, "__eq__", compared)
    monkeypatch.setattr(_TextChunk, "__len__", measured)
    source = FileSource([folder], SCHEMA, follow=True)
    source._check_order(source.files, source.files)
    with pytest.raises(DataError, match=r"000.csv was read and is gone"):
        source._check_order(source.files[1:], source.files)
    (batch,) = RawLoader(source, SCHEMA, batch_size=number, quarantine=NoBadRows(), prefetch=0)
    assert batch.sparse.batch_size == number
    assert 0 < calls["compared"] < 8 * number
    assert 0 < calls["measured"] < 12 * number


def grown(path, rows):
    with path.open("ab") as file:
        file.write(rows)


def followed(folder, state=None, wait=lambda: None):
    source = FileSource([folder], SCHEMA, follow=True)
    batches = RawLoader(source, SCHEMA, batch_size=4, quarantine=NoBadRows(), agree=waiting_by(wait), prefetch=0)
    if state is not None:
        batches.load_state_dict(state)
    return batches


@pytest.mark.parametrize("when", ["waiting", "next", "end", "reading"])
def test_a_followed_file_that_grows_is_an_error(tmp_path, when):
    """Its rest would be lost."""
    folder = folder_of(tmp_path, [8], "text")
    last = sorted(folder.iterdir())[-1]
    more, step = last.read_bytes().split(b"\n", 1)[1][:20], iter(range(9))

    def wait():
        if (number := next(step)) == 0:
            if when == "next":
                write_text(folder / "zzz.csv", rows_of(20, 4))
            if when == "end":
                (folder / "_END").touch()
            grown(last, more)
        assert number < 3

    batches = followed(folder, wait=wait)

    def read():
        for _ in batches:
            if when == "reading":
                grown(last, more)

    with pytest.raises(
        DataError, match=rf"{last.name} has [\d,]+ bytes, and had [\d,]+ when it was read: what came later"
    ):
        read()


def test_a_file_that_grew_while_a_run_was_stopped_is_an_error(tmp_path):
    for number, name in enumerate("abd"):
        write_text(tmp_path / f"{name}.csv", rows_of(8 * number, 8))
    (tmp_path / "_END").touch()
    first = followed(tmp_path)
    batches, states = iter(first), []
    for _ in range(6):
        next(batches)
        states.append(json.loads(json.dumps(first.state_dict())))
    batches.close()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for name, state, message in (
        ("b", states[2], r"b\.csv has [\d,]+ bytes, and had"),
        ("b", states[4], r"one of the 2 files before d.csv, .* written to last was .*b\.csv"),
        ("d", states[2], None),
    ):
        grown(tmp_path / f"{name}.csv", before[tmp_path / "b.csv"].split(b"\n", 1)[1])
        if message is None:
            assert len(list(followed(tmp_path, state))) == 5
        else:
            with pytest.raises(DataError, match=message):
                list(followed(tmp_path, state))
        (tmp_path / f"{name}.csv").write_bytes(before[tmp_path / f"{name}.csv"])
        assert len(list(followed(tmp_path, state))) == 6 - state["batches"]


def test_a_file_that_would_be_skipped_is_an_error(tmp_path):
    folder = folder_of(tmp_path, [5, 3], "text")

    def wait():
        write_text(folder / "0005.csv", rows_of(0, 1))

    source = FileSource([folder], SCHEMA, follow=True)
    batches = RawLoader(source, SCHEMA, batch_size=4, quarantine=NoBadRows(), agree=waiting_by(wait), prefetch=0)
    with pytest.raises(DataError, match=r"0005.csv appeared after 001.csv was read, and its name comes before"):
        list(batches)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_file_that_appeared_while_a_run_was_stopped_is_an_error(tmp_path, stop):
    """Unless it comes after all that was read."""
    for number, name in enumerate("abd"):
        write_text(tmp_path / f"{name}.csv", rows_of(4 * number, 4))
    first = loader(tmp_path, batch_size=4)
    batches = iter(first)
    for _ in range(stop):
        next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    batches.close()
    for name in "ce":
        write_text(tmp_path / f"{name}.csv", rows_of(0, 4))
    (tmp_path / "_END").touch()

    def resumed(state):
        second = RawLoader(
            FileSource([tmp_path], SCHEMA, follow=True), SCHEMA, batch_size=4, quarantine=NoBadRows(), prefetch=0
        )
        second.load_state_dict(state)
        return len(list(second))

    if stop < 3:
        assert resumed(state) == 5 - stop
        return
    with pytest.raises(
        DataError, match=r"3 files come before d.csv, .* and 2 were read before it: some appeared after"
    ):
        resumed(state)
    (tmp_path / "b.csv").rename(tmp_path / "f.csv")  # as many as before
    with pytest.raises(DataError, match=r"2 files come before d.csv, .* and 2 were read before it: some are gone or"):
        resumed(state)
    position = {name: value for name, value in state["position"].items() if name not in ("before", "size")}
    with pytest.raises(DataError, match="the position has no before, size: it is none in files; give a position"):
        resumed({**state, "position": position})


def test_a_thread_that_waits_ends_with_the_loader(tmp_path):
    folder = folder_of(tmp_path, [5], "text")
    source = FileSource([folder], SCHEMA, follow=True)
    over = threading.Event()

    class OverError(Exception):
        pass

    def wait():
        if over.wait(0.01):
            raise OverError

    batches = iter(RawLoader(source, SCHEMA, batch_size=4, quarantine=NoBadRows(), agree=waiting_by(wait), prefetch=2))
    next(batches)
    over.set()
    with pytest.raises(OverError):
        next(batches)


def test_a_loader_of_a_source_without_more_rows_can_be_closed(tmp_path):
    folder = folder_of(tmp_path, [5], "text")
    source, waits = FileSource([folder], SCHEMA, follow=True), []
    batches = iter(
        RawLoader(
            source, SCHEMA, batch_size=4, quarantine=NoBadRows(), agree=waiting_by(lambda: waits.append(1)), prefetch=2
        )
    )
    next(batches)
    closing = threading.Thread(target=batches.close, daemon=True)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive()
    assert not waits


def test_changed_files_are_named(tmp_path):
    folder = folder_of(tmp_path, [5, 5], "text")
    first = loader(folder)
    next(iter(first))
    write_text(folder / "001.csv", [])
    second = loader(folder)
    second.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match=r"001.csv has 29 bytes, and had \d+ when it was read: it is not the file"):
        list(second)
    (folder / "001.csv").unlink()
    with pytest.raises(DataError, match=r"the position is in 001.csv, row 1, and there is no such file any more"):
        list(second)


def test_files_of_one_name_in_several_folders_are_told_apart(tmp_path):
    files = [tmp_path / day / "part.csv" for day in ("1", "2", "3")]
    for number, path in enumerate(files):
        path.parent.mkdir()
        write_text(path, rows_of(4 * number, 4))

    def made():
        source = FileSource(files, SCHEMA)
        return RawLoader(source, SCHEMA, batch_size=3, quarantine=NoBadRows(), multi_hot=(False, True), prefetch=0)

    first = made()
    batches = iter(first)
    for done in range(4):
        second = made()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert joined(second) == expected_rows(3 * done, 12 - 3 * done)
        next(batches)


def test_a_folder_without_files_to_read_is_refused(tmp_path):
    (tmp_path / "day").mkdir()
    (tmp_path / "0.csv.tmp").touch()
    with pytest.raises(DataError, match=r"has no files to read; .* and folders in it are left out"):
        FileSource([tmp_path], SCHEMA)
    (tmp_path / "_END").touch()
    assert list(FileSource([tmp_path], SCHEMA, follow=True).chunks(None)) == []
    write_text(tmp_path / "0.csv", rows_of(0, 1))
    source = FileSource([tmp_path], SCHEMA)
    (tmp_path / "0.csv").unlink()
    with pytest.raises(DataError, match="has no files to read"):
        list(source.chunks(None))


@pytest.mark.parametrize("follow", [False, True])
def test_a_link_to_nothing_is_refused(tmp_path, follow):
    folder = folder_of(tmp_path, [3], "text")
    (folder / "1.csv").symlink_to(folder / "000.csv")
    (folder / "2").symlink_to(tmp_path)  # a folder
    (folder / "3.csv.tmp").symlink_to("nothing")
    assert len(FileSource([folder], SCHEMA, follow=follow).files) == 2
    (folder / "4.csv").symlink_to("nothing")
    with pytest.raises(DataError, match=r"4\.csv is a link to nothing, which is not there"):
        FileSource([folder], SCHEMA, follow=follow)


def test_what_cannot_work_is_named(tmp_path):
    folder = folder_of(tmp_path, [5], "text")
    standard = SCHEMA.model_copy(update={"dense_transform": "standardize"})
    with pytest.raises(ConfigurationError, match='dense_transform = "standardize" needs the means of all rows'):
        RawLoader(FileSource([folder], standard), standard, batch_size=4, quarantine=NoBadRows())
    with pytest.raises(ConfigurationError, match="batch_size must be 1 or more, got 0"):
        loader(folder, batch_size=0)
    with pytest.raises(ConfigurationError, match="files can be followed in one folder"):
        FileSource([folder / "000.csv"], SCHEMA, follow=True)
    with pytest.raises(ConfigurationError, match=r"nothing.csv is no file"):
        FileSource([folder / "nothing.csv"], SCHEMA)
    with pytest.raises(ConfigurationError, match=r"000.csv is given twice"):
        FileSource([folder / "000.csv", folder / "000.csv"], SCHEMA)
    state = {**loader(folder).state_dict(), "seed": 3}
    with pytest.raises(ConfigurationError, match="saved with seed = 3, this run has 0"):
        loader(folder).load_state_dict(state)


def test_an_empty_part_has_the_shapes_of_others(tmp_path):
    folder = folder_of(tmp_path, [1], "text")
    (batch,) = loader(folder, rank=0, world_size=2)
    assert batch.dense.shape == (0, 1)
    assert batch.labels.shape == batch.weights.shape == (0,)
    assert batch.sparse.batch_size == 0
    assert batch.labels.dtype == torch.float32
    assert np.array_equal(batch.sparse.jagged_offsets, [0])


IDS = Schema(format="parquet", label="y", dense_transform="none", categorical=["u", "v"])
SINGLE, TEXTS, LISTS, NULLS = pa.array([1, 2]), pa.array(["1", "2"]), pa.array([[1, 2, 3], []]), pa.nulls(2)
EMPTY = pa.array([[], None], pa.list_(pa.null()))


def files_of(folder, *columns):
    """Files 0.parquet, … with a column `u` each, of two rows."""
    for number, column in enumerate(columns):
        pq.write_table(pa.table({"y": [0, 1], "u": column, "v": pa.array([[4], []])}), folder / f"{number}.parquet")
    return folder


def bags_of(folder, state=None, **options):
    """The ids of `u`, by row."""
    batches = RawLoader(FileSource([folder], IDS, **options), IDS, batch_size=2, quarantine=NoBadRows(), prefetch=0)
    if state is not None:
        batches.load_state_dict(state)
    bags = []
    for batch in batches:
        ids, offsets = batch.sparse.ids.tolist(), batch.sparse.jagged_offsets.tolist()
        bags += [ids[offsets[i] : offsets[i + 1]] for i in range(2)]
    return bags, batches.state_dict()


def test_columns_of_lists_are_multi_hot(tmp_path):
    source = FileSource([files_of(tmp_path, LISTS)], IDS)
    (batch,) = RawLoader(source, IDS, batch_size=2, quarantine=NoBadRows(), prefetch=0)
    assert batch.sparse.ids.tolist() == [1, 2, 3, 4]
    assert batch.sparse.jagged_offsets.tolist() == [0, 3, 3, 4, 4]


@pytest.mark.parametrize(
    ("columns", "bags"),
    [
        ([SINGLE, NULLS], [[1], [2], None, None]),
        ([LISTS, EMPTY, NULLS], [[1, 2, 3], [], [], [], [], []]),
        ([NULLS, LISTS], [[], [], [1, 2, 3], []]),
    ],
    ids=["single ids", "lists", "lists that come later"],
)
def test_a_file_without_a_value_goes_with_all(tmp_path, columns, bags):
    missing = ids_of(pa.nulls(1)).tolist()
    bags = [missing if bag is None else bag for bag in bags]
    found, state = bags_of(files_of(tmp_path, *columns[:1]))
    assert bags_of(files_of(tmp_path, *columns))[0] == bags
    if columns[0] is not NULLS:
        assert found == bags[:2]
        assert bags_of(tmp_path, state)[0] == bags[2:]  # the first file says it, also where it was read before


@pytest.mark.parametrize(
    ("columns", "found", "before"),
    [
        ([SINGLE, LISTS], "lists", "0.parquet it holds single ids"),
        ([LISTS, NULLS, SINGLE], "single ids", "0.parquet it holds lists"),
        ([SINGLE, TEXTS], "text", "0.parquet it holds integers"),
        ([NULLS, TEXTS, SINGLE], "integers", "1.parquet it holds text"),
    ],
)
@pytest.mark.parametrize("resumes", [False, True])
def test_files_whose_columns_have_another_form_are_refused(tmp_path, columns, found, before, resumes):
    state = bags_of(files_of(tmp_path, *columns[:-1]))[1] if resumes else None
    files_of(tmp_path, *columns)
    last = len(columns) - 1
    with pytest.raises(DataError, match=rf"{last}\.parquet: column 'u' holds {found}, in .*{before}"):
        bags_of(tmp_path, state)


def test_the_first_file_of_a_followed_folder_says_which_columns_hold_lists(tmp_path):
    (tmp_path / "_END").touch()
    with pytest.raises(DataError, match=r"1\.parquet: column 'u' holds lists, in .*0.parquet it holds single ids"):
        bags_of(files_of(tmp_path, NULLS, LISTS), follow=True)
    state = bags_of(files_of(tmp_path, NULLS, SINGLE), follow=True)[1]
    files_of(tmp_path, NULLS, SINGLE, TEXTS)
    with pytest.raises(DataError, match=r"2\.parquet: column 'u' holds text, in .*1.parquet it holds integers"):
        bags_of(tmp_path, state, follow=True)


def test_lists_among_single_ids_are_refused():
    with pytest.raises(DataError, match="feature 'u' has lists of ids"):
        sparse_of(["u"], [[LISTS]], 2, is_jagged=False)


TIMES = {
    "unix": (["1700000000", "1699999990.5", "soon"], 1_700_000_000, 4),
    "%Y-%m-%d": (["1970-01-02", "", "1970-01-01"], 86_400, 3),
}


@pytest.mark.parametrize("time_format", TIMES)
def test_a_batch_has_the_time_of_its_latest_event(tmp_path, time_format):
    times, latest, bad = TIMES[time_format]
    lines = ["click,user,when", *(f"1,u{number},{time}" for number, time in enumerate(times))]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    schema = Schema(label="click", categorical=["user"], time="when", time_format=time_format)
    kept = Kept()
    (batch,) = RawLoader(FileSource([tmp_path / "rows.csv"], schema), schema, batch_size=3, quarantine=kept)
    assert batch.sparse.time == latest
    assert batch.sparse.batch_size == 2
    ((file, line, reason),) = kept.rows
    assert (file, line) == ("rows.csv", bad)
    assert f"not a time like {time_format}" in reason


@pytest.mark.parametrize("file_format", ["text", "parquet"])
def test_all_ids_of_a_row_have_its_score(tmp_path, file_format):
    """Bags of several ids, or of none, too; numbers that float64 does not have are exact."""
    tags, scores = [["a", "b"], [], ["c"], ["d"]], [2**53 + 1, -7, 5, None]
    path, bad = tmp_path / "rows", [4]
    if file_format == "text":
        texts = ["" if score is None else str(score) for score in scores]
        lines = [f"1,u,{'|'.join(tag)},{score}" for tag, score in zip(tags, texts, strict=True)]
        path.write_text("\n".join(["click,user,tag,worth", *lines, "0,u,e,1.5", "0,u,e,99999999999999999999"]) + "\n")
        bad = [5, 6, 7]  # lines of the file
    else:
        pq.write_table(pa.table({"click": [1] * 4, "user": ["u"] * 4, "tag": tags, "worth": scores}), path)
    features = ["user", Categorical(name="tag", separator="|" if file_format == "text" else None)]
    schema = Schema(format=file_format, label="click", categorical=features, score="worth")
    kept = Kept()
    (batch,) = RawLoader(FileSource([path], schema), schema, batch_size=9, quarantine=kept)
    assert batch.sparse.scores is not None
    assert batch.sparse.scores.tolist() == [*scores[:3], scores[0], scores[0], scores[2]]
    assert [row[1] for row in kept.rows] == bad
    assert all("not a score: a whole number of 64 bits" in row[2] for row in kept.rows)


@pytest.mark.parametrize(("column", "holds"), [("when", "times"), ("worth", "numbers"), ("day", "times")])
def test_times_and_scores_that_are_lists_are_refused(tmp_path, column, holds):
    schema = Schema(
        format="parquet",
        label="y",
        categorical=["u", Categorical(name="day", derive="weekday")],
        time="when",
        score="worth",
    )
    columns = {"y": [0, 1], "u": [1, 2], "when": [1, 2], "worth": [1, 2], "day": [24010100, 24010200]}
    pq.write_table(pa.table({**columns, column: [[1], [2]]}), tmp_path / "0.parquet")
    batches = RawLoader(FileSource([tmp_path], schema), schema, batch_size=2, quarantine=NoBadRows(), prefetch=0)
    with pytest.raises(DataError, match=rf"0\.parquet: column '{column}' of type list.* holds no {holds}"):
        list(batches)


def test_a_batch_without_rows_has_no_time(tmp_path):
    (tmp_path / "rows.csv").write_text("click,user,when\n1,u,never\n")
    schema = Schema(label="click", categorical=["user"], time="when")
    (batch,) = RawLoader(FileSource([tmp_path / "rows.csv"], schema), schema, batch_size=3, quarantine=Kept())
    assert batch.sparse.time is None
