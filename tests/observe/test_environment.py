import json

from rowmesh.observe.environment import environment_report, environment_text


def test_report_is_json_and_text_names_every_value(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    report = environment_report()
    assert json.loads(json.dumps(report)) == report
    assert report["variables"]["OMP_NUM_THREADS"] == "1"
    assert report["software"]["torch"]
    assert report["hardware"]["threads"] >= 1
    text = environment_text(report)
    assert all(name in text for section in report.values() for name in section)


def test_shared_memory_is_said_to_be_what_it_is():
    assert environment_report()["hardware"]["shared memory between ranks"] in ("memfd", "none")
