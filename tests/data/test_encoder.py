"""Raw rows through the encoder: what the preparation wrote for the same rows."""

import numpy as np
import pyarrow as pa
import pytest

from rowmesh.data import Schema, prepare
from rowmesh.data.encoder import prepared_encoder, rebatched
from rowmesh.data.quarantine import Quarantine
from rowmesh.data.reader import read_blocks
from rowmesh.data.window import SplitFile


@pytest.fixture(params=["standardize", "log1p", "none"])
def prepared(request, tmp_path):
    rng = np.random.default_rng(0)
    for split, size in (("train", 300), ("test", 80)):
        rows = ["y,x,when,user,tags"]
        for _ in range(size):
            tags = "|".join(str(tag) for tag in rng.integers(0, 30, rng.integers(0, 3)))
            x, user = rng.choice(["", "-1", f"{rng.random():.2f}"]), rng.choice(["", "é", "u1", str(rng.integers(99))])
            rows.append(f"{rng.integers(0, 2)},{x},1410210{rng.integers(0, 10)},{user},{tags}")
        (tmp_path / f"{split}.csv").write_text("\n".join(rows) + "\n")
    when = {"name": "hour", "column": "when", "derive": "hour_of_day", "time_format": "%y%m%d%H"}
    categorical = [when, "user", {"name": "tags", "separator": "|"}]
    schema = Schema.parse({"label": "y", "dense": ["x"], "categorical": categorical, "dense_transform": request.param})
    files = {split: [tmp_path / f"{split}.csv"] for split in ("train", "test")}
    return prepare(files, tmp_path / "prepared", schema)


@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_are_those_of_the_preparation(prepared, tmp_path, split):
    path, encoder = tmp_path / f"{split}.csv", prepared_encoder(prepared)
    with Quarantine(tmp_path / "bad", 0, tmp_path / "bad") as quarantine:
        found = [encoder.encode(block) for block in read_blocks(path, prepared.schema, quarantine)]
    expected = SplitFile(prepared, split).block(0)
    assert pa.concat_batches(found).to_pydict() == expected.to_pydict()
    assert np.isfinite(expected["x"].to_numpy()).all()
    for table in prepared.tables:
        share = encoder.unseen[table.name] / encoder.ids[table.name]
        assert share == table.rare_share[split]


def test_labels_that_are_not_read_are_no_number(prepared, tmp_path):
    schema, encoder = prepared.schema.for_scoring(["y"]), prepared_encoder(prepared)
    with Quarantine(tmp_path / "bad", 0, tmp_path / "bad") as quarantine:
        (block,) = read_blocks(tmp_path / "test.csv", schema, quarantine)
    encoded = encoder.encode(block)
    assert np.isnan(encoded["y"].to_numpy()).all()
    assert np.isnan(block.dense).any()
    assert not np.isnan(encoded["x"].to_numpy()).any()
    assert block.copied[0].to_pylist() == [line[:1] for line in (tmp_path / "test.csv").read_bytes().splitlines()[1:]]
    assert block.lines.tolist() == list(range(2, 82))


@pytest.mark.parametrize("sizes", [[3], [7, 1, 12], [5, 5], [1] * 11, []])
def test_batches_of_one_size(sizes):
    numbers = iter(range(sum(sizes)))
    batches = [pa.record_batch({"n": [next(numbers) for _ in range(size)]}) for size in sizes]
    full, rest = rebatched(batches, 5)
    assert [batch.num_rows for batch in full] == [5] * (sum(sizes) // 5)
    assert sum(batch.num_rows for batch in rest) == sum(sizes) % 5
    assert [n for batch in [*full, *rest] for n in batch["n"].to_pylist()] == list(range(sum(sizes)))
