import os
import re
import resource
import signal
import tracemalloc
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
import torch
import xxhash
from hypothesis import given

from rowmesh._support.files.checksums import checksums_of
from rowmesh.checkpoint import CheckpointError, load, new_files, read_manifest, save, write
from rowmesh.checkpoint.rows import SavedRows
from rowmesh.errors import DamagedCheckpointError
from rowmesh.ops.ranges import intersect
from rowmesh.tables.shard import LocalRows, TableShard
from rowmesh.tables.spec import TableSpec
from rowmesh.tables.update_rules import SGD, AdaGrad, Adam, RowWiseAdaGrad
from tests.support.at_once import at_once
from tests.support.prepared import change_manifest

TABLES = [
    TableSpec(name="user/country", num_rows=37, dim=3, optimizer=RowWiseAdaGrad()),
    TableSpec(name="item", num_rows=64, dim=5, optimizer=Adam()),
    TableSpec(name="day", num_rows=7, dim=4, optimizer=SGD(), dtype=torch.bfloat16),
    TableSpec(name="one", num_rows=1, dim=2, optimizer=AdaGrad(), dtype=torch.float64),
]
DENSE = {"model": {"weight": torch.arange(6.0).view(2, 3)}, "step": 12}


class InTwo(TableShard):
    form = "rows"

    def __init__(self, spec, views):
        super().__init__(spec)
        self._views = views

    @property
    def views(self):
        return self._views

    @property
    def pieces(self):
        return {"": [each for each in self._views if len(each.rows)]}


@dataclass
class Cyclic:
    """Stands in for a collection: row r lives on rank r mod W, or the rows are cut into W blocks."""

    tables: list[TableSpec]
    rank: int = 0
    world_size: int = 1
    blocks: bool = False
    parts: dict[str, LocalRows] = field(init=False)

    def __post_init__(self):
        self.parts = {table.name: self._cyclic(table) for table in self.tables}

    def _cyclic(self, table):
        rows = range(self.rank, table.num_rows, self.world_size)
        if self.blocks:
            cuts = [table.num_rows * rank // self.world_size for rank in (self.rank, self.rank + 1)]
            rows = range(*cuts)
        shapes = {"row": (len(rows),), "element": (len(rows), table.dim)}
        state = {name: torch.full(shapes[kind], -1.0) for name, kind in table.optimizer.state.items()}
        # a view into something wider, as rows in an arena may be
        values = torch.full((len(rows), table.dim + 3), -1.0).to(table.dtype)[:, : table.dim]
        return LocalRows(rows, values, state)

    def synchronize(self):
        pass

    def forget_differences(self):
        pass

    def shards(self, _):
        return [InTwo(table, self._pieces(table.name)) for table in self.tables]

    def _pieces(self, table):
        """In two pieces, the second of which may be empty."""
        part = self.parts[table]
        cut = (len(part.rows) + 1) // 2
        return [
            LocalRows(part.rows[piece], part.values[piece], {name: state[piece] for name, state in part.state.items()})
            for piece in (slice(None, cut), slice(cut, None))
        ]

    def fill(self):
        """Gives every element a value by its place."""
        for index, part in enumerate(self.parts.values()):
            for salt, tensor in enumerate([part.values, *part.state.values()]):
                numbers = (torch.tensor(list(part.rows), dtype=torch.int64) * 7919 + index * 31 + salt).double().sin()
                shape = (-1, *[1] * (tensor.dim() - 1))
                columns = torch.arange(tensor.shape[1]) * 0.37 if tensor.dim() > 1 else torch.zeros(())
                tensor.copy_(numbers.view(shape) + columns)
        return self

    def equals(self, other):
        return all(
            a.values.equal(b.values) and all(a.state[name].equal(b.state[name]) for name in a.state)
            for a, b in zip(self.parts.values(), other.parts.values(), strict=True)
        )


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "model"
    save(folder, Cyclic(TABLES).fill(), DENSE, metadata={"split": "train"})
    return folder


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_number_of_ranks_reads_what_one_wrote(saved, world_size, blocks):
    for rank in range(world_size):
        expected = Cyclic(TABLES, rank, world_size, blocks).fill()
        actual = Cyclic(TABLES, rank, world_size, blocks)
        dense = load(saved, actual)
        assert actual.equals(expected)
        assert dense["model"]["weight"].equal(DENSE["model"]["weight"])
        assert dense["step"] == 12


def test_a_pipe_in_the_place_of_a_file_is_an_error(saved):
    """Nothing waits for its writer."""
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        content = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(CheckpointError, match=re.escape(path.name)):
            at_once(lambda: load(saved, Cyclic(TABLES)))
        path.unlink()
        path.write_bytes(content)
    load(saved, Cyclic(TABLES))


def test_chunks_do_not_change_what_is_read(saved, monkeypatch):
    monkeypatch.setattr("rowmesh.checkpoint.chain.CHUNK_ROWS", 5)
    monkeypatch.setattr("rowmesh.checkpoint.chain.CHUNK_BYTES", 100)
    actual = Cyclic(TABLES, 1, 2)
    load(saved, actual)
    assert actual.equals(Cyclic(TABLES, 1, 2).fill())


def test_reading_needs_no_memory_for_the_whole_table(tmp_path, monkeypatch):
    monkeypatch.setattr("rowmesh.checkpoint.chain.CHUNK_ROWS", 10_000)
    table = TableSpec(name="large", num_rows=1_000_000, dim=1, optimizer=SGD())
    save(tmp_path, Cyclic([table]), {})
    target = Cyclic([table])
    tracemalloc.start()
    try:
        load(tmp_path, target)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000, "8 MB hold the numbers of all rows"
    finally:
        tracemalloc.stop()


def test_rows_without_optimizer_state(saved):
    tables = [replace(table, optimizer=SGD()) for table in TABLES]
    actual = Cyclic(tables)
    load(saved, actual, optimizer_state=False)
    assert actual.parts["item"].values.equal(Cyclic(TABLES).fill().parts["item"].values)
    with pytest.raises(CheckpointError, match="'user/country': optimizer is row_wise_adagrad in the checkp"):
        load(saved, actual)


def test_metadata_and_rules_are_in_the_manifest(saved):
    manifest = read_manifest(saved)
    assert manifest.metadata == {"split": "train"}
    assert [len(entry.parts[0].ranges) for entry in manifest.tables.values()] == [2, 2, 2, 1]


def test_a_new_checkpoint_replaces_the_old_one(saved):
    save(saved, Cyclic(TABLES), DENSE)
    actual = Cyclic(TABLES).fill()
    load(saved, actual)
    assert actual.equals(Cyclic(TABLES))
    assert len(list(saved.iterdir())) == 2


def assert_unchanged(saved, before):
    assert sorted(saved.rglob("*")) == before
    actual = Cyclic(TABLES)
    load(saved, actual)
    assert actual.equals(Cyclic(TABLES).fill())


def test_a_full_disk_leaves_the_old_model(saved):
    before = sorted(saved.rglob("*"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(CheckpointError, match=r"rank 0 cannot write .*model: .*; the former checkpoint stays"):
            save(saved, Cyclic(TABLES), DENSE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert_unchanged(saved, before)


def test_a_full_disk_leaves_no_empty_folder(tmp_path, monkeypatch):
    def fill(*_, **__):
        raise OSError("4208 requested and 3040 written")  # as writers of arrays do

    monkeypatch.setattr(new_files, "_write_array", fill)
    with pytest.raises(CheckpointError, match=r"only a part was written \(4208 .*\); is the disk full"):
        save(tmp_path / "model", Cyclic(TABLES), DENSE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", ["_write_rows", "_publish"])
def test_an_interrupted_write_leaves_the_old_model(saved, monkeypatch, at):
    before = sorted(saved.rglob("*"))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(write, at, interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(saved, Cyclic(TABLES), DENSE)
    assert_unchanged(saved, before)


def test_what_a_killed_write_left_is_removed(saved):
    (saved / "0123456789abcdef").mkdir()
    save(saved, Cyclic(TABLES), DENSE)
    assert len(list(saved.iterdir())) == 2


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        save(tmp_path / "file" / "model", Cyclic(TABLES), DENSE)


def test_rows_that_no_rank_holds(tmp_path):
    with pytest.raises(CheckpointError, match="table 'user/country' has 37 rows, but ranks hold 19"):
        save(tmp_path, Cyclic(TABLES, 0, 2), DENSE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_rows": 65}, "'item': num_rows is 64 in the checkpoint and 65 here"),
        ({"dim": 6}, "'item': dim is 5 in the checkpoint and 6 here"),
        ({"dtype": torch.float64}, "'item': dtype is float32 in the checkpoint and float64 here"),
        ({"name": "items"}, r"lacks \['items'\] and has \['item'\] besides"),
    ],
)
def test_tables_that_do_not_fit(saved, changes, message):
    tables = [replace(table, **changes) if table.name == "item" else table for table in TABLES]
    with pytest.raises(CheckpointError, match=message):
        load(saved, Cyclic(tables))


@pytest.mark.parametrize("name", ["item.0.values.npy", "item.0.m.npy", "dense.pt"])
def test_missing_and_damaged_files_are_named(saved, name):
    path = next(saved.rglob(name))
    content = path.read_bytes()
    for rest in (content[: len(content) // 2], b""):
        path.write_bytes(rest)
        with pytest.raises(CheckpointError, match=rf"{name} has {len(rest)} bytes where .* were written"):
            load(saved, Cyclic(TABLES))
        with pytest.raises(CheckpointError, match=rf"{name} cannot be read"):
            load(saved, Cyclic(TABLES), verify=False)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{name} is missing; the checkpoint is incomplete"):
        load(saved, Cyclic(TABLES))


def test_files_of_another_shape(saved):
    path = next(saved.rglob("item.0.values.npy"))
    path.write_bytes(next(saved.rglob("one.0.values.npy")).read_bytes())
    with pytest.raises(CheckpointError, match=r"table 'item': .* holds float64 \(1, 2\), expected float32"):
        load(saved, Cyclic(TABLES), verify=False)


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        load(tmp_path, Cyclic(TABLES))


def test_rows_in_no_file(saved):
    change_manifest(saved / "manifest.json", lambda values: values["tables"]["item"].update(parts=[]))
    with pytest.raises(CheckpointError, match="table 'item': files hold 0 rows where each of 64 must be in exactly"):
        load(saved, Cyclic(TABLES))


def flip(path, position, bit=3):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("position", [0, 9, 20, -1], ids=["magic", "length", "header", "content"])
def test_a_flipped_bit_in_any_file_is_noticed(saved, position):
    files = [path for path in saved.rglob("*") if path.suffix in (".npy", ".pt")]
    assert len(files) == 9
    for path in files:
        flip(path, position)
        with pytest.raises(
            CheckpointError, match=rf"{path.name} is damaged: bytes 0 to .*not what was written.*-verify"
        ):
            load(saved, Cyclic(TABLES))
        flip(path, position)
    load(saved, Cyclic(TABLES))


def test_only_blocks_that_are_read_are_verified_and_each_once(tmp_path, monkeypatch):
    table = TableSpec(name="item", num_rows=1000, dim=8, optimizer=SGD())  # 16 rows in 512 bytes
    monkeypatch.setattr("rowmesh.checkpoint.new_files.BLOCK_BYTES", 512)
    save(tmp_path, Cyclic([table]).fill(), {})
    manifest, summed = read_manifest(tmp_path), []
    digest = xxhash.xxh3_64_hexdigest
    monkeypatch.setattr("xxhash.xxh3_64_hexdigest", lambda block: summed.append(len(block)) or digest(block))
    rows = SavedRows(tmp_path, manifest, "item")
    rows.read(range(100, 200))
    assert len(summed) <= 1 + 8
    rows.read(range(100, 200))
    assert len(summed) <= 1 + 8
    flip(next(tmp_path.rglob("item*")), 20_000)  # row 621
    rows = SavedRows(tmp_path, manifest, "item")
    rows.read(range(500))
    with pytest.raises(CheckpointError, match="bytes 19,968 to 20,479 are not"):
        rows.read(range(620, 630))


def test_rows_that_are_written_to_while_they_are_read_are_verified_again(saved):
    rows, path = SavedRows(saved, read_manifest(saved), "item"), next(saved.rglob("item.0.values.npy"))
    before = rows.read(range(64))
    os.utime(path, ns=(0, 0))
    assert rows.read(range(64)).equal(before)
    flip(path, -1)
    with pytest.raises(CheckpointError, match=r"item.0.values.npy is damaged: bytes 0 to"):
        rows.read(range(64))


def test_a_folder_in_place_of_a_file_is_named(saved):
    path = next(saved.rglob("item.0.values.npy"))
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"table 'item': .*item.0.values.npy cannot be read \(.*Is a directory"):
        load(saved, Cyclic(TABLES))


def test_damaged_rows_can_be_read_on_purpose(saved):
    flip(next(saved.rglob("item.0.values.npy")), -1)
    actual = Cyclic(TABLES)
    load(saved, actual, verify=False)
    assert not actual.equals(Cyclic(TABLES).fill())


@pytest.mark.parametrize("verify", [True, False])
def test_a_model_without_checksums_is_damaged(saved, verify):
    change_manifest(saved / "manifest.json", lambda values: values.pop("checksums"))
    with pytest.raises(
        DamagedCheckpointError, match=r"no checksum of dense\.pt; restore it from a copy, or train again"
    ):
        load(saved, Cyclic(TABLES), verify=verify)


def test_sums_need_no_second_reading(saved):
    manifest = read_manifest(saved)
    for name, expected in manifest.checksums.items():
        assert checksums_of(saved / manifest.folder / name) == expected


RANGES = st.builds(lambda a, n, s: range(a, a + n * s, s), st.integers(0, 40), st.integers(0, 30), st.integers(1, 12))


@given(saved=RANGES, wanted=RANGES)
def test_what_two_ranges_share(saved, wanted):
    expected = sorted(set(saved) & set(wanted))
    common = intersect(saved, wanted)
    if common is None:
        assert not expected
        return
    assert [saved[i] for i in common[0]] == expected
    assert [wanted[i] for i in common[1]] == expected
