"""The benchmarks of whole tensor-train tables: sizes by hand, and a quick run of each."""

import json

import pytest

from benchmarks.tensor_train import main
from benchmarks.tensor_train_footprint import PAPER, sizes


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sizes_by_hand():
    """27 rows of 8 at rank 2 are cores of 3·2·2, 3·2·2·2 and 3·2·2 elements; a table of 5 rows stays."""
    dense, cored, count = sizes([27, 5], 8, rank=2, min_rows=20)
    assert (dense, cored, count) == (4 * 8 * 32, 4 * (12 + 24 + 12 + 8 * 5), 1)


def test_the_papers_data_sets_are_smaller_than_in_the_paper(tmp_path):
    main(["--footprint", "--rank", "64,128", "--output", str(tmp_path / "lines.jsonl")])
    *found, summary = lines(tmp_path / "lines.jsonl")
    assert {line["case"] for line in found} == set(PAPER)
    assert all(line["times_smaller"] > line["paper_times_smaller"] for line in found)
    assert len(summary["summary"]) == len(found) == 12


@pytest.mark.slow
def test_forty_million_rows_are_trained_in_a_few_megabytes(tmp_path):
    path = tmp_path / "lines.jsonl"
    main(["--versus-dense", "--quick", "--batch", "256", "--zipf", "1.2", "--output", str(path)])
    dense, cored, _ = lines(path)
    assert (dense["num_rows"], cored["num_rows"]) == (100_000, 40_000_000)
    assert cored["rows_mb"] < 5 < dense["rows_mb"]
    assert cored["dense_mb_of_so_many_rows"] == 20_480
