"""The quality of sequence models is measured from files to intervals."""

import gzip
import json

import numpy as np

from benchmarks import sequence_quality


def test_models_are_trained_and_tested(tmp_path, capsys):
    generator = np.random.default_rng(0)
    lines = ["user_id\titem_id\ttimestamp"]
    for user in range(30):
        first = int(generator.integers(12))
        lines += [f"{user}\t{(first + step) % 12}\t{step}" for step in range(8)]  # what follows is certain
    with gzip.open(tmp_path / sequence_quality.FILE, "wt") as file:
        file.write("\n".join(lines) + "\n")
    options = ["--data", str(tmp_path), "--models", "sasrec", "--seeds", "2", "--epochs", "60", "--lr", "0.01"]
    sequence_quality.main(options)
    floor, *runs, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (floor["model"], [run["seed"] for run in runs], summary["seeds"]) == ("popularity", [0, 1], 2)
    assert summary["ndcg@10"] > floor["ndcg@10"] + 0.3  # HR@10 says nothing: no user has 10 items left to rank
