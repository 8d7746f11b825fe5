"""Runs that are killed and resumed end as those that were never touched."""

import pytest

from tests.support.killed_runs import lines_of, model_of, train_killed, train_untouched

COLLECTIVE = ["parallel.transport=collective"]
STEPS = 16
MODES = {
    "plain": [],
    "one-sided": ["parallel.transport=one_sided"],
    "pipelined": [*COLLECTIVE, "pipeline.depth=2", "pipeline.micro_batches=2"],
    "pipelined, one-sided": ["parallel.transport=one_sided", "pipeline.depth=2"],
    "tiered": ["tables.storage=tiered", "tiers.fast_rows=300"],
    "tiered, pipelined": [*COLLECTIVE, "tables.storage=tiered", "tiers.fast_rows=300", "pipeline.depth=1"],
    "copies": ["placement.strategy=auto", "placement.extra_memory=0.3", "placement.drift.check_every=4"],
    "exact replicas": ["parallel.replicas=2"],
    "averaged replicas": ["parallel.replicas=2", "parallel.synchronization=average", "parallel.sync_every=4"],
    "cores": [
        "tables.tensor_train.min_rows=40",
        'tables.tensor_train.optimizer.name="adagrad"',
        "tables.tensor_train.rank=2",
    ],
    "adam": ['tables.optimizer.name="adam"', 'schedule.name="cosine"', "schedule.warmup_steps=4"],
    "early stopping": ["train.patience=3", "train.eval_every=2", "optimizer.lr=0.02", "tables.optimizer.lr=0.3"],
}
NEED_RANKS = ("copies", "exact replicas", "averaged replicas")


def check_killed(ranks, config_file, tmp_path, mode, world_size, kills, every=3):
    options = [*MODES[mode], f"checkpoint.every_steps={every}"]
    for name, train in (("untouched", train_untouched), ("killed", train_killed)):
        args = (kills,) if train is train_killed else ()
        train(ranks, config_file, [*options, f"run.folder={tmp_path / name}"], world_size, *args)
    untouched, killed = tmp_path / "untouched", tmp_path / "killed"
    assert model_of(killed) == model_of(untouched)
    assert (killed / "evaluation" / "test.json").exists()
    for name in ("metrics.jsonl", "counters.jsonl"):
        found, expected = lines_of(killed, name), lines_of(untouched, name)
        if name == "counters.jsonl" and ("pipelined" in mode or "tiered" in mode):
            found, expected = ([(line["step"], line["group"]) for line in lines] for lines in (found, expected))
        assert found == expected


@pytest.mark.parametrize(
    "mode, world_size",
    [
        ("pipelined", 2),
        ("tiered, pipelined", 2),
        ("copies", 2),
        ("averaged replicas", 2),
        ("cores", 1),
        ("early stopping", 1),
    ],
)
def test_a_run_that_is_killed_ends_as_one_that_was_not(ranks, config_file, tmp_path, mode, world_size):
    check_killed(ranks, config_file, tmp_path, mode, world_size, ["loop.step@8=raise"])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_is_killed_at_every_step_ends_as_one_that_was_not(ranks, config_file, tmp_path, mode, world_size):
    """Each life of the process comes one step further than the one before."""
    if mode in NEED_RANKS and world_size == 1:
        pytest.skip("there is one rank")
    every = 4 if mode == "averaged replicas" else 1
    kills = ["loop.step@1=raise", *["loop.step@2=raise"] * (STEPS - 1)]
    if every > 1:
        kills = [f"loop.step@{number}=raise" for number in (1, 2, 3, 5, 5, 6)]
    if mode == "early stopping":
        kills = kills[:4]
    check_killed(ranks, config_file, tmp_path, mode, world_size, kills, every)
