"""What a command that trains says of its host before it begins."""

from dataclasses import replace

import torch

from rowmesh.cli import process
from rowmesh.doctor import facts


def test_rank_0_says_what_is_slow(monkeypatch, capsys):
    here = replace(facts.read_facts(network=False), processors=2, threads_per_core=1, processor_limit=None)
    monkeypatch.setattr(facts, "read_facts", lambda **_: replace(here, huge_pages="always", kernel_folder="."))
    monkeypatch.setattr("rowmesh.observe.allocator.keep_memory", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    for rank, variables, lines in [(0, {}, 0), (1, {"OMP_NUM_THREADS": "2"}, 0), (0, {"OMP_NUM_THREADS": "2"}, 1)]:
        monkeypatch.setenv("RANK", str(rank))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        process.prepare_process()
        out = capsys.readouterr().out
        assert out.count("\n") == lines, out
    assert "slow      threads: 2 of torch on each of 2 ranks" in out
    assert "export OMP_NUM_THREADS=1" in out
