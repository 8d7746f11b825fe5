"""Synthetic data sets: through preparation they come out as they were drawn, whatever the format."""

import gc
import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from rowmesh.data import DataSource, PlantedConfig, Prepared, prepare, synthesize, synthetic
from rowmesh.data.planted import PlantedModel
from rowmesh.data.synthetic import Scores
from rowmesh.errors import ConfigurationError, DataError, RowmeshError

SMALL = PlantedConfig(num_rows=(30, 400, 5), seed=2)
COUNTS = {"train": 5_000, "validation": 700, "test": 900}


def prepare_folder(folder, out, **options):
    source = DataSource.find([folder])
    return prepare(source.files, out, source.schema, optimum=source.optimum, **options)


def test_text_and_parquet_prepare_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "CHUNK_SAMPLES", 1_000)
    monkeypatch.setattr(synthetic, "SHARD_CHUNKS", 2)
    for kind in ("text", "parquet"):
        synthesize(tmp_path / kind, COUNTS, SMALL, file_format=kind)
        prepare_folder(tmp_path / kind, tmp_path / f"{kind}-prepared")
    assert len(list((tmp_path / "text").glob("train-*.tsv"))) == 3
    for name in ("train.arrow", "test.arrow", "counts/C2.npy"):
        text, parquet = (tmp_path / f"{kind}-prepared" / name for kind in ("text", "parquet"))
        assert text.read_bytes() == parquet.read_bytes()


def test_the_optimum_is_that_of_the_true_probabilities(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "CHUNK_SAMPLES", 1_000)
    synthesize(tmp_path / "raw", COUNTS, SMALL)
    prepared = prepare_folder(tmp_path / "raw", tmp_path / "out")
    model = PlantedModel(SMALL)
    drawn = model.draw(1_000, stream=(2, 0)).first(900)
    with pa.memory_map(str(prepared.split_path("test"))) as file:
        labels = pa.ipc.open_file(file).read_all().column("label").to_numpy()
    np.testing.assert_array_equal(labels, drawn.labels)
    auc = binary_auroc(torch.from_numpy(drawn.probabilities), torch.from_numpy(drawn.labels.astype(int)))
    optimum = prepared.splits["test"].optimum
    assert optimum is not None
    assert abs(optimum["auc"] - float(auc)) < 1e-5
    assert optimum["samples"] == 900
    assert Prepared.open(tmp_path / "out").splits["test"].optimum == optimum


def test_a_longer_split_begins_with_the_shorter(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "CHUNK_SAMPLES", 64)
    texts = []
    for count in (100, 200):
        synthesize(tmp_path / str(count), {"train": count}, SMALL, file_format="text")
        texts.append((tmp_path / str(count) / "train-00000.tsv").read_text())
    assert texts[1].startswith(texts[0])


def test_multi_hot(tmp_path):
    config = PlantedConfig(num_rows=(30, 400), bag_sizes={1: 3})
    synthesize(tmp_path / "raw", {"train": 500}, config)
    prepared = prepare_folder(tmp_path / "raw", tmp_path / "out", min_count=1)
    assert [table.multi_hot for table in prepared.tables] == [False, True]
    assert 1200 < prepared.counts("C2").sum() < 1800
    with pytest.raises(ConfigurationError, match="no multi-hot columns"):
        synthesize(tmp_path / "text", {"train": 5}, config, file_format="text")


def test_output_is_guarded(tmp_path):
    synthesize(tmp_path / "raw", {"train": 10}, SMALL)
    with pytest.raises(RowmeshError, match="not empty"):
        synthesize(tmp_path / "raw", {"train": 10}, SMALL)
    with pytest.raises(ConfigurationError, match="unknown splits"):
        synthesize(tmp_path / "other", {"dev": 10}, SMALL)
    for counts in ({"test": 5}, {"train": 0}, {"train": -5}, {"train": 5, "test": -1}):
        with pytest.raises(ConfigurationError, match="split needs 1 or more samples"):
            synthesize(tmp_path / "other", counts, SMALL)
    assert not (tmp_path / "other").exists()


def test_an_interruption_leaves_nothing_and_no_complaint(tmp_path, recwarn):
    def interrupted(what, share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(tmp_path / "raw", {"train": 10}, SMALL, progress=interrupted)
    gc.collect()  # what a writer cannot finish when it is collected would be printed
    assert not list(tmp_path.iterdir())


def test_sources(tmp_path):
    synthesize(tmp_path / "raw", {"train": 10, "test": 5}, SMALL)
    source = DataSource.find([tmp_path / "raw"])
    assert {split: [path.name for path in files] for split, files in source.files.items()} == {
        "train": ["train-00000.parquet"],
        "test": ["test-00000.parquet"],
    }
    assert source.optimum == json.loads((tmp_path / "raw" / "optimum.json").read_text())
    assert DataSource.find([tmp_path / "raw" / "train-00000.parquet"], "criteo").schema.quote == ""
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no file whose name begins with 'train'"):
        DataSource.find([tmp_path / "empty"], "criteo")
    with pytest.raises(DataError, match="gone: no such file or folder"):
        DataSource.find([tmp_path / "gone"])
    with pytest.raises(ConfigurationError, match="--schema"):
        DataSource.find([tmp_path / "raw" / "optimum.json"])
    with pytest.raises(ConfigurationError, match="is a folder"):
        DataSource.find([tmp_path / "raw"], test=[tmp_path / "raw" / "optimum.json"])
    (tmp_path / "raw" / "schema.toml").unlink()
    with pytest.raises(ConfigurationError, match=r"has no schema\.toml"):
        DataSource.find([tmp_path / "raw"])


@pytest.mark.parametrize(
    ("name", "split"), [("dev.tsv.gz", "validation"), ("Val.tsv", "validation"), ("holdout", "test")]
)
def test_files_named_after_splits_of_others_are_not_ignored(tmp_path, name, split):
    for file in ("train.tsv", "README", name):
        (tmp_path / file).touch()
    with pytest.raises(DataError, match=rf"{name} would not be read.*Rename it to {split}.*--{split}"):
        DataSource.find([tmp_path], "criteo")
    (tmp_path / name).unlink()
    assert list(DataSource.find([tmp_path], "criteo").files) == ["train"]


def test_against_an_oracle():
    rng = np.random.default_rng(0)
    probabilities = 1 / (1 + np.exp(-rng.normal(-1, 1.3, 50_000)))
    labels = (rng.random(50_000) < probabilities).astype(np.int8)
    scores = Scores()
    for part in np.array_split(np.arange(50_000), 7):
        scores.add(probabilities[part], labels[part])
    p, y = torch.from_numpy(probabilities), torch.from_numpy(labels.astype(np.int64))
    assert abs(scores.auc - float(binary_auroc(p, y))) < 1e-5
    loss = torch.nn.functional.binary_cross_entropy(p, y.double())
    assert abs(scores.log_loss - float(loss)) < 1e-12
    assert scores.positive_rate == labels.mean()


def test_ties_count_half():
    scores = Scores()
    probabilities, labels = np.array([0.2, 0.2, 0.7, 0.2]), np.array([0, 1, 1, 0])
    scores.add(probabilities, labels)
    pairs = [(p > n) + (p == n) / 2 for p in (0.2, 0.7) for n in (0.2, 0.2)]
    assert scores.auc == np.mean(pairs)
    assert Scores().auc == 0.5
