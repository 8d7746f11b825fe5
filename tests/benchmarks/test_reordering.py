"""The benchmark of reordering runs, and finds what was planted."""

import json

import pytest

from benchmarks.reordering import main


@pytest.mark.slow
def test_planted_communities_are_found(tmp_path):
    output = tmp_path / "lines.jsonl"
    main(["--quick", "--output", str(output), "--scratch", str(tmp_path)])
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    table = next(line for line in lines if line.get("table") == "item")
    assert table["num_ids"] > 10_000
    assert table["prefixes_after"] < 0.9 * table["prefixes_before"]
    assert table["prefixes_after"] < table["prefixes_after_shuffled"]
    assert next(line for line in lines if "peak_mb" in line)["elapsed_s"] > 0
