"""Runs that are placed by a plan."""

import json
import re

import pytest

from rowmesh.data import Prepared
from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.placement import Plan, RowRange, TablePlan
from rowmesh.placement.topology import Topology
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.placement import configured_placement, evaluation_placement, problem_of, request_of, shapes_of
from rowmesh.run.resolve import resolve
from rowmesh.run.tasks import task_of

FLOAT64 = ["tables.dtype=float64", "train.epochs=1"]


def two_ranks():
    return Mesh(world_size=2, hosts=(0, 0), pids=(1, 2))


def task_on(clicks, config):
    return task_of(config, clicks)[0]


@pytest.fixture
def make_plan(config_file, clicks, tmp_path):
    """Writes a plan in which ranges of every table follow rules in turn, and returns its path."""

    def make_plan(*rules, ranks=2, options=FLOAT64):
        shapes = shapes_of(resolve(config_file, options), clicks)
        plan = Plan(
            tuple(TablePlan(shape, _ranges(shape.num_rows, rules, ranks)) for shape in shapes), ranks, ranks, "mixed"
        )
        plan.save(tmp_path / "plan.json")
        return tmp_path / "plan.json"

    return make_plan


def _ranges(num_rows, rules, ranks):
    starts = sorted({num_rows * part // (2 * len(rules)) for part in range(2 * len(rules))})
    return tuple(
        RowRange(
            start, stop, rules[i % len(rules)], **({"rank": i % ranks} if rules[i % len(rules)] == "fixed" else {})
        )
        for i, (start, stop) in enumerate(zip(starts, [*starts[1:], num_rows], strict=True))
    )


def test_any_plan_trains_the_same_model(train, make_plan, tmp_path):
    plain = train("plain")
    for name, rules in {"single": ("fixed", "cyclic"), "copied": ("replicated", "node", "fixed", "cyclic")}.items():
        path = make_plan(*rules)
        planned = train(name, f"placement.plan={path}")
        assert (planned.metrics, planned.losses) == (plain.metrics, plain.losses)
        copies = r"hot [1-9]\d*, warm [1-9]\d*" if name == "copied" else "hot 0, warm 0"
        assert re.search(rf"^plan      mixed, {path}: rows {copies}, cold \d+$", planned.out, re.MULTILINE)
        assert Plan.load(tmp_path / name / "plan.json") == Plan.load(path)
    made = train("made", "placement.strategy=auto")
    assert (made.metrics, made.losses) == (plain.metrics, plain.losses)
    line = next(line for line in made.out.splitlines() if line.startswith("plan "))
    plan = Plan.load(tmp_path / "made" / "plan.json")
    assert line.startswith(f"plan      {plan.strategy}, made for topology 1x2: rows hot ")
    assert line.endswith(plan.notes["why"])


def test_a_run_moves_the_bytes_that_were_predicted(train, config_file, clicks, tmp_path):
    trained = train("run", "placement.strategy=cyclic", "parallel.transport=collective")
    config = resolve(config_file, FLOAT64)
    predicted = problem_of(task_on(clicks, config), Topology.uniform(2)).cost(Plan.load(tmp_path / "run" / "plan.json"))
    sent = [line["bytes_sent"] for line in trained.counters if line["group"] != "all groups"]
    whole_batches = sent[:7]
    # An epoch draws without replacement, and a batch is 7 % of this one: it holds slightly more distinct rows.
    assert sum(whole_batches) / 7 == pytest.approx(predicted.total_bytes, rel=0.04)
    assert sum(whole_batches) / 7 > predicted.total_bytes


def test_a_run_that_measures_drift_trains_the_same_model(train, make_plan):
    plain = train("plain")
    path = make_plan("fixed", "replicated", "fixed", "fixed")  # the worst for its ranks
    limits = ["placement.drift.check_every=1", "placement.drift.sample_every=1", "placement.drift.min_balance=1.0"]
    followed = train("followed", f"placement.plan={path}", *limits)
    assert (followed.metrics, followed.losses) == (plain.metrics, plain.losses)


def test_without_a_plan_tables_are_cyclic(config_file, tmp_path, capsys):
    run_training(resolve(config_file, ["train.steps=1"]))
    assert "plan      cyclic, over all ranks, as no plan is given: rows hot 0, warm 0, cold " in capsys.readouterr().out
    assert Plan.load(tmp_path / "run" / "plan.json").world_size == 1


def test_an_evaluation_takes_the_plan_of_the_run_or_is_cyclic(train, make_plan, command, tmp_path, capsys):
    path = make_plan("fixed", "cyclic")
    metrics = train("run", f"placement.plan={path}").metrics
    path.unlink()  # the run keeps its own
    done = command(["evaluate", str(tmp_path / "run")], ranks=2)
    assert done.status == 0, done.err
    assert f"plan      mixed, {tmp_path}/run/plan.json, as in training: rows" in done.out
    assert json.loads((tmp_path / "run" / "evaluation" / "test.json").read_text())["auc"] == metrics["auc"]
    alone = run_evaluation(tmp_path / "run")
    assert "plan      cyclic, over all ranks, as the run's plan is for 2 ranks in nodes of 2" in capsys.readouterr().out
    assert alone.auc == pytest.approx(metrics["auc"], abs=1e-9)


def test_an_evaluation_may_ask_for_another_placement(config_file, clicks, make_plan, tmp_path):
    path = make_plan("fixed")
    config = resolve(config_file, [*FLOAT64, f"placement.plan={path}"])
    placement = evaluation_placement(task_on(clicks, config), two_ranks(), tmp_path / "none.json", changed=True)
    assert placement.plan == Plan.load(path)
    placement = evaluation_placement(task_on(clicks, config), two_ranks(), tmp_path / "none.json", changed=False)
    assert placement.source == "over all ranks, as the run recorded no plan"
    other = resolve(config_file, ["tables.dim=8"])
    placement = evaluation_placement(task_on(clicks, other), two_ranks(), path, changed=False)
    assert placement.source.endswith("in nodes of 2, or other tables")


def test_plans_that_do_not_belong_to_the_run_are_refused(config_file, clicks, make_plan, tmp_path):
    path = make_plan("cyclic")
    for options, ranks, message in [
        (FLOAT64, 1, rf"placement.plan {path}: the plan is for 2 ranks, but 1 take part; plan again, or start as many"),
        (["tables.dim=8"], 2, rf"placement.plan {path}: the plan is for another table 'C1'.*; plan again"),
    ]:
        mesh = two_ranks() if ranks == 2 else Mesh()
        with pytest.raises(ConfigurationError, match=message):
            configured_placement(task_on(clicks, resolve(config_file, [*options, f"placement.plan={path}"])), mesh)
    for options, message in [
        ([f"placement.plan={tmp_path}/none.json"], r"cannot read the plan .*none.json: No such file"),
        ([f"placement.plan={config_file}"], r"clicks.toml: not a plan .*; make it with `rowmesh plan`"),
        (["placement.strategy=best"], "no placement strategy 'best'; there are auto"),
        (["placement.strategy=auto", "placement.topology=2x4"], r"placement.topology: 2x4 is for 8 ranks, but 2 take"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            configured_placement(task_on(clicks, resolve(config_file, options)), two_ranks())


def test_a_refusal_is_one_message_and_leaves_nothing(config_file, make_plan, command, tmp_path):
    path = make_plan("cyclic", ranks=4)
    done = command(["train", str(config_file), *FLOAT64, f"placement.plan={path}"], ranks=2)
    assert done.status != 0
    assert f"error: placement.plan {path}: the plan is for 4 ranks, but 2 take part" in done.err
    assert "rowmesh/run/" not in done.err
    assert not (tmp_path / "run").exists()


def test_paths_are_kept_absolute_in_the_run(config_file, make_plan, tmp_path, monkeypatch):
    make_plan("cyclic", ranks=1, options=())
    monkeypatch.chdir(tmp_path)
    run_training(resolve(config_file, ["train.steps=1", "placement.plan=plan.json"]))
    assert resolve(tmp_path / "run" / "config.toml").placement.plan == str(tmp_path / "plan.json")


def test_plan_and_strategy_exclude_each_other(config_file):
    with pytest.raises(ConfigurationError, match=r"placement: give plan='a.json' or strategy='auto', not both"):
        resolve(config_file, ["placement.plan=a.json", "placement.strategy=auto"])


def test_tables_of_the_run_are_those_of_its_data(config_file, clicks):
    shapes = shapes_of(resolve(config_file, ["tables.dtype=bfloat16", "tables.optimizer.name=adam"]), clicks)
    assert [shape.num_rows for shape in shapes] == [table.num_rows for table in Prepared.open(clicks.folder).tables]
    assert {(shape.value_bytes, shape.gradient_bytes, shape.state_bytes) for shape in shapes} == {(8, 16, 32)}


@pytest.mark.parametrize(
    ("overrides", "nodes", "allows"),
    [
        ([], 1, False),  # ranks of one host read each other's memory
        ([], 2, True),
        (["parallel.transport=collective"], 1, True),
        (["parallel.transport=one_sided"], 1, False),
        (["parallel.transport=collective", "train.device=cuda"], 1, False),
        (["parallel.transport=collective", "pipeline.depth=1"], 2, False),
    ],
)
def test_sums_travel_in_messages_of_plain_steps_on_hosts(config_file, overrides, nodes, allows):
    config = resolve(config_file, ["data.batch_size=64", *overrides])
    assert request_of(config, Topology.grouped(nodes, 2, 4.21)).allows_sums == allows


def test_a_run_whose_tables_send_sums_says_so(train, tmp_path):
    done = train("sums", "placement.strategy=cyclic", "parallel.transport=collective", "tables.C1.send=sums")
    plan = Plan.load(tmp_path / "sums" / "plan.json")
    assert [table.send for table in plan.tables] == ["sums", "rows", "rows", "rows", "rows"]
    assert (done.metrics, done.losses) == ((plain := train("rows")).metrics, plain.losses)
    chosen = train("chosen", "placement.strategy=auto", "parallel.transport=collective", "tables.send=auto")
    notes = Plan.load(tmp_path / "chosen" / "plan.json").notes
    assert "of the busiest rank" in notes["sums"] or "the busiest rank has" in notes["sums"]
    assert notes["sums"] in next(line for line in chosen.out.splitlines() if line.startswith("plan "))
