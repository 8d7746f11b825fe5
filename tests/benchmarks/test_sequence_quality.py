"""The quality of sequence models is measured from files to intervals."""

import gzip
import json

import numpy as np
import pytest
import torch

from benchmarks import sequence_quality
from benchmarks.plain_sasrec import PlainSASRec, padded
from rowmesh.mesh import Mesh
from rowmesh.run.sequence.ranking import Seen, rank_targets


@pytest.mark.parametrize("model", ["sasrec", "plain_sasrec"])
def test_models_are_trained_and_tested(tmp_path, capsys, model):
    generator = np.random.default_rng(0)
    lines = ["user_id\titem_id\ttimestamp"]
    for user in range(30):
        first = int(generator.integers(12))
        lines += [f"{user}\t{(first + step) % 12}\t{step}" for step in range(8)]  # what follows is certain
    with gzip.open(tmp_path / sequence_quality.BEAUTY.file, "wt") as file:
        file.write("\n".join(lines) + "\n")
    options = ["--data", str(tmp_path), "--models", model, "--seeds", "2", "--epochs", "30", "--lr", "0.02"]
    sequence_quality.main(options)
    floor, *runs, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (floor["model"], [run["seed"] for run in runs], summary["seeds"]) == ("popularity", [0, 1], 2)
    assert summary["ndcg@10"] > floor["ndcg@10"] + 0.3  # HR@10 says nothing: no user has 10 items left to rank


def test_a_folder_without_events_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        sequence_quality.main(["--data", str(tmp_path)])
    assert "has not one of beauty_timed.tsv.gz and ml-100k.inter.tsv.gz" in capsys.readouterr().err


def test_plain_torch_ranks_as_rowmesh_does():
    """The same vectors, seen items and ties."""
    torch.manual_seed(0)
    plain = PlainSASRec(9, 4, 1, 2, max_length=3, dropout=0.0).eval()
    with torch.no_grad():
        plain.items.weight[5] = plain.items.weight[2]
    items, offsets, targets = torch.tensor([1, 2, 3, 4, 0]), torch.tensor([0, 3, 5]), torch.tensor([5, 1])
    seen = [torch.tensor([1, 3]), torch.tensor([0, 4, 7])]
    queries = plain(padded(items, offsets, 0))[[0, 1], [2, 1]]
    of_all = Seen(torch.tensor([0, 2, 5]), torch.cat(seen))
    expected = rank_targets(Mesh(), queries, targets, plain.items.weight, seen=of_all)
    assert expected.tied[0] == 1
    assert plain.ranks(items, offsets, targets, seen).equal(1 + expected.higher + expected.tied)
