import shutil
from dataclasses import replace

import pytest

from rowmesh.placement import Plan
from rowmesh.placement.plan import RowRange
from rowmesh.report.run_record import read_run
from rowmesh.report.run_tables import tables_of
from tests.support.commands import run_on
from tests.support.runs import prepare_run


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    done = run_on(ranks, ["train", str(prepare_run(folder)), "train.log_every=1"], ranks=2)
    assert done.status == 0, done.err
    return folder / "run"


def test_what_the_plan_predicts_is_what_is_counted(run):
    record = read_run(run)
    tables = tables_of(record)
    assert record.missing == []
    assert record.traffic.bytes_per_step / tables.predicted_bytes == pytest.approx(1.0, abs=0.15)


def test_rounded_messages_are_predicted(ranks, tmp_path):
    narrow = ("parallel.transport=collective", "parallel.wire_dtype=bfloat16", "train.log_every=1")
    done = run_on(ranks, ["train", str(prepare_run(tmp_path)), *narrow], ranks=2)
    assert done.status == 0, done.err
    record = read_run(tmp_path / "run")
    counted, predicted = record.traffic.bytes_per_step, tables_of(record).predicted_bytes
    assert counted is not None
    assert predicted is not None
    assert counted / predicted == pytest.approx(1.0, abs=0.15)


def test_tables_have_copies_and_rare_ids(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    plan = Plan.load(run / "plan.json")
    first, *others = plan.tables
    copied = replace(first, ranges=(RowRange(0, first.shape.num_rows, "replicated"),))
    replace(plan, tables=(copied, *others)).save(tmp_path / "run" / "plan.json")
    tables = tables_of(read_run(tmp_path / "run")).tables
    assert (tables[0].copied_rows, tables[0].copied_share) == (first.shape.num_rows, 1.0)
    assert (tables[1].copied_rows, tables[1].copied_share) == (0, 0.0)
    assert all((table.dim, table.storage) == (4, "dense") for table in tables)
    assert all({"train", "test"} <= table.rare_share.keys() for table in tables)


def test_a_run_whose_data_are_gone_says_so(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace(str(run.parent), str(tmp_path / "gone")))
    tables = tables_of(read_run(tmp_path / "run"))
    assert tables.predicted_bytes is None
    assert "the counts of the data cannot be read" in tables.why_not
    assert tables.tables[0].copied_rows is None
