"""The ablation of reordering compares the same ids in other orders, and finds what was planted."""

import gzip
import json

import numpy as np
import pytest

from benchmarks import tensor_train, tensor_train_orders
from benchmarks.click_sets import Criteo
from benchmarks.command import Report
from benchmarks.tensor_train_ablation import LEVELS
from benchmarks.tensor_train_orders import WHOLE, counts, planted, regrouped

ORDERS = {"scattered", "frequency", WHOLE}


@pytest.fixture(scope="module")
def options():
    return tensor_train.parse(["--ablation", "--quick", "--rank", "4", "--steps", "1", "--repeats", "1"])


@pytest.fixture(scope="module")
def orders(options):
    return planted(20_000, options)


def test_orders_are_of_the_same_ids(orders):
    """Every order numbers ids anew, each id always alike, so that equal ids stay equal and distinct ones distinct."""
    assert set(orders) == ORDERS
    by_frequency = np.concatenate(orders["frequency"])
    for batches in orders.values():
        ids = np.concatenate(batches)
        assert len(ids) == len(by_frequency)
        pairs = np.unique(np.stack([ids, by_frequency]), axis=1).shape[1]
        assert len(np.unique(ids)) == len(np.unique(by_frequency)) == pairs


def test_each_order_has_fewer_prefixes_than_the_one_before(orders):
    case = tensor_train.Case(num_rows=20_001, dim=16, rank=4, batch=4096)
    found = [counts(orders[name], case) for name in ("scattered", "frequency", WHOLE)]
    assert len({facts["unique_ids"] for facts in found}) == 1
    assert found[0]["unique_prefixes"] > 1.05 * found[1]["unique_prefixes"] > 1.05**2 * found[2]["unique_prefixes"]


def test_other_batches_hold_the_same_ids_in_their_order(orders):
    ids = np.concatenate(orders[WHOLE])
    for size in (1000, 4096, 16_384):
        parts = regrouped(orders[WHOLE], size)
        assert {len(part) for part in parts} == {size}
        np.testing.assert_array_equal(np.concatenate(parts), ids[: len(ids) // size * size])


@pytest.mark.slow
def test_every_arrangement_is_timed_in_every_order(options, orders, monkeypatch, tmp_path):
    monkeypatch.setattr(tensor_train_orders, "planted", lambda num_rows, options: orders)
    monkeypatch.setattr(options, "real_data", tmp_path)
    report = Report("tensor_train", tmp_path / "lines.jsonl")
    tensor_train_orders.run(report, options, tensor_train.Case, tensor_train.measure)
    *lines, criteo, avazu = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert "lacks train.tsv.gz" in criteo["unavailable"]
    assert "lacks train.csv.gz" in avazu["unavailable"]
    forward = [(line["order"], line["arrangement"]) for line in lines if line["kind"] == "forward"]
    assert sorted(forward) == sorted((order, level) for order in ORDERS for level in LEVELS)
    assert len(lines) == 3 * (len(LEVELS) + 5)
    assert all(line["step_ms"] > 0 and line["ratio"] > 0 for line in lines)


def test_real_rows_are_counted(tmp_path):
    rng = np.random.default_rng(0)
    source = tmp_path / "criteo_kaggle"
    source.mkdir()
    for name in Criteo.files:
        with gzip.open(source / name, "wt") as file:
            for _ in range(1000):
                ids = "\t".join(f"{rng.integers(400):08x}" for _ in range(26))
                file.write("1\t" + "\t".join(["3"] * 13) + "\t" + ids + "\n")
    report = Report("tensor_train", tmp_path / "lines.jsonl")
    tensor_train_orders.count_real(report, Criteo(source=source))
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert all(set(line["unique_prefixes"]) == ORDERS for line in lines)
    assert lines
