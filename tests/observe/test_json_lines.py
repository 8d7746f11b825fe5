import json
import math
from pathlib import Path

import pytest

from rowmesh.observe import JsonLines


def test_lines_are_on_disk_at_once_and_are_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write(step=1, loss=0.5)
        lines.write(step=2, loss=math.nan, lr=math.inf)
        records = [json.loads(line, parse_constant=None) for line in path.read_text().splitlines()]
    assert records == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None, "lr": None}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_full_disk_is_named():
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"), JsonLines(Path("/dev/full")) as lines:
        lines.write(step=1)


def test_without_a_path_nothing_is_written():
    with JsonLines(None) as lines:
        lines.write(step=1)
