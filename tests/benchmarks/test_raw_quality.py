"""Raw beside prepared training: both read the same rows in one order, and are compared cut by cut."""

import pytest

from benchmarks import raw_quality
from benchmarks.raw_quality import BASE, QUICK_RATES, compare, cut, drawn_rows, main
from rowmesh.data import Prepared


class Lines:
    """A report that keeps what is written."""

    def __init__(self):
        self.lines, self.ratios = [], {}

    def line(self, **record):
        self.lines.append(record)

    def ratio(self, case, ratio):
        self.ratios[case] = ratio


def test_contestants_read_the_same_rows(tmp_path):
    lines = drawn_rows(200)
    made = cut(lines, b"", "criteo", tmp_path, seed=3)
    raw = {split: (tmp_path / "raw" / split / "rows.txt").read_bytes() for split in ("train", "test")}
    assert sorted(b"".join(raw.values()).splitlines(keepends=True)) == sorted(lines)
    splits = Prepared.open(made.folder / "prepared").splits
    assert {split: each.samples for split, each in splits.items()} == {"train": 160, "test": 40}
    assert {split: text.count(b"\n") for split, text in raw.items()} == {"train": 160, "test": 40}


def test_contestants_are_compared_cut_by_cut(tmp_path, monkeypatch):
    few = {name: raw_quality.CONTESTANTS[name] for name in (BASE, "raw, dynamic")}
    monkeypatch.setattr(raw_quality, "CONTESTANTS", few)
    cuts = [cut(drawn_rows(320), b"", "criteo", tmp_path / str(seed), seed) for seed in range(2)]
    report = Lines()
    compare(cuts, dict.fromkeys(raw_quality.FAMILIES.values(), QUICK_RATES), 2, "drawn", report)
    *means, differences = report.lines
    assert [line["contestant"] for line in means] == list(few)
    assert all(len(line["windows"]) == 2 for line in means)  # four steps
    gap = means[1]["test"]["auc"] - means[0]["test"]["auc"]
    assert differences["differences"]["test_auc"]["mean"] == pytest.approx(gap, abs=2e-4)
    assert differences["differences"]["progressive_auc"]["seeds"] == 2


def test_a_folder_without_rows_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"criteo_kaggle lacks train.tsv.gz"):
        main(["--data-folder", str(tmp_path)])
    with pytest.raises(SystemExit):
        main([])
