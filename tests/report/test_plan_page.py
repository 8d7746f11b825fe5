import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from rowmesh.placement.comparison import Candidate, compare
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import QUICK
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.text import bytes_text
from rowmesh.placement.topology import Topology
from rowmesh.report.plan_page import report, write_report
from tests.placement.problems import mlperf, problem

VOID = {"meta", "br", "link", "img", "input", "wbr"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps tags, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module", params=["uniform", "2x4", "one"])
def comparison(request):
    topology = {"uniform": Topology.uniform(4), "2x4": Topology.load("2x4"), "one": Topology.uniform(1)}[request.param]
    return compare(problem(topology, mode="infer", extra_memory=0.1))


def test_it_is_one_file_that_asks_for_nothing(comparison):
    text = report(comparison, "clicks")
    page = Page(text)
    assert not {name for _, name, _ in page.attributes} & {"src", "href", "srcset", "action", "onload"}
    assert not re.search(r"url\(|@import|<script|<link|https?://", text)


def test_it_shows_every_strategy_and_table_and_why(comparison):
    page = Page(report(comparison, "<b>clicks"))
    text = " ".join(page.texts)
    cards = [
        value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label") and "busiest" in value
    ]
    assert sorted(card.split(":")[0] for card in cards) == sorted(QUICK)
    for candidate in comparison.candidates:
        assert bytes_text(candidate.cost.total_bytes) in text
        assert candidate.complaint in text
    assert comparison.why in text
    assert "<b>clicks: where every row lives" in text
    for table in comparison.plan.tables:
        assert text.count(table.name) >= 2


def test_strategies_without_a_plan_say_why(comparison):
    refused = Candidate("table_wise", refusal="tables need <more>")
    kept = [candidate for candidate in comparison.candidates if candidate.name != refused.name]
    page = Page(report(replace(comparison, candidates=(*kept, refused)), "clicks"))
    assert refused.refusal in page.texts


def test_light_and_dark_and_narrow(comparison):
    text = report(comparison, "clicks")
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_many_ranks_stay_small(tmp_path):
    comparison = compare(problem(Topology.load("16x8")))
    write_report(comparison, tmp_path / "report.html", "clicks")
    assert (tmp_path / "report.html").stat().st_size < 1_500_000
    Page((tmp_path / "report.html").read_text())


def test_tables_that_send_sums_say_so():
    comparison = compare(Problem(mlperf("auto"), Topology.uniform(8), Request(batch_size=512)), "cyclic")
    text = report(comparison, "clicks")
    Page(text)
    assert text.count(", sums from rank") == sum(table.send == "sums" for table in comparison.plan.tables) == 12
    assert (
        "12 of 26 tables send sums: the busiest rank has 8.53 MB a step, as rows 35.0 MB; the other strategies" in text
    )
