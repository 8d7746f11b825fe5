"""A program can switch off what a run prints."""

from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.console import Console
from rowmesh.run.resolve import resolve


def test_a_run_prints_nothing_on_a_console_that_is_off(config_file, tmp_path, capsys):
    console = Console(is_on=False)
    trained = run_training(resolve(config_file, ["train.steps=2", "train.eval_every=1"]), console=console)
    assert trained == run_evaluation(tmp_path / "run", console=console)
    assert capsys.readouterr() == ("", "")


def test_rank_0_alone_prints(capsys):
    for rank in range(2):
        Console().of_rank(rank).write(f"rank {rank}")
    assert capsys.readouterr().out == "rank 0\n"
