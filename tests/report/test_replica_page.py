"""The report of replica groups; its parts are those of `test_report`."""

import re

import pytest

from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement.text import bytes_text
from rowmesh.placement.topology import Topology
from rowmesh.placement.two_dimensional import compare_replicas
from rowmesh.report.replica_page import replica_report, write_replica_report
from tests.placement.problems import problem
from tests.placement.test_two_dimensional import AVERAGE, hot_and_cold
from tests.report.test_plan_page import Page


@pytest.fixture(scope="module", params=["mixed", "alike", "one"])
def comparison(request):
    if request.param == "mixed":
        return compare_replicas(hot_and_cold(), sync=AVERAGE)
    counts = [2, 4] if request.param == "alike" else [1]
    return compare_replicas(problem(Topology.load("2x4")), "cyclic", Synchronization(), counts)


def test_every_candidate_is_a_row(comparison):
    text = replica_report(comparison, "<b>clicks")
    page = Page(text)
    shown = " ".join(page.texts)
    assert "<b>" not in text.split("<style>")[0]
    assert "Replica groups" in shown
    assert comparison.why.replace("'", "&#x27;") in text
    for candidate in comparison.candidates:
        assert bytes_text(candidate.needed_bytes) in shown
        if candidate.cost is not None:
            assert comparison.cost_text(candidate.total_s) in shown
        if candidate.complaint:
            assert candidate.complaint in shown
    table = text.split("Replica groups")[1].split("</table>")[0]
    assert table.count("class=chosen") == 1
    assert table.count("<tr") == len(comparison.candidates) + 1


def test_every_part_has_its_sections(comparison):
    text = replica_report(comparison, "clicks")
    assert text.count("<h2>Ranges</h2>") == len(comparison.parts)
    T = comparison.plan.world_size
    for replicas, part in comparison.parts.items():
        if replicas > 1:
            assert f"with {replicas} replicas: a group of {T // replicas} ranks" in text
        for table in part.plan.tables:
            assert len(re.findall(f"<summary>{re.escape(table.name.replace('<', '&lt;'))}", text)) <= 1
    assert text.count("<footer>") == 1


def test_it_is_written(comparison, tmp_path):
    write_replica_report(comparison, tmp_path / "report.html", "clicks")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == replica_report(comparison, "clicks")
