"""Processes that are killed while they train, write a checkpoint or resume: started again, they end as if they had not
been.
"""

import signal

import pytest

from rowmesh.checkpoint.series import Series, verify
from tests.support.killed_runs import lines_of, model_of
from tests.support.runs import prepare_run, rank_processes, start, wait_for_steps

OPTIONS = ["train.epochs=4", "train.log_every=2", "checkpoint.every_steps=3"]  # 16 steps
POINTS = [
    "checkpoint.begin@2",
    "checkpoint.prepare@2",
    "checkpoint.write_rows@9",
    "checkpoint.write_dense@2",
    "checkpoint.sync@2",
    "checkpoint.publish@2",
    "checkpoint.published@2",
    "checkpoint.prune@1",
]
RESTARTS = "--max-restarts=2"


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """The configuration, and the folder of a run that nothing disturbed, by its number of ranks."""
    folder = tmp_path_factory.mktemp("untouched")
    config_file, runs = prepare_run(folder), {}

    def run_of(ranks):
        if ranks not in runs:
            end(config_file, f"run.folder={folder / str(ranks)}", ranks=ranks)
            runs[ranks] = folder / str(ranks)
        return runs[ranks]

    return config_file, run_of


def end(config_file, *options, status=0, **how):
    """Trains to the end, or to that which is expected."""
    process = start(config_file, *OPTIONS, *options, **how)
    out, err = process.communicate(timeout=180)
    assert process.returncode == status, out + err
    return out + err


def check_equal(run, expected):
    assert model_of(run) == model_of(expected)
    for name in ("metrics.jsonl", "counters.jsonl"):
        assert lines_of(run, name) == lines_of(expected, name)


@pytest.mark.slow
@pytest.mark.parametrize("point", [*POINTS, "resume.cut@2", "resume.loaded"])
def test_a_run_that_is_killed_anywhere_goes_on(untouched, tmp_path, point):
    config_file, run_of = untouched
    here = f"run.folder={tmp_path / 'run'}"
    if point.startswith("resume"):
        end(config_file, here, faults="loop.step@8=kill", status=-signal.SIGKILL)
        end(config_file, here, "--resume", faults=f"{point}=kill", status=-signal.SIGKILL)
    else:
        end(config_file, here, faults=f"{point}=kill", status=-signal.SIGKILL)
    series = Series(tmp_path / "run" / "checkpoints")
    assert series.steps()
    for step in series.steps():
        verify(series.at(step))
    end(config_file, here, "--resume")
    check_equal(tmp_path / "run", run_of(0))
    assert len(list(series.folder.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["one_sided", "collective"])
def test_torchrun_restarts_a_run_that_goes_on_by_itself(untouched, tmp_path, transport):
    """Rank 1 is killed after the seventh step of each of its lives: after 7 and 13 steps of the run."""
    config_file, run_of = untouched
    options = [f"run.folder={tmp_path / 'run'}", f"parallel.transport={transport}", "--resume", "auto"]
    said = end(config_file, *options, ranks=2, launcher=[RESTARTS], faults="loop.step@7,rank1=kill")
    assert "resume    after step 6 of 16" in said
    assert "resume    after step 12 of 16" in said
    assert model_of(tmp_path / "run") == model_of(run_of(2))


@pytest.mark.slow
def test_with_exact_replicas_torchrun_restarts_a_run_that_lost_no_step(untouched, tmp_path):
    """Rank 1 is killed amid the eighth step of each of its lives, and there are no checkpoints but the other's."""
    config_file, _ = untouched
    options = ["parallel.replicas=2", "checkpoint.every_steps=1000", "--resume", "auto"]
    end(config_file, f"run.folder={tmp_path / 'untouched'}", *options, ranks=2)
    here = [f"run.folder={tmp_path / 'run'}", *options]
    said = end(config_file, *here, ranks=2, launcher=[RESTARTS], faults="engine.fetched@8,rank1=kill")
    assert "checkpoint after step 7 by ranks [0], which are all of a replica group" in said
    assert "resume    after step 7 of 16" in said
    assert "resume    after step 14 of 16" in said
    assert model_of(tmp_path / "run") == model_of(tmp_path / "untouched")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_preempted_run_goes_on(untouched, tmp_path, ranks, number):
    """The process is held between two steps, so that the signal finds it there."""
    config_file, run_of = untouched
    here = f"run.folder={tmp_path / 'run'}"
    held = tmp_path / "held"
    process = start(config_file, *OPTIONS, here, ranks=ranks, faults=f"loop.step@8,rank0=hold:{held}")
    wait_for_steps(process, tmp_path / "run" / "metrics.jsonl", count=3)
    while not held.exists():
        assert process.poll() is None, process.communicate()
    if ranks and number == signal.SIGTERM:
        process.send_signal(number)
    else:
        (rank_processes(process)["1"] if ranks else process).send_signal(number)
    held.with_name("held.go").touch()
    out, err = process.communicate(timeout=120)
    assert process.returncode == (1 if ranks else 75), out + err
    assert "stopped   by" in out
    assert "after step 9; the same command with --resume goes on from there" in out, out + err
    end(config_file, here, "--resume", ranks=ranks)
    assert model_of(tmp_path / "run") == model_of(run_of(ranks))
