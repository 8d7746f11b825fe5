import json
from dataclasses import dataclass

import torch

from rowmesh._support.json_lines import JsonLines
from rowmesh.observe.counters import CounterLog, Source


@dataclass
class Counts:
    ids: int = 0
    unique_ids: int = 0
    all_to_all_rounds: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


def test_a_line_for_each_step_and_group_holds_what_the_step_added(tmp_path):
    groups = [Counts(ids=100), Counts()]
    with JsonLines(tmp_path / "counters.jsonl") as lines:
        log = CounterLog([Source("small", groups[0]), Source("large", groups[1])], lines)
        for step in (1, 2):
            groups[0].ids += 10 * step
            groups[1].all_to_all_rounds += 3
            log.record(step)
        groups[0].ids += 1000  # an evaluation
        log.skip()
        groups[0].ids += 7
        log.record(3)
        with torch.device("meta"):  # torch's default device is not where counters are
            log.flush()
        log.flush()
    records = [json.loads(line) for line in (tmp_path / "counters.jsonl").read_text().splitlines()]
    assert [(r["step"], r["group"], r["ids"], r["all_to_all_rounds"]) for r in records] == [
        (1, "small", 10, 0),
        (1, "large", 0, 3),
        (2, "small", 20, 0),
        (2, "large", 0, 3),
        (3, "small", 7, 0),
        (3, "large", 0, 0),
    ]


def test_sources_have_fields_of_their_own(tmp_path):
    counts = Counts()
    with JsonLines(tmp_path / "counters.jsonl") as lines:
        log = CounterLog([Source("few", counts, ("ids", "absent")), Source("all", counts)], lines)
        counts.ids, counts.bytes_sent = 3, 5
        log.record(1)
        log.flush()
    few, all_ = [json.loads(line) for line in (tmp_path / "counters.jsonl").read_text().splitlines()]
    assert few == {"step": 1, "group": "few", "ids": 3, "absent": 0}
    assert (all_["ids"], all_["bytes_sent"], all_["all_to_all_rounds"]) == (3, 5, 0)
