"""The benchmark of planning measures a process a case; nothing here is timed."""

import json

import pytest

from benchmarks import planning


@pytest.mark.slow
def test_every_case_has_its_ratios(capsys, tmp_path):
    output = tmp_path / "lines.jsonl"
    planning.main(
        ["--shape", "avazu", "--ranks", "16,32", "--replicas-ranks", "16", "--repeats", "1", "--output", str(output)]
    )
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert output.read_text().count("\n") == len(lines) + 1 == 4
    assert [(line["case"], line["ranks"]) for line in lines] == [("auto", 16), ("auto", 32), ("replicas auto", 16)]
    assert all(line["strategy"] == "cyclic" and line["peak_bytes"] > 1 << 20 for line in lines)
    assert len(last["summary"]) == 2 * len(lines)
