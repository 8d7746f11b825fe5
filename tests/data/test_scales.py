"""Standardising: the statistics are NumPy's, of the training split alone, and nothing changes them later."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowmesh.data import Loader, Prepared, Schema, prepare
from rowmesh.data.encoder import prepared_encoder
from rowmesh.data.scales import DenseScale, DenseStatistics
from rowmesh.errors import DataError
from rowmesh.run.fingerprint import differences, fingerprint
from tests.support.prepared import renew_checksums

SCHEMA = Schema.parse({"label": "y", "dense": ["age", "price", "flag", "same", "none"], "categorical": ["a"]})


@pytest.fixture
def columns():
    """Five columns of 4,000 rows: even, heavy-tailed with gaps, rarely 1, a constant, and empty."""
    generator = np.random.default_rng(0)
    age, price = generator.uniform(-20, 80, 4000), generator.lognormal(3, 2, 4000)
    price[::7] = np.nan
    flag = (generator.random(4000) < 0.02).astype(float)
    return np.stack([age, price, flag, np.full(4000, 1e6), np.full(4000, np.nan)]).astype(np.float32)


@pytest.mark.parametrize("block", [1, 37, 4000])
def test_statistics_of_blocks_are_those_of_the_whole(columns, block):
    statistics = DenseStatistics(SCHEMA.dense)
    for start in range(0, columns.shape[1], block):
        statistics.add("train", columns[:, start : start + block])
    statistics.add("test", np.full((5, 3), 1e9))
    scales = statistics.scales()
    assert [scale.log1p for scale in scales] == [False, True, False, False, False]
    age, price, flag, same, none = (column.astype(np.float64) for column in columns)
    expected = [age, np.log1p(price[~np.isnan(price)]), flag]
    for scale, values in zip(scales, expected, strict=False):
        assert (scale.mean, scale.std) == pytest.approx((values.mean(), values.std()), rel=1e-12)
    assert (scales[3].mean, scales[3].std) == (1e6, 1.0)
    assert (scales[4].mean, scales[4].std) == (0.0, 1.0)
    assert scales[1].missing == {"train": np.isnan(price).mean(), "test": 0.0}
    assert not scales[3].apply(same).any()
    assert not scales[4].apply(none).any()


def test_skewness_decides_as_scipy_has_it(columns):
    stats = pytest.importorskip("scipy.stats")
    statistics = DenseStatistics(SCHEMA.dense)
    for part in np.array_split(columns, 9, axis=1):
        statistics.add("train", part)
    expected = stats.skew(columns[:3].astype(np.float64), axis=1, nan_policy="omit")
    np.testing.assert_allclose(statistics._plain.skewness[:3], expected, rtol=1e-9)


LARGE = {
    "ms": (1.7e12, 480_000),
    "s": (1.7e9, 300),
    "ids": (2.0**31, 200),
    "below_0": (-1.7e12, 480_000),
    "us": (1.7e15, 5e5),
    "tailed_ms": (1.7e12, 1.5),
}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_values_that_are_large_beside_their_spread_are_standardized(tmp_path, kind):
    """Times, ids: float32 holds none of their differences, and float64 no squares of them."""
    generator = np.random.default_rng(0)
    exact = {}
    for name, (base, spread) in LARGE.items():
        distances = np.floor(generator.uniform(0, spread, 4000))
        exact[name] = (base, np.floor(generator.lognormal(3, spread, 4000)) if name == "tailed_ms" else distances)
    columns = np.stack([base + distances for base, distances in exact.values()])
    schema = Schema.parse({"label": "y", "dense": list(LARGE), "categorical": ["a"]})
    if kind == "csv":
        path = write(tmp_path / "train.csv", columns, schema)
    else:
        path, schema = tmp_path / "train.parquet", schema.model_copy(update={"format": "parquet"})
        numbers = dict(zip(LARGE, columns.astype(np.int64), strict=True))
        pq.write_table(pa.table({"y": np.arange(4000) % 2, "a": np.arange(4000) % 5, **numbers}), path)
    prepared = prepare({"train": [path]}, tmp_path / "out", schema)
    for name, found, (_, distances) in zip(LARGE, dense_of(prepared, "train"), exact.values(), strict=True):
        expected = (distances - distances.mean()) / distances.std()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3, err_msg=name)
    assert not any(scale.log1p for scale in prepared.dense_scales or ())


def test_values_of_very_different_size_have_finite_scales():
    statistics = DenseStatistics(["x"])
    values = np.array([[3e20, 0.0, 1.0, 3e38, 0.0]])
    statistics.add("train", values)
    (scale,) = statistics.scales()
    logged = np.log1p(values[0])
    assert scale.log1p == (abs(scale.mean - logged.mean()) < 1e-9)
    assert np.isfinite([scale.mean, scale.std]).all()
    assert statistics._logged.std == pytest.approx(logged.std())


def test_rows_are_scored_with_the_bits_of_the_preparation(tmp_path):
    values = 1.7e12 + np.arange(300.0) * 1000
    columns = np.stack([values, values, values, values, values])
    prepared = prepare({"train": [write(tmp_path / "train.csv", columns)]}, tmp_path / "out", SCHEMA)
    encoder = prepared_encoder(prepared)
    given = pa.table({**dict(zip(SCHEMA.dense, columns, strict=True)), "a": ["1"] * 300})
    found = encoder.encode(encoder.check_table(given, SCHEMA.for_scoring()))["age"].to_numpy()
    assert prepared.dense_scales is not None
    scale = prepared.dense_scales[0]
    assert np.array_equal(found, ((values - scale.mean) / scale.std).astype(np.float32))
    assert len(np.unique(found)) == 300


def write(path, columns, schema=SCHEMA):
    rows = [",".join("" if np.isnan(value) else repr(float(value)) for value in row) for row in columns.T]
    lines = [f"{number % 2},{row},{number % 5}" for number, row in enumerate(rows)]
    path.write_text("\n".join([",".join(["y", *schema.dense, "a"]), *lines]) + "\n")
    return path


@pytest.fixture
def prepared(tmp_path, columns):
    files = {"train": [write(tmp_path / "train.csv", columns)], "test": [write(tmp_path / "test.csv", columns * 3)]}
    return prepare(files, tmp_path / "out", SCHEMA)


def dense_of(prepared, split):
    with pa.memory_map(str(prepared.split_path(split))) as file:
        table = pa.ipc.open_file(file).read_all()
    return np.stack([table.column(name).to_numpy() for name in prepared.schema.dense])


def test_prepared_values_are_standardized_by_training(prepared, columns):
    known = ~np.isnan(columns[1])
    train, test = dense_of(prepared, "train"), dense_of(prepared, "test")
    for values in (train[0], train[1][known], train[2]):
        assert (values.mean(), values.std()) == pytest.approx((0, 1), abs=1e-4)
    assert not train[1][~known].any()
    assert abs(test[0].mean()) > 1  # by the mean of training, not of its own
    for row, scale in zip(test, prepared.dense_scales, strict=True):
        assert np.array_equal(row, scale.apply(columns[prepared.schema.dense.index(scale.name)] * np.float32(3)))
    batch = next(iter(Loader(prepared, "train", batch_size=4)))
    assert np.array_equal(batch.dense.numpy(), train[:, :4].T)


def test_scales_are_kept_and_the_same_again(prepared, columns, tmp_path):
    assert Prepared.open(prepared.folder).dense_scales == prepared.dense_scales
    files = {"train": [tmp_path / "train.csv"], "test": [tmp_path / "test.csv"]}
    again = prepare(files, tmp_path / "again", SCHEMA)
    assert again.identity == prepared.identity
    other = write(tmp_path / "more.csv", columns[:, :3000])
    changed = fingerprint(prepare({"train": [other]}, tmp_path / "more", SCHEMA))
    assert differences(fingerprint(prepared), changed) == ["dense features"]


def test_data_that_are_not_standardized_have_no_scales(tmp_path, columns):
    schema = SCHEMA.model_copy(update={"dense_transform": "log1p"})
    data = prepare({"train": [write(tmp_path / "train.csv", columns)]}, tmp_path / "out", schema)
    assert data.dense_scales is None
    assert "dense_scales" not in json.loads((data.folder / "metadata.json").read_text())
    assert np.array_equal(dense_of(data, "train")[4], np.zeros(4000))


@pytest.mark.parametrize("change", [None, 0, 1])
def test_scales_that_do_not_fit_the_schema_are_refused(prepared, change):
    scales = prepared.dense_scales if change else None
    if change:
        scales = tuple(replace(scale, name=f"x{scale.name}") for scale in prepared.dense_scales or ())
    elif change == 0:
        scales = (DenseScale(name="age", log1p=False, mean=0.0, std=1.0, missing={}),)
    changed = replace(prepared, dense_scales=scales)
    changed.save()
    renew_checksums(prepared.folder)
    with pytest.raises(DataError, match="dense_scales: their names are not those"):
        Prepared.open(prepared.folder)
