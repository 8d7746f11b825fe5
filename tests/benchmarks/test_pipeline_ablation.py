"""What `pipeline --ablation` and `--replicas` make of what ranks answer, and what ranks count; nothing is timed."""

import json
from dataclasses import asdict
from xml.etree import ElementTree

import pytest

from benchmarks import pipeline
from benchmarks.hosts import HostsError
from benchmarks.pipeline_ablation import MODULE, OFF, Calibration, calibrate, modes
from benchmarks.pipeline_figures import HEIGHT, WIDTH, draw
from benchmarks.pipeline_hosts import Variant
from benchmarks.pipeline_replicas import kinds
from benchmarks.pipeline_rounds import MESSAGES, Rounds, cable_ms, describe
from benchmarks.ranks.pipeline import Commands
from benchmarks.workload import Workload
from tests.benchmarks.test_hosts import can_make_hosts

__all__ = ["can_make_hosts"]
WORKLOAD = Workload(max_rows=300, dim=4, global_batch=32)
SOME = (OFF, "window N=2", "both K=1 N=2 clustered")
NUM_BYTES, FIXED_MS = 500_000, 10.0


def rounds(rate_bits_per_s, wait_ms, **changes):
    """A step in turn over a cable: 20 ms of retrieval, and 10 ms beside."""
    communication = FIXED_MS + cable_ms(NUM_BYTES, rate_bits_per_s)
    parts = {"accelerated": wait_ms, "computed": wait_ms + 4.0, "communication": communication, "retrieval": 20.0}
    parts |= {"exposed_communication": communication, "exposed_retrieval": 20.0} | changes
    rank = {
        "seconds": {"step": [(communication + 20.0 + 10.0 + wait_ms) / 1e3]},
        "parts": {name: ms / 1e3 for name, ms in parts.items()},
        "disk": {"read_s": 0.004, "bytes_read": 4096},
        "cpu_s": 0.008,
        "received_bytes": 1000.0,
        "tasks": {"average.0": 0.002, "rows.0": 0.001, "rows.1": 0.003},
    }
    return Rounds([[rank, rank]] * 3, [NUM_BYTES] * 3)


def test_a_calibrated_step_has_the_shares():
    found = Calibration(500_000_000, 1.0)
    off = rounds(found.rate_bits_per_s, found.wait_ms)
    found = calibrate(found, off, communication=0.4, retrieval=0.2)
    off = rounds(found.rate_bits_per_s, found.wait_ms)
    assert off.step_ms == pytest.approx(100.0, rel=1e-6)
    assert off.part_ms("communication") == pytest.approx(40.0, rel=1e-6)
    again = calibrate(found, off, communication=0.4, retrieval=0.2)
    assert again.rate_bits_per_s == pytest.approx(found.rate_bits_per_s, rel=1e-6)


def test_a_cable_that_is_given_is_kept():
    found = calibrate(Calibration(10**9, 1.0), rounds(10**9, 1.0), communication=0.2, retrieval=0.2, keeps_rate=True)
    off = rounds(found.rate_bits_per_s, found.wait_ms)
    assert found.rate_bits_per_s == 10**9
    assert off.part_ms("communication") / off.step_ms == pytest.approx(0.2)


def test_what_does_not_fit_into_a_step_is_no_negative_wait():
    off = rounds(10**8, 1.0)
    assert calibrate(Calibration(10**8, 1.0), off, communication=0.9, retrieval=0.09, keeps_rate=True).wait_ms == 1.0
    assert calibrate(Calibration(10**8, 1.0), off, communication=0.01, retrieval=0.9).rate_bits_per_s == 20 * 10**9


def test_a_line_says_what_is_hidden():
    off = rounds(400_000_000, 30.0)
    assert describe(off, off, 400_000_000)["exposed"] == 1.0
    communication = off.part_ms("communication")
    line = describe(
        rounds(400_000_000, 30.0, exposed_communication=communication / 4, exposed_retrieval=5.0), off, 400_000_000
    )
    assert (line["exposed"], line["exposed_of_off"], line["retrieval_hidden"]) == (0.25, 0.25, 0.75)
    assert line["least_exposed"] == 0.0
    assert describe(off, rounds(400_000_000, communication / 2 - 4.0), 400_000_000)["least_exposed"] == 0.5
    assert line["speedup"] == 1.0
    assert line["utilisation"] == pytest.approx(30.0 / off.step_ms, abs=1e-3)
    assert (line["disk_ms"], line["disk_bytes"], line["sent_bytes"], line["cpu_ms"]) == (4.0, 4096, 2000.0, 8.0)
    assert line["tasks_ms"] == {"average": 2.0, "rows": 4.0}
    parts = line["computed_ms"] + line["exposed_ms"] + line["exposed_retrieval_ms"] + line["other_ms"]
    assert parts == pytest.approx(line["step_ms"], abs=0.01)


def test_modes_are_off_and_what_has_so_many_micro_batches():
    assert [mode.name for mode in modes(1, [1, 2]).values()] == [OFF, "look-ahead", "look-ahead", "window"]
    several = modes(4, [1, 2])
    assert [mode.name for mode in several.values()] == [OFF, *["window"] * 2, *["both"] * 8, *["paper"] * 2]
    assert several[OFF].variant == Variant(0, 1, overlap=False)
    assert {mode.variant.micro_batches for mode in several.values()} == {1, 4}
    assert [mode.is_clustered for mode in several.values()][1:] == [False, True] * 6


def test_kinds_have_both_synchronizations():
    names = [kind.name for kind in kinds([1, 2, 4])]
    assert names[:2] == ["M=1, in turn", "M=1, pipeline"]
    assert len(set(names)) == 10


@pytest.mark.parametrize("case", ["--ablation", "--replicas"])
def test_where_hosts_cannot_be_made_a_line_says_so(capsys, monkeypatch, case):
    def refuse(self):
        raise HostsError("network namespaces need root")

    monkeypatch.setattr("benchmarks.hosts.Hosts.__enter__", refuse)
    pipeline.main([case, "--quick"])
    line, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (line["unavailable"], last["summary"]) == ("network namespaces need root", {})


@pytest.mark.parametrize(
    "arguments",
    [["--ablation", "--ablation-batch", "10"], ["--ablation", "--ablation-depth", "0"], ["--replicas", "3"]],
)
def test_mistakes_are_named(arguments):
    with pytest.raises(SystemExit, match=r"--ablation-batch must|numbers of 1 or more|--replicas must divide"):
        pipeline.main(arguments)


def run_modes(mesh, folder):
    """What a rank answers of some modes over a file, and of replicas."""
    tiers = {"folder": folder, "fast_share": 0.5, "fast_rows": 1}
    commands, answers = Commands(WORKLOAD, mesh, tiers, num_batches=4), {}
    assert "unavailable" in commands.hold("three", 3, {}, None)
    assert commands.hold("two", 2, {"mode": "average"}, None) == {}
    several = modes(2, [1])
    for name, mode in {name: several[name] for name in SOME}.items():
        commands.make(name, 4, 1.0, **asdict(mode.variant))
        commands.wait(2.0)
        answers[name] = commands.round(name, 1, 3, mode.variant.depth + 1, MESSAGES)
        commands.drop(name)
    commands.make("replicas", 4, 1.0, tables="two", **asdict(Variant(1, 2)))
    answers["replicas"] = commands.round("replicas", 1, 2, 2, (*MESSAGES, "update"))
    commands.make("in memory", 4, **asdict(Variant(1, 2)))
    answers["in memory"] = commands.round("in memory", 1, 2)
    commands.close()
    return answers


def test_ranks_count_the_parts_of_a_step(ranks, tmp_path):
    for answers in ranks.run(run_modes, str(tmp_path), world_size=2):
        for name, answer in answers.items():
            parts, step_s = answer["parts"], answer["seconds"]["step"][0]
            assert 0 < parts["accelerated"] <= parts["computed"] <= step_s
            assert 0 <= parts["exposed_communication"] <= parts["communication"] <= step_s
            assert 0 <= parts["exposed_retrieval"] <= parts["retrieval"] <= step_s
            assert answer["received_bytes"] > 0
            if name not in ("replicas", "in memory"):
                assert parts["accelerated"] >= 0.002
                assert answer["disk"]["pins"] == pytest.approx(1.0, abs=0.7)
        off = answers[OFF]["parts"]
        assert off["exposed_communication"] == pytest.approx(off["communication"])
        assert off["exposed_retrieval"] == pytest.approx(off["retrieval"])
        assert {task.split(".")[0] for task in answers[OFF]["tasks"]} >= {
            "read",
            "route",
            "retrieve",
            "rows",
            "average",
        }
    assert list(tmp_path.iterdir()) == []
    assert Commands.__module__ == MODULE


def lines():
    found = {}
    for count in (1, 4, 32):
        for name, mode in modes(min(count, 31), [1]).items():
            found = {"case": "ablation", "mode": mode.name, "is_clustered": mode.is_clustered, "contestant": name}
            found |= {"asked_micro_batches": count, "micro_batches": mode.variant.micro_batches, "dim": 64, "layers": 4}
            found |= {"step_ms": 100.0 / count, "speedup": 1.0, "exposed": 0.5, "utilisation": 0.3}
            yield found
    for layers in (2, 8):
        yield found | {"case": "layers", "layers": layers, "mode": "both"}
    for dim in (64, 128):
        yield found | {"case": "dim", "dim": dim, "mode": "both"}


def test_a_figure_has_the_paper_beside():
    figure = ElementTree.fromstring(draw([{"summary": {}}, *lines()]))
    assert figure.get("viewBox") == f"0 0 {2 * WIDTH} {3 * HEIGHT}"
    texts = [element.text for element in figure.iter() if element.text]
    for text in ("look-ahead", "N=32", "dim 128", "paper, 1,536 NPUs", "3.06", ".25", ".28", ".13", ".90"):
        assert text in texts
    for bar in figure.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, width, height = (float(bar.get(name, "nan")) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + width <= WIDTH
        assert 0 <= y <= y + height <= HEIGHT
    assert len(list(ElementTree.fromstring(draw([])))) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("can_make_hosts")
def test_the_ablation(capsys, tmp_path):
    figure = tmp_path / "figure.svg"
    pipeline.main(["--ablation", "--sweep", "--quick", "--figure", str(figure)])
    *found, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["case"] for line in found} == {"ablation", "layers"}
    assert {line["mode"] for line in found} == {OFF, "look-ahead", "window", "both", "paper"}
    assert all(0 <= line["exposed"] <= 1 and 0 < line["utilisation"] < 1 for line in found)
    assert all(line["cable_bytes"] > 0 and line["disk_bytes"] > 0 for line in found)
    assert any("target 1.8" in key for key in last["summary"])
    assert ElementTree.fromstring(figure.read_text()) is not None


@pytest.mark.slow
@pytest.mark.usefixtures("can_make_hosts")
def test_replicas(capsys):
    pipeline.main(["--replicas", "1,2", "--quick"])
    *found, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["contestant"] for line in found] == [kind.name for kind in kinds([1, 2])]
    assert all(line["samples_per_s"] > 0 for line in found)
    assert len(last["summary"]) == len(found) - 1
