"""Splits whose files are not what the metadata say are found before the first step."""

import shutil

import pyarrow as pa
import pytest

from rowmesh.data import PlantedConfig
from rowmesh.errors import DamagedFileError, DataError
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.resolve import resolve
from tests.support.clicks import prepare_clicks

SAMPLES = {"train": 300, "validation": 40, "test": 50}
SMALL = ["model.bottom=[4]", "model.top=[4]", "tables.dim=4", "data.batch_size=64", "train.epochs=1"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    planted = PlantedConfig(num_rows=(30, 5), head=4, bag_sizes={1: 2})
    return prepare_clicks(tmp_path_factory.mktemp("clicks"), SAMPLES, planted).folder


@pytest.fixture
def config(prepared, tmp_path):
    """Of a copy of the data."""
    shutil.copytree(prepared, tmp_path / "data")
    (tmp_path / "clicks.toml").write_text(f'[data]\nfolder = "{tmp_path}/data"\n[run]\nfolder = "{tmp_path}/run"\n')
    return lambda *options: resolve(tmp_path / "clicks.toml", [*SMALL, *options])


def truncated(path):
    path.write_bytes(path.read_bytes()[:-20])


def rewritten(change):
    """Writes a file again with another table."""

    def damage(path):
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        path.unlink()
        table = change(table)
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)

    return damage


def with_wide_ids(table):
    index = table.schema.get_field_index("C1")
    return table.set_column(index, pa.field("C1", pa.int64(), nullable=False), table.column(index).cast(pa.int64()))


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncated,
    "no Arrow": lambda path: path.write_bytes(b"x" * 5000),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "without a column": rewritten(lambda table: table.drop_columns(["C2"])),
    "of other types": rewritten(with_wide_ids),
    "of other samples": rewritten(lambda table: table.slice(0, len(table) - 1)),
    "of more samples": rewritten(lambda table: pa.concat_tables([table, table])),
    "without samples": rewritten(lambda table: table.slice(0, 0)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_test_split_is_looked_at_before_training(config, tmp_path, damage):
    path = tmp_path / "data" / "test.arrow"
    damage(path)
    with pytest.raises((DataError, DamagedFileError), match=rf"{path}.*prepare the data again") as caught:
        run_training(config())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_other_splits_are_looked_at_too(config, tmp_path, split):
    truncated(tmp_path / "data" / f"{split}.arrow")
    with pytest.raises(DataError, match=f"{split}.arrow"):
        run_training(config("train.eval_every=1"))
    assert not (tmp_path / "run").exists()


def test_a_split_that_nothing_reads_may_be_broken(config, tmp_path):
    (tmp_path / "data" / "validation.arrow").unlink()
    assert run_training(config()) is not None


def test_what_is_evaluated_is_looked_at_before_the_model_is_read(config, tmp_path):
    run_training(config())
    truncated(tmp_path / "data" / "validation.arrow")
    shutil.rmtree(next((tmp_path / "run" / "model").glob("[0-9a-f]*")))
    with pytest.raises((DataError, DamagedFileError), match=r"validation.arrow.*prepare the data again"):
        run_evaluation(tmp_path / "run", split="validation")
