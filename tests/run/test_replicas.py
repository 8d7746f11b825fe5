"""Runs whose tables have replicas."""

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.placement import Plan
from rowmesh.run.commands import run_evaluation
from rowmesh.run.placement import configured_placement, shapes_of
from rowmesh.run.resolve import resolve
from rowmesh.run.tasks import task_of

OPTIONS = ["tables.dtype=float64", "train.epochs=1"]


def four_ranks():
    """Two hosts of two ranks."""
    return Mesh(world_size=4, hosts=(0, 0, 1, 1), pids=(1, 2, 1, 2))


def test_exact_replicas_train_the_same_model(train, tmp_path):
    plain, replicated = train("plain"), train("replicated", "parallel.replicas=2")
    assert replicated.metrics == pytest.approx(plain.metrics, abs=1e-9)
    assert "replicas  2 of " in replicated.out
    assert "on ranks [0], [1]; exact: gradients are summed" in replicated.out
    assert Plan.load(tmp_path / "replicated" / "plan.json").replica_counts == (2,)
    assert any(line["group"].endswith(", replicas") and line["bytes_sent"] for line in replicated.counters)
    alone = run_evaluation(tmp_path / "replicated")  # on one rank, which no replicas fit
    assert alone.auc == pytest.approx(plain.metrics["auc"], abs=1e-9)


def test_averaged_replicas_are_equal_where_they_are_evaluated_and_saved(train, tmp_path):
    """The last step, the eighth, is followed by an evaluation on two ranks; what is saved is evaluated on one."""
    options = ["parallel.replicas=2", "parallel.synchronization=average", "parallel.sync_every=7", "train.eval_every=8"]
    averaged = train("averaged", *options)
    assert "average: rows and moments are averaged every 7 steps" in averaged.out
    (between,) = (line for line in averaged.log if line["kind"] == "validation")
    assert run_evaluation(tmp_path / "averaged", split="validation").auc == pytest.approx(between["auc"], abs=1e-9)
    assert run_evaluation(tmp_path / "averaged").auc == pytest.approx(averaged.metrics["auc"], abs=1e-9)


def test_replicas_are_arranged_and_chosen_by_prediction(config_file, clicks):
    def placement(*options):
        return configured_placement(task_of(resolve(config_file, [*OPTIONS, *options]), clicks)[0], four_ranks())

    for together in ("shards", "replicas"):
        placed = placement("parallel.replicas=2", f"parallel.together={together}")
        assert (placed.plan.together, placed.plan.replica_counts) == (together, (2,))
    chosen = placement("parallel.replicas=2")
    assert "shards of a replica next to each other" in chosen.text
    assert "replicas of a shard next to each other" in chosen.text  # both costs are printed
    assert placement("parallel.replicas=auto").plan.notes["why"].startswith("M = ")
    assert placement("tables.replicas=2").plan.replica_counts == (2,)
    assert placement("tables.replicas=4", "parallel.replicas=2").plan.replica_counts == (4,)
    table = clicks.tables[0].name
    mixed = placement(f"tables.{table}.replicas=4").plan
    assert mixed.replicas == {spec.name: 4 if spec.name == table else 1 for spec in clicks.tables}


def test_what_cannot_be_is_refused(config_file, clicks, tmp_path):
    table = clicks.tables[0].name
    Plan.cyclic([], 4).save(tmp_path / "plan.json")
    shapes = shapes_of(resolve(config_file, OPTIONS), clicks)
    Plan.cyclic(shapes, 4, 2).save(tmp_path / "single.json")
    Plan.cyclic(shapes, 4, 2, replicas=2, together="shards").save(tmp_path / "shards.json")
    single, shards = (f"placement.plan={tmp_path}/{name}.json" for name in ("single", "shards"))
    for options, message in [
        (["parallel.replicas=3"], "4 ranks cannot form 3 replica groups .* 1, 2, 4"),
        ([f"tables.{table}.replicas=3"], "4 ranks cannot form 3 replica groups"),
        (["parallel.replicas=2", f"placement.plan={tmp_path}/plan.json"], "has its own replicas; leave"),
        ([f"tables.{table}.replicas=2", "placement.strategy=auto"], r"cannot go with placement\.strategy"),
        ([f"tables.{table}.replicas=2", "parallel.replicas=auto"], r"cannot be combined with parallel\.replicas"),
        (["parallel.synchronization=average"], "is for replicas, and there are none"),
        (["parallel.synchronization=average", "placement.strategy=cyclic"], "is for replicas, and there are none"),
        (["parallel.synchronization=average", single], "is for replicas, and there are none"),
        (["parallel.together=shards"], r"parallel\.together='shards' is for replicas, and there are none; give"),
        (["parallel.together=replicas", shards], "cannot change a plan from a file, which puts shards next to"),
        (["parallel.sync_every=2"], "sync_every=2 is for synchronization='average'"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            configured_placement(task_of(resolve(config_file, [*OPTIONS, *options]), clicks)[0], four_ranks())
    accepted = resolve(config_file, [*OPTIONS, shards, "parallel.together=shards", "parallel.synchronization=average"])
    assert configured_placement(task_of(accepted, clicks)[0], four_ranks()).plan.replica_counts == (2,)


def test_drift_cannot_follow_replicas(config_file, command, tmp_path):
    options = ["parallel.replicas=2", "placement.drift.enabled=on", f"run.folder={tmp_path / 'run'}"]
    done = command(["train", str(config_file), *OPTIONS, *options], ranks=2)
    assert done.status
    assert "cannot follow tables that have replicas; leave it at auto" in done.err


DYNAMIC = ["tables.storage=dynamic", "tables.dynamic.capacity=2000", "tables.initializer.bound=0.05"]


@pytest.mark.slow
def test_replicas_of_dynamic_tables_train(train):
    """Of tables of a dense vocabulary that all fit, kept exact: the same model."""
    plain = train("plain", *DYNAMIC)
    exact = train("exact", *DYNAMIC, "parallel.replicas=2")
    assert exact.metrics == pytest.approx(plain.metrics, abs=1e-9)
    averaged = train("averaged", *DYNAMIC, "parallel.replicas=2", "parallel.synchronization=average")
    assert averaged.metrics["auc"] == pytest.approx(plain.metrics["auc"], abs=0.1)


def test_dynamic_tables_are_not_placed(config_file, clicks, tmp_path):
    def placement(*options):
        return configured_placement(task_of(resolve(config_file, [*OPTIONS, *options]), clicks)[0], four_ranks())

    table = clicks.tables[0].name
    own = [f"tables.{table}.{option.removeprefix('tables.')}" for option in DYNAMIC]
    assert placement(*DYNAMIC, "parallel.replicas=2").plan.replica_counts == (2,)
    assert "hashes of ids say where" in placement(*DYNAMIC, "placement.strategy=auto").source
    for options in (["placement.strategy=auto"], ["parallel.replicas=2"]):
        plan = placement(*own, *options).plan
        assert {each.shape.name for each in plan.tables} == {spec.name for spec in clicks.tables}
        assert plan.table(table).shape.num_rows == 2000
    with pytest.raises(ConfigurationError, match="dynamic tables have none; give a number"):
        placement(*own, "parallel.replicas=auto")
