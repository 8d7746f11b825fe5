from dataclasses import replace

import pytest

from rowmesh.report.advice import advise
from rowmesh.report.run_record import RunRecord, read_run
from rowmesh.report.run_tables import TableFacts, Tables
from tests.support.written_runs import GROUP, train_line, write_run

NOTHING = Tables((), None)
PIPELINED = {"pipeline": {"depth": 1, "micro_batches": 2}}


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> RunRecord:
    """A run of which no rule finds anything."""
    record = read_run(write_run(tmp_path_factory.mktemp("runs") / "calm"))
    return replace(record, train=lines(), results=[without_optimum(record.results[0])])


def without_optimum(result):
    return replace(result, optimum={})


def lines(count=40, **changes):
    return [train_line(step, **({"waited_for_data_share": 0.0, "loss": 0.5} | changes)) for step in range(1, count + 1)]


def stages(**changes):
    return {f"step_ms/{stage}": value for stage, value in changes.items()}


def validation(*losses):
    return {"validation": [{"step": 10 * (i + 1), "log_loss": loss} for i, loss in enumerate(losses)]}


def test_no_rule_finds_anything_where_nothing_is_wrong(calm):
    assert advise(calm, NOTHING) == []


FALLING = [train_line(step, loss=0.6 - 0.002 * step) for step in range(1, 41)]
SLOWING = lines(20) + [train_line(step, loss=0.5, samples_per_s=1000.0) for step in range(21, 41)]


@pytest.mark.parametrize(
    "title, changes, evidence, action",
    [
        ("overfits", {"evaluations": validation(0.5, 0.45, 0.46)}, "after step 20 (0.45000)", "train.steps=20"),
        ("overfits", {"evaluations": validation(0.5, 0.45, 0.4521)}, None, None),  # 0.47 % more
        ("still falls", {"train": FALLING}, "0.5230", "train.epochs"),
        ("still falls", {"train": lines(19, loss=0.5)}, None, None),
        ("wait for data", {"train": lines(**stages(data=1.2), waited_for_data_share=0.11)}, "11.0 %", "local disk"),
        ("wait for data", {"train": lines(**stages(data=5.0), waited_for_data_share=0.02)}, None, None),
        ("ahead", {"train": lines(**stages(data=2.0)), "config": PIPELINED}, "18.2 % of a step", "pipeline.depth=2"),
        ("ahead", {"train": lines(**stages(data=2.0))}, None, None),
        ("Rows take long, and", {"train": lines(**stages(rows=4.0))}, "33.3 %", "pipeline.depth=auto"),
        ("Rows take long", {"train": lines(**stages(rows=4.0)), "config": PIPELINED}, "4.2 %", "placement.strategy"),
        ("Rows take long", {"train": lines(**stages(rows=4.0)), "about": {"ranks": 1}}, None, None),
        ("gradients", {"train": lines(**stages(all_reduce=4.0))}, "29.6 %", "data.batch_size"),
        ("gradients", {"train": lines(**stages(all_reduce=4.0)), "about": {"ranks": 1}}, None, None),
        ("slower", {"train": SLOWING}, "2,000 samples/s in the first quarter, 1,000 in", "memory"),
        ("unlike amounts", {"train": lines(memory_bytes_by_rank=[2 * 10**9, 10**9])}, "rank 0 uses 2.00 GB", "auto"),
    ],
)
def test_a_rule_finds_what_is_wrong_with_numbers(calm, title, changes, evidence, action):
    found = [advice for advice in advise(replace(calm, **changes), NOTHING) if title in advice.title]
    assert len(found) == (evidence is not None)
    for advice in found:
        assert evidence in advice.evidence
        assert action in advice.action


def test_a_run_that_kept_its_best_model_does_not_overfit(calm):
    rising, patient = validation(0.5, 0.45, 0.46), {"train": {"patience": 4}}
    assert not advise(replace(calm, evaluations=rising, config=patient), NOTHING)
    falling = replace(calm, evaluations=rising, config=patient, train=FALLING)
    assert not advise(falling, NOTHING), "longer would be worse, although the training loss still falls"
    (advice,) = advise(replace(calm, evaluations=rising, config={"train": {"patience": 0}}), NOTHING)
    assert advice.title == "The model overfits"


def test_idle_cores(calm):
    slow = lines(**stages(network=9.0))
    threads = {"torch": {"threads": 1}, "hardware": {"usable threads": 8}}
    (advice,) = advise(replace(calm, train=slow, environment=threads), NOTHING)
    assert "leave 6 of 8 hardware threads idle" in advice.evidence
    assert "OMP_NUM_THREADS=2" in advice.action
    assert not advise(replace(calm, train=slow), NOTHING)  # 2 ranks of 2 threads on 4


def test_fast_memory_that_is_too_small(calm):
    traffic = replace(calm.traffic, tiers={GROUP: {"rows_found": 70, "rows_read": 30}})
    (advice,) = advise(replace(calm, traffic=traffic), NOTHING)
    assert "70.0 % of the rows" in advice.evidence
    assert "tiers.fast_share (now 0.25)" in advice.action


def test_traffic_that_is_not_what_the_plan_expects(calm):
    assert not advise(calm, Tables((), 19_000.0))
    (advice,) = advise(calm, Tables((), 10_000.0))
    assert "0.02 MB a step were counted" in advice.evidence
    assert "(2.00 ×)" in advice.evidence


def test_predictions_that_are_too_high(calm):
    (result,) = calm.results
    numbers = {**result.numbers, "calibration": 1.2}
    (advice,) = advise(replace(calm, results=[replace(result, numbers=numbers)]), NOTHING)
    assert advice.title == "Predictions are too high"
    assert "1.200 times" in advice.evidence


def test_an_optimum_that_is_far(calm):
    (result,) = calm.results
    (advice,) = advise(replace(calm, results=[replace(result, optimum={"auc": 0.77})]), NOTHING)
    assert "AUC 0.75000 on test, where 0.77000" in advice.evidence
    assert not advise(replace(calm, results=[replace(result, optimum={"auc": 0.755})]), NOTHING)


def test_rare_ids(calm):
    tables = [TableFacts(f"C{i}", 9, rare_share={"test": 0.4 + 0.02 * i}) for i in range(12)]
    (advice,) = advise(calm, Tables(tables, None))
    assert "C11 (62.0 %), C10 (60.0 %), C9 (58.0 %), C8 (56.0 %) and 2 more" in advice.evidence
    assert "--min-count" in advice.action


def test_a_run_that_evaluated_nothing(calm):
    (advice,) = advise(replace(calm, evaluations={}), NOTHING)
    assert "train.eval_every=4" in advice.action
