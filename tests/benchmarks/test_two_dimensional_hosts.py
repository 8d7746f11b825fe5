"""What `two_dimensional --hosts` makes of its options, and that its ranks count what they say; nothing is timed."""

import argparse
import json
from dataclasses import asdict, replace

import pytest

from benchmarks import two_dimensional
from benchmarks.contestant import ContestantError
from benchmarks.hosts import HostsError, bits_per_s
from benchmarks.planned_step import true_profile
from benchmarks.ranks.two_dimensional import Commands
from benchmarks.two_dimensional_hosts import SAME_ORDER, VARIANTS, Case
from benchmarks.workload import Workload
from rowmesh.placement import Plan
from tests.benchmarks.test_hosts import can_make_hosts

__all__ = ["can_make_hosts"]
WORKLOAD = Workload(max_rows=400, global_batch=64, steps=4, warmup=4)


def test_rates_are_those_of_tc():
    assert [bits_per_s(text) for text in ("1gbit", "2.5mbit", "10kbit")] == [10**9, 2_500_000, 10_000]
    for text in ("1", "gbit", "0gbit", "-1gbit", "1gb"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is no rate; give one such as 1gbit"):
            bits_per_s(text)


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (["--hosts", "3x2"], "--hosts 3x2: a cable joins 2 hosts"),
        (["--hosts", "2x2", "--hosts-batch", "10"], "--hosts-batch must divide by 4 ranks"),
    ],
)
def test_mistakes_are_named(arguments, mistake):
    with pytest.raises(SystemExit, match=mistake):
        two_dimensional.main(arguments)


def test_a_rate_that_is_none_is_a_mistake(capsys):
    with pytest.raises(SystemExit):
        two_dimensional.main(["--hosts", "2x2", "--rate", "fast"])
    assert "'fast' is no rate" in capsys.readouterr().err


def test_where_hosts_cannot_be_made_a_line_says_so(capsys, monkeypatch):
    def refuse(self):
        raise HostsError("network namespaces need root")

    monkeypatch.setattr("benchmarks.hosts.Hosts.__enter__", refuse)
    two_dimensional.main(["--hosts", "2x2", "--quick"])
    line, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert line["unavailable"] == "network namespaces need root"
    assert last["summary"] == {}


def run_variants(mesh, plans):
    """What a rank counts in the rounds of each contestant, and what it has learnt."""
    commands = Commands(WORKLOAD, replace(mesh, hosts=(0, 0, 1, 1)))
    answers = {}
    for name, plan in plans.items():
        commands.make(name, plan, asdict(VARIANTS[name].synchronization), VARIANTS[name].ahead)
        moved = commands.round(name, WORKLOAD.warmup, WORKLOAD.steps, 0)
        answers[name] = moved | commands.digest(name)
        commands.drop(name)
    return answers


def test_contestants_do_the_same_work(ranks, tmp_path):
    plans, shapes = {}, true_profile(WORKLOAD).shapes
    for name, variant in VARIANTS.items():
        path = tmp_path / f"{name}.json"
        Plan.cyclic(shapes, 4, 2, replicas=variant.replicas, together=variant.together).save(path)
        plans[name] = str(path)
    for answers in ranks.run(run_variants, plans, world_size=4):
        assert len({answers[name]["digest"] for name in SAME_ORDER}) == 1
        for name, answer in answers.items():
            assert len(answer["seconds"]["step"]) == 1
            assert answer["exchange_bytes"] > 0
            assert (answer["told_rows"] > 0) == (answer["synchronization_bytes"] > 0) == (VARIANTS[name].replicas > 1)
        bytes_of = {name: answer["synchronization_bytes"] for name, answer in answers.items()}
        assert bytes_of["M=2 average every 4"] < bytes_of["M=2 average"] < bytes_of["M=2 average dense"]


def test_contestants_that_learnt_something_else_are_refused():
    class Ranks:
        def ask(self, command, name):
            return [{"digest": "b" if name == "M=2 exact" else "a"}]

    case = Case.__new__(Case)
    case._workload = WORKLOAD
    with pytest.raises(ContestantError, match="after the same steps rows differ"):
        case._check(Ranks())  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.usefixtures("can_make_hosts")
def test_two_hosts(capsys):
    two_dimensional.main(["--hosts", "2x2", "--quick"])
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["contestant"] for line in lines] == list(VARIANTS)
    assert all(line["cable_bytes"] * 1.1 >= line["synchronization_bytes"] / 2 for line in lines)
    assert any("dense / touched-only" in key for key in last["summary"])
