"""Rank 0 alone prints."""

from rowmesh.run.console import Console


def test_rank_0_alone_prints(capsys):
    for rank in range(2):
        Console(rank).write(f"rank {rank}")
    assert capsys.readouterr().out == "rank 0\n"
