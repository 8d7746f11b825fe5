"""Prepared data that are replaced, damaged or cut short while they are read, and metadata with anything in them."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import tomli_w
from hypothesis import example, given
from hypothesis import strategies as st

from rowmesh._support.faults import arm
from rowmesh._support.files.manifest import Manifest
from rowmesh.data import Loader, PlantedConfig, Prepared, Schema
from rowmesh.data.inputs import DataSource
from rowmesh.data.prepare import prepare
from rowmesh.data.synthetic import synthesize
from rowmesh.errors import ConfigurationError, DamagedFileError, DataError
from rowmesh.run.commands import run_training
from rowmesh.run.export import export
from rowmesh.run.resolve import resolve
from rowmesh.run.splits import check_same_data
from tests.support.clicks import write_config
from tests.support.commands import Finished
from tests.support.prepared import renew_checksums
from tests.support.ranks import RankError

PLANTED = PlantedConfig(num_rows=(50, 7, 300), head=10, bag_sizes={2: 3})
SAMPLES = {"train": 1500, "validation": 300, "test": 500}


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Two data sets of one shape in which the same ids mean something else."""
    folder = tmp_path_factory.mktemp("raw")
    for name, seed in (("one", 0), ("other", 1)):
        synthesize(folder / name, SAMPLES, PlantedConfig(**{**vars(PLANTED), "seed": seed}))
    return folder


@pytest.fixture(scope="module")
def original(raw, tmp_path_factory):
    return write(raw / "one", tmp_path_factory.mktemp("prepared") / "data").folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "data")


@pytest.fixture
def configured(tmp_path):
    """The path of a configuration file that trains on a folder."""

    def configured(folder, name="run"):
        more = ("[train]", "epochs = 2", "eval_every = 4", "log_every = 5")
        return write_config(tmp_path / f"{name}.toml", tmp_path / name, folder, *more)

    return configured


def write(raw, out, *, overwrite=False):
    source = DataSource.find([raw])
    return prepare(source.files, out, source.schema, overwrite=overwrite, optimum=source.optimum, block_samples=256)


def once(action):
    done = []
    return lambda: done or done.append(action())


def every_batch(data, split="train"):
    return list(Loader(data, split, batch_size=256, window_blocks=2, prefetch=0))


def read_everything(data):
    for split in data.splits:
        every_batch(data, split)
    for name in data.features:
        np.asarray(data.counts(name)).sum()
        data.vocabulary(name).to_pylist()
        data.bijection(name)


def flip(path, at, bit=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def start(config, *options, faults="", **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "rowmesh.cli", "train", str(config), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "ROWMESH_FAULTS": faults} | environment,
    )


def finish(process):
    out, err = process.communicate(timeout=120)
    return Finished(process.returncode, out, err)


def wait_for(path, process):
    while not path.exists():
        assert process.poll() is None, process.communicate()


def test_data_replaced_while_a_run_trains_change_nothing(raw, folder, configured):
    undisturbed = run_training(resolve(configured(folder, "undisturbed")))
    replace = once(lambda: write(raw / "other", folder, overwrite=True))
    with arm(point="data.window", action=replace):
        disturbed = run_training(resolve(configured(folder)))
    assert disturbed == undisturbed


def test_data_that_are_removed_while_a_run_trains_change_nothing(folder, configured):
    undisturbed = run_training(resolve(configured(folder, "undisturbed")))
    with arm(point="data.window", action=once(lambda: shutil.rmtree(folder))):
        assert run_training(resolve(configured(folder))) == undisturbed


@pytest.mark.slow
def test_a_command_reads_the_data_it_began_with(raw, folder, configured, tmp_path):
    """As users meet it: another process replaces the folder while one trains."""
    undisturbed = finish(start(configured(folder, "undisturbed")))
    process = start(configured(folder), faults=f"data.window@1=hold:{tmp_path}/held")
    wait_for(tmp_path / "held", process)
    write(raw / "other", folder, overwrite=True)
    (tmp_path / "held.go").touch()
    done = finish(process)
    assert (done.status, done.err) == (0, "")
    assert trained_line(done.out) == trained_line(undisturbed.out)


def trained_line(out):
    """The metrics of the trained model, in what a command printed."""
    (line,) = [line for line in out.splitlines() if line.startswith("  trained")]
    return line


def compare(mesh, folders):
    check_same_data(mesh, Prepared.open(folders[mesh.rank]))


def test_ranks_that_opened_other_data_are_named(raw, folder, tmp_path, ranks):
    copy, other = shutil.copytree(folder, tmp_path / "copy"), write(raw / "other", tmp_path / "other").folder
    ranks.run(compare, [folder, copy], world_size=2)
    with pytest.raises(RankError) as error:
        ranks.run(compare, [folder, other], world_size=2)
    for message in error.value.failed.values():
        assert "holds other data on rank 1 than on rank 0: it was replaced while ranks started" in message


def test_what_is_read_late_from_replaced_data_is_refused(raw, folder):
    data = Prepared.open(folder)
    write(raw / "other", folder, overwrite=True)
    every_batch(data, "test")  # which was open
    for read in (data.counts, data.vocabulary):
        with pytest.raises(DataError, match=r"C1\.\w+ is missing: removed, or replaced .*start again"):
            read("C1")


@pytest.mark.parametrize("verify", [True, False])
def test_files_that_are_exchanged_in_the_folder_are_refused(raw, folder, tmp_path, verify):
    other = write(raw / "other", tmp_path / "other").folder
    data = Prepared.open(folder, verify=verify)
    for name in ("counts/C1.npy", "vocabulary/C1.arrow"):
        (other / name).replace(folder / name)
    why = "is damaged|bytes where" if verify else "was replaced or written to"
    for read in (data.counts, data.vocabulary):
        with pytest.raises(DataError, match=why):
            read("C1")


def test_an_export_does_not_mix_two_data_sets(raw, folder, configured, tmp_path):
    run_training(resolve(configured(folder, "run"), ["train.steps=2"]))
    opened = []

    def replace():
        opened.append(len(opened))
        if len(opened) == 5:  # after the metadata and three vocabularies, which were found to be those of the training
            with arm():
                write(raw / "other", folder, overwrite=True)

    with arm(point="data.open", action=replace), pytest.raises(DataError, match="replaced"):
        export(tmp_path / "run", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_damage_to_the_test_split_does_not_lose_the_model(folder, configured, tmp_path):
    damage = once(lambda: flip(folder / "test.arrow", 5000))
    with (
        arm(point="data.window", action=damage),
        pytest.raises(DamagedFileError, match=r"test\.arrow is damaged: bytes .* copy the folder again"),
    ):
        run_training(resolve(configured(folder), ["train.steps=2", "train.eval_every=0"]))
    assert (tmp_path / "run" / "model" / "manifest.json").exists()
    assert not (tmp_path / "run" / "evaluation").exists()


def test_a_file_that_is_written_to_is_verified_again(folder):
    data = Prepared.open(folder)
    every_batch(data)
    path = folder / "train.arrow"
    os.utime(path)
    assert len(every_batch(data)) == 6
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 8)
    with pytest.raises(DamagedFileError, match=r"train\.arrow is damaged"):
        every_batch(data)
    unverified = Prepared.open(folder, verify=False)
    Loader(unverified, "train", batch_size=1)
    os.utime(path)
    with pytest.raises(DamagedFileError, match="was written to after it was opened, and nothing shows"):
        Loader(unverified, "train", batch_size=1)


def test_every_flipped_bit_is_noticed(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "quarantine.jsonl"]
    assert len(files) == 11
    for number, path in enumerate(sorted(files)):
        content, size = path.read_bytes(), path.stat().st_size
        for at in {0, size // 3, size // 2, size - 1 if path.suffix != ".json" else size // 5}:
            flip(path, at, number % 7)
            with pytest.raises(DataError, match=rf"{path.name}|prepared in format"):
                read_everything(Prepared.open(folder))
            path.write_bytes(content)
    read_everything(Prepared.open(folder))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", ["manifest.json", "metadata.json", "train.arrow", "counts/C1.npy"])
def test_a_folder_in_place_of_a_file_is_named(folder, name, verify):
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(DataError, match=rf"{name}: cannot be opened \(Is a directory\); copy the folder again"):
        Prepared.open(folder, verify=verify).counts("C1")


def test_blocks_are_verified_once_a_run_and_not_before_they_are_read(folder, monkeypatch):
    import rowmesh._support.files.verified as module

    read, real = [], module.xxhash.xxh3_64_hexdigest
    data = Prepared.open(folder)
    monkeypatch.setattr(module.xxhash, "xxh3_64_hexdigest", lambda block: read.append(len(block)) or real(block))
    Loader(data, "train", batch_size=256)
    opened = len(read)
    assert opened == 1  # the columns and where record batches lie: of a large file the ends
    for _ in range(2):
        every_batch(data)
        every_batch(data, "test")
        data.counts("C1")
    assert sum(read) == sum((folder / name).stat().st_size for name in ("train.arrow", "test.arrow", "counts/C1.npy"))


def test_what_is_not_verified_is_not_refused(folder, configured, capsys):
    flip(folder / "counts/C1.npy", 200)
    path = folder / "train.arrow"
    flip(path, pa.ipc.open_file(str(path)).get_batch(0).nbytes // 50)  # a label or a dense value
    data = Prepared.open(folder, verify=False)
    assert data.verification == "not verified, as asked for"
    data.counts("C1")
    run_training(resolve(configured(folder), ["train.steps=2"]), verify=False)
    assert "samples; 13 dense, 3 sparse features; not verified, as asked for" in capsys.readouterr().out


def test_a_file_without_a_checksum_is_read_only_where_nothing_is_verified(folder):
    manifest = Manifest.read(folder)
    assert manifest is not None
    rest = {name: sums for name, sums in manifest.checksums.items() if name != "counts/C1.npy"}
    replace(manifest, checksums=rest).write(folder)
    with pytest.raises(DataError, match=r"manifest\.json has no checksum of counts/C1\.npy, .* or read it unverified"):
        read_everything(Prepared.open(folder))
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"manifest\.json has no checksum of metadata\.json"):
        Prepared.open(folder)
    read_everything(Prepared.open(folder, verify=False))


def damaged_copy(folder, change):
    """Writes the training split anew, with other buffers of its lists, of the same length."""
    path = folder / "train.arrow"
    reader = pa.ipc.open_file(pa.py_buffer(path.read_bytes()))
    with pa.ipc.new_file(str(path), reader.schema) as writer:
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            writer.write_batch(change(batch) if number == 1 else batch)
    renew_checksums(folder)


def with_lists(batch, offsets, ids):
    index = batch.schema.get_field_index("C3")
    lists = pa.ListArray.from_buffers(
        batch.schema.field(index).type,
        len(offsets) - 1,
        [None, pa.py_buffer(offsets.astype(np.int32))],
        children=[pa.array(ids, pa.int32())],
    )
    return batch.set_column(index, batch.schema.field(index), lists)


def unbounded(folder, kind):
    offsets = np.arange(257)
    if kind == "alternating":
        offsets[1::2] = 100_000
        offsets[0::2] = 0
    else:
        offsets[100] = {"falling": 50, "past the end": 10_000_000, "below 0": -5}[kind]
    damaged_copy(folder, lambda batch: with_lists(batch, offsets, np.zeros(300)))


NO_BOUNDS = "record batch 1, feature 'C3': the bounds of its lists do not rise from 0 to"
READ = "import sys; from tests.faults.test_prepared_data import every_batch; every_batch(sys.argv[1])"


@pytest.mark.parametrize("kind", ["alternating", "falling", "past the end", "below 0"])
def test_lists_without_bounds_are_refused(folder, kind):
    unbounded(folder, kind)
    with pytest.raises(DataError, match=NO_BOUNDS):
        every_batch(folder)


@pytest.mark.slow
def test_lists_without_bounds_do_not_crash_a_process(folder):
    unbounded(folder, "alternating")
    done = subprocess.run([sys.executable, "-c", READ, folder], capture_output=True, text=True)
    assert done.returncode == 1, done
    assert NO_BOUNDS in done.stderr


@pytest.mark.parametrize("name, wrong", [("C1", -1), ("C1", 2**31 - 1), ("C3", 400), ("C3", -7)])
def test_ids_that_are_no_rows_are_refused(folder, name, wrong):
    def change(batch):
        index = batch.schema.get_field_index(name)
        values = batch.column(index).to_pylist()
        values[7] = [wrong] if name == "C3" else wrong
        return batch.set_column(index, batch.schema.field(index), pa.array(values, batch.schema.field(index).type))

    damaged_copy(folder, change)
    with pytest.raises(
        DataError, match=rf"train\.arrow: record batch 1, feature '{name}': 1 ids are no rows .* {wrong};"
    ):
        every_batch(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda batch: batch.slice(0, 200), "record batch 1 has 200 samples, not 256"),
        (
            lambda batch: batch.set_column(1, batch.schema.field(1), pa.array([None] * 256, pa.float32())),
            "'I1' has 256 missing values",
        ),
    ],
)
def test_record_batches_of_another_form_are_refused(folder, change, message):
    damaged_copy(folder, change)
    with pytest.raises(DataError, match=message):
        every_batch(folder)


@pytest.mark.parametrize("verify", [True, False])
def test_a_split_that_is_cut_short_while_it_is_read_is_refused(folder, verify):
    batches = iter(Loader(Prepared.open(folder, verify=verify), "train", batch_size=256, window_blocks=2, prefetch=0))
    next(batches)
    os.truncate(folder / "train.arrow", 5000)
    with pytest.raises(DamagedFileError, match=r"train\.arrow had .* bytes when it was opened and has 5,000 now"):
        list(batches)


@pytest.mark.slow
def test_a_run_whose_data_are_cut_short_says_so(folder, configured, tmp_path):
    process = start(configured(folder), faults=f"data.window@2=hold:{tmp_path}/held")
    wait_for(tmp_path / "held", process)
    for name in ("train", "validation"):
        os.truncate(folder / f"{name}.arrow", 4096)
    (tmp_path / "held.go").touch()
    done = finish(process)
    assert done.status == 2
    assert "arrow had" in done.err
    assert "when it was opened and has 4,096 now" in done.err


@pytest.mark.parametrize(
    "name", ["counts/C1.npy", "vocabulary/C1.arrow", "train.arrow", "metadata.json", "manifest.json"]
)
@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"ARROW1\0\0", b"\xff" * 300])
@pytest.mark.parametrize("verify", [True, False])
def test_files_of_nothing_are_named(folder, name, content, verify):
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=Path(name).name):
        read_everything(Prepared.open(folder, verify=verify))


@pytest.mark.parametrize("transform", ["log1p", "none"])
@pytest.mark.parametrize("form", ["text", "parquet"])
def test_only_finite_dense_values_are_taken(tmp_path, transform, form):
    values = [1.0, -1.0, -5.0, -math.inf, math.inf, math.nan, None, -0.5, 1e308, 3.0]
    table = pa.table({"y": [0.0, 1.0] * 5, "x": pa.array(values), "a": ["p"] * 10})
    path, write = tmp_path / "train", {"text": pa_csv.write_csv, "parquet": pq.write_table}[form]
    write(table, path)
    schema = Schema(format=form, label="y", dense=("x",), dense_transform=transform, categorical=("a",))
    data = prepare({"train": [path]}, tmp_path / "out", schema)
    rows = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    header = form == "text"
    large = [9] if transform == "none" else []  # past float32
    assert [row["line"] for row in rows] == [line + header for line in [4, 5, 6, *large]]
    assert all("not a finite number" in row["reason"] for row in rows)
    dense = next(iter(Loader(data, "train", batch_size=10))).dense[:, 0].tolist()
    if transform == "none":
        assert dense == [1, -1, -5, 0, -0.5, 3]
    else:
        assert dense == pytest.approx([math.log(2), 0, 0, 0, 0, math.log1p(1e308), math.log(4)])


PLAIN = Schema(label="y", categorical=("a",))


@pytest.mark.parametrize(
    "content, message",
    [
        (b"y,a\r1,p\r0,q\r", "its lines end with a carriage return alone.*tr"),
        (b"y,a\r1,p\n0,q\n", "the header is no line of text"),
        (b"\x00\x01\x02y,a\n1,p\n", "the header holds bytes of value 0; is this a text file"),
        (bytes(range(1, 256)) * 3 + b"\n1,p\n", r"train\.csv: "),
        (b"x" * 200_000 + b"\n1,p\n", "the header is no line of text .*is this a text file"),
        (b"y,a,a\n1,p,q\n", "the file names a more than once"),
        (b"\n\n", "column 'y' is missing"),
    ],
)
def test_files_that_are_no_csv_are_named(tmp_path, content, message):
    path = tmp_path / "train.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        prepare({"train": [path]}, tmp_path / "out", PLAIN)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_lines_that_end_with_carriage_returns_are_named_without_a_header_too(tmp_path):
    path = tmp_path / "train.csv"
    path.write_bytes(b"1,p\r0,q\r")
    with pytest.raises(DataError, match=r"train\.csv: its lines end with a carriage return alone"):
        prepare({"train": [path]}, tmp_path / "out", PLAIN.model_copy(update={"columns": ("y", "a")}))


@pytest.mark.parametrize("twice", ["y", "a"])
def test_a_column_that_parquet_has_twice_is_named(tmp_path, twice):
    columns = {"y": pa.array([0, 1]), "a": pa.array(["p", "q"])}
    table = pa.Table.from_arrays([*columns.values(), columns[twice]], [*columns, twice])
    pq.write_table(table, tmp_path / "train.parquet")
    schema = PLAIN.model_copy(update={"format": "parquet"})
    with pytest.raises(DataError, match=rf"train\.parquet: the file names {twice} more than once"):
        prepare({"train": [tmp_path / "train.parquet"]}, tmp_path / "out", schema)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(values, path=()):
    """Every place in nested values."""
    yield path
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def mutate(draw, values):
    """Replaces, removes, renames or adds something somewhere."""
    path = draw(st.sampled_from([path for path in places(values) if path]))
    for key in path[:-1]:
        values = values[key]
    what = draw(st.sampled_from(["replace", "remove", "nudge", "add"]))
    old = values[path[-1]]
    if what == "replace":
        values[path[-1]] = draw(JSON)
    elif what == "remove":
        del values[path[-1]]
    elif what == "nudge":
        values[path[-1]] = -old if isinstance(old, int | float) else [old]
    elif isinstance(values, dict):
        values[draw(st.text(max_size=4))] = draw(JSON)
    else:
        values.append(draw(JSON))


@pytest.mark.parametrize("name", ["metadata.json", "manifest.json"])
def test_metadata_with_anything_in_them_are_read_or_refused_by_name(original, tmp_path_factory, name):
    folder = shutil.copytree(original, tmp_path_factory.mktemp("fuzz") / "data")
    text = (folder / name).read_bytes()

    @given(st.data())
    def check(data):
        if data.draw(st.integers(0, 4)) == 0:
            cut = bytearray(text[: data.draw(st.integers(0, len(text)))])
            if cut and data.draw(st.booleans()):
                cut[data.draw(st.integers(0, len(cut) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            (folder / name).write_bytes(cut)
        else:
            values = json.loads(text)
            for _ in range(data.draw(st.integers(1, 2))):
                mutate(data.draw, values)
            (folder / name).write_text(json.dumps(values))
        try:
            read_everything(prepared := Prepared.open(folder, verify=data.draw(st.booleans())))
            assert prepared.tables
            assert prepared.identity
        except DataError as error:
            assert str(folder) in str(error)  # noqa: PT017

    check()


@given(st.data())
def test_an_optimum_with_anything_in_it_is_read_or_refused_by_name(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("raw")
    (folder / "train.csv").touch()
    path = folder / "optimum.json"
    values = {"test": {"samples": 5, "positive_rate": 0.25, "auc": 0.75, "log_loss": 0.5}}
    mutate(data.draw, values)
    text = json.dumps(values).encode()
    path.write_bytes(text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text)
    try:
        DataSource.find([folder], "criteo")
    except DataError as error:
        assert str(path) in str(error)  # noqa: PT017


@example("%d%d")
@example("%")
@example("\0")
@given(st.text("%YmdHjzfGuV:. ", max_size=6))
def test_a_time_format_of_anything_is_taken_or_refused(time_format):
    values = {"name": "w", "derive": "weekday", "time_format": time_format}
    try:
        Schema.parse({"label": "y", "categorical": [values]})
    except ConfigurationError as error:
        assert "time_format" in str(error)  # noqa: PT017


@given(st.data())
def test_a_schema_with_anything_in_it_is_read_or_refused_by_name(tmp_path_factory, data):
    values = {
        "format": "text",
        "delimiter": ",",
        "quote": '"',
        "columns": ["y", "x", "a", "t"],
        "label": "y",
        "dense": ["x"],
        "dense_transform": "log1p",
        "categorical": ["a", {"name": "w", "column": "t", "derive": "weekday", "time_format": "%Y-%m-%d"}],
    }
    mutate(data.draw, values)
    path = tmp_path_factory.mktemp("schema") / "schema.toml"
    try:
        text = tomli_w.dumps(values).encode()
    except (TypeError, ValueError):
        return  # TOML has no null
    path.write_bytes(text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text)
    try:
        Schema.load(path)
    except ConfigurationError as error:
        assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "key, value", [("tables.0.num_rows", "5"), ("splits.test.samples", -1), ("block_samples", None)]
)
def test_a_key_with_another_type_is_named(folder, key, value):
    path = folder / "metadata.json"
    values = json.loads(path.read_text())
    where = values
    *parents, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    for part in parents:
        where = where[part]
    where[last] = value
    path.write_text(json.dumps(values))
    renew_checksums(folder)
    with pytest.raises(DataError, match=rf"metadata\.json: {key}: "):
        Prepared.open(folder)
