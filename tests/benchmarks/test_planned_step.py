"""What `embedding_step --plan` predicts, and that plans do the same work; nothing here is timed."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.command import Report, parse
from benchmarks.planned_step import crossing, run, topology, true_profile
from benchmarks.ranks.embedding_step import SparsePart
from benchmarks.workload import Workload, Zipf, make_batches
from rowmesh.placement import Plan
from rowmesh.placement.cost import cost_of
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import search
from tests.benchmarks.test_hosts import can_make_hosts

__all__ = ["can_make_hosts"]
WORKLOAD = Workload(max_rows=400, global_batch=64, steps=14, warmup=2)


def test_bytes_between_nodes_are_told_by_who_gets_them():
    link_bytes = np.array([[0, 1, 2, 3], [1, 0, 2, 3], [5, 5, 0, 1], [5, 5, 1, 0]])
    assert crossing(link_bytes, 2) == [10, 20]
    assert crossing(link_bytes, 4) == [0]


def test_the_profile_is_the_law_of_the_workload():
    profile = true_profile(WORKLOAD)
    for number, rows in enumerate(WORKLOAD.table_rows):
        table, law = profile.tables[number], Zipf(rows, WORKLOAD.zipf).probabilities
        assert np.repeat(table.accesses, table.lengths) == pytest.approx(law, rel=2e-3)
        assert table.total_accesses == pytest.approx(1)
        assert table.is_falling


def test_the_profile_counts_the_bags_of_each_table():
    workload = replace(WORKLOAD, multi_hot_sizes=range(1, 27))
    assert [table.total_accesses for table in true_profile(workload).tables] == pytest.approx(list(range(1, 27)))


def test_rows_that_are_not_scattered_stand_in_order_of_frequency():
    (batch,) = make_batches(replace(WORKLOAD, global_batch=20_000), 0, 1, 1, scattered=False)
    (same,) = make_batches(replace(WORKLOAD, global_batch=20_000), 0, 1, 1)
    table = WORKLOAD.table_rows.index(400)
    counts = np.bincount(batch.ids[table].flatten())
    assert counts.argmax() == 0
    assert sorted(counts) == sorted(np.bincount(same.ids[table].flatten(), minlength=len(counts)))


def received(mesh, plan_json):
    """What a rank receives in a step by a plan, and what it looks up at the end."""
    mesh = replace(mesh, hosts=(0, 0, 1, 1))
    plan = Plan.from_json(plan_json) if plan_json else None
    part = SparsePart.of(WORKLOAD, mesh, "collective", plan, scattered=False)
    part.gradient.fill_(1e-3)
    steps = len(part.batches)
    for number in range(steps):
        part.step(number)
    (counters,) = part.embeddings.counters
    num_bytes = counters.bytes_received / steps
    return num_bytes, part.embeddings(part.batches[0]).values.detach().numpy().tobytes()


@pytest.mark.parametrize("strategy", ["cyclic", "table_wise"])
def test_the_model_sees_what_a_step_moves(ranks, strategy):
    profile, request = true_profile(WORKLOAD), Request(batch_size=WORKLOAD.global_batch // 4)
    plan = search(strategy, profile, topology(4, 2), request)
    planned = ranks.run(received, plan.to_json(), world_size=4)
    cyclic = ranks.run(received, None, world_size=4)
    assert [values for _, values in planned] == [values for _, values in cyclic]
    for plan_, runs in ((plan, planned), (Plan.cyclic(profile.shapes, 4, 2), cyclic)):
        assert sum(n for n, _ in runs) == pytest.approx(cost_of(plan_, profile, request).total_bytes, rel=0.02)


def test_plans_that_are_not_there_are_named():
    with pytest.raises(
        SystemExit, match=r"--plan nothing\.json: neither a file nor a strategy; there are auto, cyclic"
    ):
        run(
            parse("", ["--plan", "nothing.json", "--quick"], plan="", hosts="", rate=""), Report("embedding_step", None)
        )
    with pytest.raises(SystemExit, match="--hosts needs --plan"):
        run(parse("", ["--hosts", "2x2", "--quick"], plan="", hosts="", rate=""), Report("embedding_step", None))
    with pytest.raises(SystemExit, match="--hosts 3x2: a cable joins 2 hosts"):
        run(parse("", ["--hosts", "3x2", "--quick"], plan="cyclic", hosts="", rate=""), Report("embedding_step", None))
    with pytest.raises(SystemExit, match="--rate is of steps without --plan"):
        run(parse("", ["--quick"], plan="cyclic", hosts="2", rate="1gbit"), Report("embedding_step", None))
    arguments = ["--quick", "--construction", "mlperf"]
    with pytest.raises(SystemExit, match="--plan needs --construction drawn"):
        run(parse("", arguments, plan="cyclic", hosts="", rate="", construction=""), Report("embedding_step", None))


@pytest.mark.slow
@pytest.mark.usefixtures("can_make_hosts")
def test_two_hosts(tmp_path):
    arguments = ["--plan", "cyclic", "--hosts", "2x2", "--quick", "--steps", "3", "--output", str(tmp_path / "lines")]
    run(parse("", arguments, plan="", hosts="", rate=""), Report("embedding_step", tmp_path / "lines"))
    assert (tmp_path / "lines").read_text().count('"predicted_cable_bytes"') == 2
