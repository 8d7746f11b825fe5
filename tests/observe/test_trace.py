"""Trace: events of several ranks as Chrome-trace JSON."""

import json

from rowmesh.observe.trace import Event, trace_events, write_trace

RANKS = [
    [Event("rows", "rows", 3, 0, 10.0, 10.5), Event("compute", "compute", 3, 0, 10.5, 11.0)],
    [Event("rows", "rows", 3, 0, 10.25, 10.75)],
    [],
]


def test_times_begin_with_the_first_event_of_any_rank():
    done = [event for event in trace_events(RANKS) if event["ph"] == "X"]
    assert [(event["pid"], event["name"], event["ts"], event["dur"]) for event in done] == [
        (0, "rows", 0.0, 5e5),
        (0, "compute", 5e5, 5e5),
        (1, "rows", 2.5e5, 5e5),
    ]
    assert done[0]["args"] == {"batch": 3, "micro-batch": 0}


def test_ranks_and_threads_have_names():
    names = [event["args"]["name"] for event in trace_events(RANKS) if event["ph"] == "M"]
    assert names == ["rank 0", "rows", "compute", "rank 1", "rows", "rank 2"]


def test_arrows_follow_a_batch_within_a_rank():
    arrows = [event for event in trace_events(RANKS) if event["ph"] in "st"]
    assert [(event["ph"], event["id"], event["tid"]) for event in arrows] == [
        ("s", "0.3", 0),
        ("t", "0.3", 1),
        ("s", "1.3", 0),
    ]


def test_a_file_is_json(tmp_path):
    write_trace(tmp_path / "trace.json", RANKS)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == trace_events(RANKS)
